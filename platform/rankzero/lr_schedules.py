"""Learning-rate schedules as pure functions of the step: nothing to checkpoint, nothing to restore. Pure."""

from __future__ import annotations

import math

ONE_CYCLE_PEAK = (
    0.3  # the fraction of the run at which the one-cycle schedule peaks, as in Smith & Topin (2018)
)
ONE_CYCLE_START = 1 / 25  # where it starts, as a fraction of the peak


def factor(schedule: str, step: int, total_steps: int, warmup_steps: int = 0) -> float:
    """Return the multiplier of the base learning rate at `step`, 0 <= step < total_steps.

    A linear warm-up over `warmup_steps` comes first; the schedule spans what is left.
    It is positive at every step, the last one included.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return _SHAPES[schedule](progress)


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _one_cycle(progress: float) -> float:
    if progress < ONE_CYCLE_PEAK:
        rise = _cosine(1.0 - progress / ONE_CYCLE_PEAK)
        return ONE_CYCLE_START + (1.0 - ONE_CYCLE_START) * rise
    return _cosine((progress - ONE_CYCLE_PEAK) / (1.0 - ONE_CYCLE_PEAK))


_SHAPES = {"constant": _constant, "linear": _linear, "cosine": _cosine, "one_cycle": _one_cycle}
