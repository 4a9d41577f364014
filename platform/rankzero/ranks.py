"""This process's rank, from the environment variables of the launcher that started it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping

SAME_SAMPLES = ("tp", "pp")
"""Strategies under which all ranks see the same samples."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's place in its job. All counts are at least 1, all ranks at least 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @property
    def node_count(self) -> int:
        """The number of nodes, if all have as many processes as this one."""
        return -(-self.world_size // self.local_world_size)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes the run."""
        return self.rank == 0


def default_count(strategy: str, gpus: int) -> int:
    """Return how many processes a training starts on a machine with `gpus` GPUs by default."""
    return 1 if strategy in ("single", "dp") else max(1, gpus)


def shards(strategy: str, processes: int) -> int:
    """Return the number of parts that the processes of a training divide a batch into."""
    return 1 if strategy in SAME_SAMPLES else processes


def detect(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return this process's ranks. Without a known launcher, it is a single process."""
    launchers = [_torchrun, _horovod, _open_mpi, _tensorflow, _slurm, _mpich]
    # Ray's daemon may be a task of srun or mpirun, and its workers inherit that task's variables.
    if "RAY_RAYLET_PID" in environ:
        launchers = [_torchrun, _horovod, _tensorflow]
    for launcher in launchers:
        try:
            found = launcher(environ)
        except (KeyError, ValueError, TypeError, AttributeError, IndexError):
            continue  # Another launcher, or variables that make no sense.
        others = found.local_rank, found.local_world_size - 1, found.node_rank
        if 0 <= found.rank < found.world_size and min(others) >= 0:
            return found
    return Ranks()


def _torchrun(environ: Mapping[str, str]) -> Ranks:
    """Read the variables of torchrun, accelerate and DeepSpeed."""
    node_rank = environ.get("GROUP_RANK") or environ.get("CROSS_RANK") or 0
    if not environ.get("LOCAL_WORLD_SIZE") and "LOCAL_SIZE" in environ:  # DeepSpeed's name
        environ = {**environ, "LOCAL_WORLD_SIZE": environ["LOCAL_SIZE"]}
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return _named(environ, *names, node_rank=int(node_rank))


def _horovod(environ: Mapping[str, str]) -> Ranks:
    names = "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    return _named(environ, *names, node_rank=int(environ.get("HOROVOD_CROSS_RANK", 0)))


def _open_mpi(environ: Mapping[str, str]) -> Ranks:
    # OMPI_COMM_WORLD_NODE_RANK is not read: it is the process's rank on its node, not the node's.
    mpi = "OMPI_COMM_WORLD_"
    return _named(environ, mpi + "RANK", mpi + "SIZE", mpi + "LOCAL_RANK", mpi + "LOCAL_SIZE")


def _mpich(environ: Mapping[str, str]) -> Ranks:
    """Read the variables of MPICH and Intel MPI."""
    # Slurm may set these as well. `detect` asks Slurm first, whose own variables know the node.
    return _named(environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _slurm(environ: Mapping[str, str]) -> Ranks:
    environ["SLURM_STEP_ID"]  # A shell inside an allocation has none: it is not a task.
    node = int(environ.get("SLURM_NODEID", 0))
    # How many tasks each node runs, such as ``4(x2),3``.
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or "1"
    groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group) for group in listed.split(",")]
    counts = [int(group[1]) for group in groups if group for _ in range(int(group[2] or 1))]
    return Ranks(
        rank=int(environ["SLURM_PROCID"]),
        world_size=int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]),
        local_rank=int(environ.get("SLURM_LOCALID", 0)),
        local_world_size=counts[min(node, len(counts) - 1)],
        node_rank=node,
    )


def _tensorflow(environ: Mapping[str, str]) -> Ranks:
    """Number the tasks of TF_CONFIG, one kind after the other."""
    # A parameter server with index 0 must not become rank 0, which writes the run.
    config = json.loads(environ["TF_CONFIG"])
    kinds = dict.fromkeys(["chief", "master", "worker", *config["cluster"]])
    hosts = {kind: len(config["cluster"].get(kind, [])) for kind in kinds}
    before = itertools.takewhile(lambda kind: kind != config["task"]["type"], hosts)
    rank = sum(hosts[kind] for kind in before) + int(config["task"]["index"])
    return Ranks(rank=rank, world_size=max(sum(hosts.values()), rank + 1), node_rank=rank)


def _named(environ: Mapping[str, str], *names: str, node_rank: int | None = None) -> Ranks:
    """Read variables by name. Launchers that number no nodes fill one node after the other."""
    rank, world_size, local_rank, local_world_size = names
    number, local_size = int(environ[rank]), int(environ.get(local_world_size) or 1)
    if node_rank is None:
        node_rank = number // max(1, local_size)
    place = int(environ.get(local_rank, 0))
    return Ranks(number, int(environ[world_size]), place, local_size, node_rank)
