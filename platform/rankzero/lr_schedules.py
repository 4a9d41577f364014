"""Learning-rate schedules as pure functions of the step. They have no state to checkpoint. Pure."""

from __future__ import annotations

import math

# The one-cycle schedule peaks at this fraction of the run, as in Smith & Topin (2018).
_ONE_CYCLE_PEAK = 0.3
# Its start, as a fraction of the peak.
_ONE_CYCLE_START = 1 / 25


def factor(schedule: str, step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """Return the factor on the base learning rate at `step`, with 0 <= step < total_steps.

    A linear warm-up over `warmup_steps` comes first, for one_cycle in the place of its own rise.
    The schedule covers the steps that are left.
    The factor is positive at every step, also at the last.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    # It has risen in its warm-up.
    peak = 0.0 if warmup_steps else _ONE_CYCLE_PEAK
    match schedule:
        # The training loop itself reduces the learning rate on a plateau.
        case "constant" | "plateau":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return _cosine(progress)
        case "one_cycle" if progress < peak:
            rise = _cosine(1.0 - progress / peak)
            return _ONE_CYCLE_START + (1.0 - _ONE_CYCLE_START) * rise
        case "one_cycle":
            return _cosine((progress - peak) / (1.0 - peak))
        case _:
            raise ValueError(f"no schedule is called {schedule!r}")


def _cosine(progress: float) -> float:
    """Return 1 at the start and 0 at the end, along half a cosine wave."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
