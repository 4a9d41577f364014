"""Numbers out of what a journal or a user holds."""

from __future__ import annotations

import math
from collections.abc import Mapping


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return those of the values that are numbers."""
    found = {str(key): number(value) for key, value in values.items()}
    return {key: real for key, real in found.items() if real is not None}


_LARGEST_INTEGER = 2**63 - 1


def number(value: object) -> float | None:
    """Return the value as MLflow's charts take it; None for what is no number.

    An infinity becomes NaN: MLflow would store ±1.8e308, and one such point flattens the whole
    curve.
    """
    try:
        real = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.nan  # an integer beyond what a float holds
    return math.nan if math.isinf(real) else real


def is_infinite(value: object) -> bool:
    """Tell whether `number` hides an infinity of this value, or a number too large for a float."""
    try:
        return math.isinf(float(value))  # type: ignore[arg-type]
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


def step(value: object) -> int | None:
    """Return the step as a database's integer; None for what is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        return None
    return int(value) if abs(value) <= _LARGEST_INTEGER else None


def milliseconds(seconds: object) -> int | None:
    """Return a time as MLflow's timestamp; None for what is no time."""
    real = number(seconds)
    if real is None or math.isnan(real) or not 0 <= real < _LARGEST_INTEGER / 1000:
        return None
    return int(real * 1000)
