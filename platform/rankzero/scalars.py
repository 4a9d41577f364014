"""Numbers out of journals and user values, in the form that MLflow stores. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

# MLflow stores steps and times in 64 bits.
_LARGEST_INTEGER = 2**63 - 1
# Not within a version, a date or a name.
_LONG = re.compile(r"(?<![\w.-])-?\d+\.\d{5,}(?:e-?\d+)?(?![\w.])")


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers."""
    found = {str(key): number(value) for key, value in values.items()}
    return {key: real for key, real in found.items() if real is not None}


def number(value: object) -> float | None:
    """Return the value as a float, NaN for an infinity, or None if it is not a number."""
    try:
        real = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    except OverflowError:
        return math.nan  # An integer beyond the range of a float.
    # MLflow would store an infinity as ±1.8e308, and one such point flattens the whole curve.
    return math.nan if math.isinf(real) else real


def shown(value: float, digits: int = 4) -> str:
    """Return a number as people read it: with so many digits, or whole: ``12,240``."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"


def rounded(text: str) -> str:
    """Return the text with its long decimal numbers as `shown` has them, and without commas."""
    return _LONG.sub(lambda found: shown(float(found[0])).replace(",", ""), text)


def is_infinite(value: object) -> bool:
    """Return whether the value is infinite, or too large for a float."""
    try:
        return math.isinf(float(value))  # type: ignore[arg-type]
    except OverflowError:
        return True
    except (TypeError, ValueError):
        return False


def step(value: object) -> int | None:
    """Return the step as a 64-bit integer, or None if it is not one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        return None
    return int(value) if abs(value) <= _LARGEST_INTEGER else None


def milliseconds(seconds: object) -> int | None:
    """Return a time as MLflow's timestamp, or None if it is not a time."""
    real = number(seconds)
    if real is None or math.isnan(real) or not 0 <= real < _LARGEST_INTEGER / 1000:
        return None
    return int(real * 1000)
