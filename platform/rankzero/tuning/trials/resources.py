"""Shares of a machine, so that trials side by side do not disturb each other. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rankzero.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(frozen=True)
class Share:
    """The resources that one trial may use; None: all."""

    gpus: tuple[str, ...] | None = None
    """By their names in CUDA_VISIBLE_DEVICES."""
    cores: tuple[int, ...] | None = None


def shares(
    parallel: int, processes: int, gpus: int, cores: Sequence[int], environ: Mapping[str, str]
) -> list[Share]:
    """Return disjoint shares for `parallel` trials. Raises UserError if the machine is too small.

    `processes`: of each trial. `gpus`: the number that this process sees. `cores`: the numbers of
    the usable processor cores.
    """
    # If the variable is set, numbers would mean other GPUs than those this process sees.
    names = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    if gpus and all(name.startswith("MIG-") for name in names):
        # A process sees one of them only.
        gpus = len(names) or gpus
    if gpus and parallel * processes > gpus:
        raise UserError(
            f"--parallel {parallel} with {processes} processes each needs {parallel * processes} "
            f"GPUs, and there are {gpus}: give --nproc {max(1, gpus // parallel)}, or a smaller "
            "--parallel"
        )
    if parallel > len(cores):
        raise UserError(
            f"--parallel {parallel} needs as many processor cores, and there are {len(cores)}: "
            "give a smaller --parallel"
        )
    names = names[:gpus] or [str(number) for number in range(gpus)]
    # Cores are divided also with GPUs: data loading of one trial must not slow another one.
    each = len(cores) // parallel
    return [
        Share(
            gpus=tuple(names[number * processes : (number + 1) * processes]) or None,
            cores=tuple(cores[number * each : (number + 1) * each]),
        )
        for number in range(parallel)
    ]
