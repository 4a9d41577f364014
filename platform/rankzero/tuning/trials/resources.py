"""Shares of a machine, so that trials run side by side and do not disturb each other. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rankzero.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class Share:
    """What one trial may use; None: everything."""

    gpus: tuple[str, ...] | None = None
    """As CUDA_VISIBLE_DEVICES names them."""
    cores: tuple[int, ...] | None = None


EVERYTHING = Share()


def visible_gpus(count: int, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the `count` GPUs that this process sees."""
    named = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def shares(parallel: int, processes: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Share]:
    """Return disjoint shares for trials of some processes each. Raises UserError where there is too little."""
    if parallel == 1:
        return [EVERYTHING]
    if gpus and parallel * processes > len(gpus):
        raise UserError(
            f"--parallel {parallel} with {processes} processes each needs {parallel * processes} GPUs, and there are "
            f"{len(gpus)}: give --nproc {max(1, len(gpus) // parallel)}, or fewer in parallel"
        )
    if parallel > len(cores):
        raise UserError(
            f"--parallel {parallel} needs as many processor cores, and there are {len(cores)}"
        )
    each = len(cores) // parallel
    blocks = [tuple(cores[number * each : (number + 1) * each]) for number in range(parallel)]
    groups = [
        tuple(gpus[number * processes : (number + 1) * processes]) or None
        for number in range(parallel)
    ]
    return [Share(group, block) for group, block in zip(groups, blocks, strict=True)]
