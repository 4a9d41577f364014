"""Which rank am I? By the environment of whichever launcher started this process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among the job's processes. All counts are at least 1, all ranks at least 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @property
    def node_count(self) -> int:
        """As if all nodes had as many processes as this one."""
        return -(-self.world_size // self.local_world_size)

    @property
    def first(self) -> bool:
        """Tell whether this is rank 0, the one that writes."""
        return self.rank == 0


def detect(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return this process's ranks; a single process where no launcher is recognised."""
    for launcher in (_torchrun, _horovod, _open_mpi, _tensorflow, _slurm, _mpich):
        try:
            found = launcher(environ)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError):
            continue  # not this launcher, or not one that says what it should
        if _makes_sense(found):
            return found
    return Ranks()


def _torchrun(environ: Mapping[str, str]) -> Ranks:
    """Torchrun's, accelerate's, and DeepSpeed's, which has words of its own for who shares a machine."""
    return Ranks(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ.get("LOCAL_RANK", 0)),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or 1),
        node_rank=int(environ.get("GROUP_RANK") or environ.get("CROSS_RANK") or 0),
    )


def _horovod(environ: Mapping[str, str]) -> Ranks:
    return Ranks(
        rank=int(environ["HOROVOD_RANK"]),
        world_size=int(environ["HOROVOD_SIZE"]),
        local_rank=int(environ.get("HOROVOD_LOCAL_RANK", 0)),
        local_world_size=int(environ.get("HOROVOD_LOCAL_SIZE", 1)),
        node_rank=int(environ.get("HOROVOD_CROSS_RANK", 0)),
    )


def _open_mpi(environ: Mapping[str, str]) -> Ranks:
    prefix = (
        "OMPI_COMM_WORLD_"  # its NODE_RANK is no node's rank, but the process's rank on its node
    )
    return _by_slot(
        rank=int(environ[prefix + "RANK"]),
        world_size=int(environ[prefix + "SIZE"]),
        local_rank=int(environ.get(prefix + "LOCAL_RANK", 0)),
        local_world_size=int(environ.get(prefix + "LOCAL_SIZE", 1)),
    )


def _mpich(environ: Mapping[str, str]) -> Ranks:
    """MPICH's and Intel MPI's; Slurm may set PMI's variables as well, but says more itself."""
    return _by_slot(
        rank=int(environ["PMI_RANK"]),
        world_size=int(environ["PMI_SIZE"]),
        local_rank=int(environ.get("MPI_LOCALRANKID", 0)),
        local_world_size=int(environ.get("MPI_LOCALNRANKS", 1)),
    )


def _slurm(environ: Mapping[str, str]) -> Ranks:
    environ["SLURM_STEP_ID"]  # a shell inside an allocation is no task of a job step
    node = int(environ.get("SLURM_NODEID", 0))
    return Ranks(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]),
        local_rank=int(environ.get("SLURM_LOCALID", 0)),
        local_world_size=_slurm_tasks(environ, node),
        node_rank=node,
    )


def _slurm_tasks(environ: Mapping[str, str], node: int) -> int:
    """Return how many tasks run on `node`, by a list such as ``4(x2),3``."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or "1"
    groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group) for group in listed.split(",")]
    counts = [int(group[1]) for group in groups if group for _ in range(int(group[2] or 1))]
    return counts[min(node, len(counts) - 1)]


def _tensorflow(environ: Mapping[str, str]) -> Ranks:
    """Number the tasks kind after kind: a parameter server of index 0 is not rank 0, which writes."""
    config = json.loads(environ["TF_CONFIG"])
    kinds = dict.fromkeys(["chief", "master", "worker", *config["cluster"]])
    hosts = {kind: len(config["cluster"].get(kind, [])) for kind in kinds}
    before = itertools.takewhile(lambda kind: kind != config["task"]["type"], hosts)
    rank = sum(hosts[kind] for kind in before) + int(config["task"]["index"])
    return Ranks(rank=rank, world_size=max(sum(hosts.values()), rank + 1), node_rank=rank)


def _by_slot(rank: int, world_size: int, local_rank: int, local_world_size: int) -> Ranks:
    """Return the ranks where the launcher does not number nodes, but fills one after the other."""
    return Ranks(
        rank, world_size, local_rank, local_world_size, node_rank=rank // max(1, local_world_size)
    )


def _makes_sense(found: Ranks) -> bool:
    others = found.local_rank, found.local_world_size - 1, found.node_rank
    return 0 <= found.rank < found.world_size and min(others) >= 0
