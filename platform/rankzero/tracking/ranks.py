"""Which rank am I? By the environment of whichever launcher started this process."""

from __future__ import annotations

import dataclasses
import json
import os
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
        return max(1, self.world_size // self.local_world_size)

    @property
    def first(self) -> bool:
        """Tell whether this is rank 0, the one that writes."""
        return self.rank == 0


def detect(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return this process's ranks; a single process where no launcher is recognised."""
    for launcher in (_torchrun, _horovod, _open_mpi, _tensorflow, _slurm):
        found = launcher(environ)
        if found is not None:
            return found
    return Ranks()


def _torchrun(environ: Mapping[str, str]) -> Ranks | None:
    return _read(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def _horovod(environ: Mapping[str, str]) -> Ranks | None:
    prefix = "HOROVOD_"
    return _read(
        environ, prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE", prefix + "CROSS_RANK"
    )


def _open_mpi(environ: Mapping[str, str]) -> Ranks | None:
    prefix = "OMPI_COMM_WORLD_"
    return _read(
        environ, prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE", prefix + "NODE_RANK"
    )


def _slurm(environ: Mapping[str, str]) -> Ranks | None:
    if "SLURM_STEP_ID" not in environ:  # a shell inside an allocation is no task of a job step
        return None
    return _read(environ, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID")


def _tensorflow(environ: Mapping[str, str]) -> Ranks | None:
    try:
        config = json.loads(environ["TF_CONFIG"])
        workers = [*config["cluster"].get("chief", []), *config["cluster"].get("worker", [])]
        task = config["task"]
        offset = len(config["cluster"].get("chief", [])) if task["type"] == "worker" else 0
        rank = int(task["index"]) + offset
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    return Ranks(rank=rank, world_size=max(1, len(workers)), node_rank=rank)


def _read(
    environ: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str, node: str
) -> Ranks | None:
    if rank not in environ or size not in environ:
        return None
    try:
        return Ranks(
            rank=int(environ[rank]),
            world_size=int(environ[size]),
            local_rank=int(environ.get(local_rank, 0)),
            local_world_size=int(environ.get(local_size, 1)),
            node_rank=int(environ.get(node, 0)),
        )
    except ValueError:
        return None
