"""What MLflow accepts: names, values and lengths made legal, the same way every time. Pure."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable

KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
METRICS_PER_BATCH = 1000
ITEMS_PER_BATCH = 100  # params or tags

_ILLEGAL = re.compile(r"[^/\w.\- ]")  # MLflow also takes a colon, but not on Windows


def name(key: str) -> str:
    """Return `key` as MLflow takes it for a metric, a param or a tag: ``tps(GPU)`` becomes ``tps_GPU_``.

    Two keys that differ only in illegal characters become one; `apart` tells them from each other.
    """
    legal = posixpath.normpath(_ILLEGAL.sub("_", key).replace("..", "_")).lstrip("/")
    if legal in ("", "."):
        return "unnamed"
    return legal if len(legal) <= KEY_LENGTH else apart(key)


def apart(key: str) -> str:
    """Return a legal name that no other key has, for one whose own is taken or too long."""
    legal = posixpath.normpath(_ILLEGAL.sub("_", key).replace("..", "_")).lstrip("/")
    return f"{legal[: KEY_LENGTH - 9]}-{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def names(keys: Iterable[str]) -> dict[str, str]:
    """Return {key: its legal name}, no two the same; the same way every time, whatever the order."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for key in sorted(
        set(keys), key=lambda key: (name(key) != key, key)
    ):  # what is legal keeps its name
        found[key] = name(key) if name(key) not in taken else apart(key)
        taken.add(found[key])
    return found


def lost(value: object, length: int) -> str | None:
    """Return what of the value's text MLflow would not keep; None where it keeps all."""
    text = str(value)
    if len(text) > length:
        return f"{len(text):,} characters, of which MLflow keeps {length:,}"
    return None if _printable(text) == text else "characters that a database refuses"


def head(value: object, length: int) -> str:
    """Return the value's text, its end cut off where it is too long."""
    text = _printable(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def tail(value: object, length: int) -> str:
    """Return the value's text, its beginning cut off where it is too long: a traceback says most at its end."""
    text = _printable(value)
    return text if len(text) <= length else "…" + text[-(length - 1) :]


def _printable(value: object) -> str:
    # PostgreSQL refuses the zero byte; UTF-8, half of a surrogate pair.
    return str(value).replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
