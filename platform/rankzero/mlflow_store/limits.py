"""MLflow's limits: legal names, values and lengths, always the same for the same input."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping

KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
METRICS_PER_BATCH = 1000
# Written into SQLite by ourselves. The table's index begins with the metric's name, so a
# transaction costs a page for each metric in it.
METRICS_PER_TRANSACTION = 10_000
# Params or tags.
ITEMS_PER_BATCH = 100
TABLES_TAG = "mlflow.loggedArtifacts"
"""MLflow's page shows the files that this tag lists as tables."""

# MLflow also accepts a colon, but not on Windows.
_ILLEGAL = re.compile(r"[^/\w.\- ]")


def name(key: str) -> str:
    """Return a legal name for a metric, a param or a tag: ``tps(GPU)`` becomes ``tps_GPU_``.

    Two keys that differ only in illegal characters get the same name. See `unique_name`.
    """
    legal = _legal(key)
    if legal in ("", "."):
        return "unnamed"
    return legal if len(legal) <= KEY_LENGTH else unique_name(key)


def unique_name(key: str) -> str:
    """Return a legal name that no other key has, for a key whose own name is taken or too long."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{_legal(key)[: KEY_LENGTH - 9]}-{digest}"


def _legal(key: str) -> str:
    return posixpath.normpath(_ILLEGAL.sub("_", key).replace("..", "_")).lstrip("/")


def check_model_name(name: str) -> None:
    """Raise ValueError unless MLflow takes the name for a logged model."""
    name.encode()
    if not name or len(name) > KEY_LENGTH or set(name) & set("/:.%\"'\0"):
        raise ValueError(
            f"the name of a model is not empty, has {KEY_LENGTH} characters at most, and none of "
            "/ : . % \" '"
        )


def names(keys: Iterable[str]) -> dict[str, str]:
    """Return {key: legal name} with different names, whatever the order of the keys."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    # Legal keys come first, so that they keep their names.
    for key in sorted(set(keys), key=lambda key: (name(key) != key, key)):
        found[key] = name(key) if name(key) not in taken else unique_name(key)
        taken.add(found[key])
    return found


def new_and_changed(
    params: Mapping[str, str], present: Mapping[str, str], tags_present: Iterable[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the params that MLflow lacks, and a tag for each that it has with another value.

    `present`: the params that MLflow has. A resume may change a setting, and another change it
    back. `tags_present`: the names of the tags that MLflow has.
    """
    new, tags, legal = {}, {}, names(params)
    for key, value in params.items():
        tag, value = f"rankzero.param.{key}", head(value, PARAM_LENGTH)
        if legal[key] not in present:
            new[legal[key]] = value
        elif present[legal[key]] != value or name(tag) in tags_present:
            tags[tag] = value
    return new, tags


def loss(value: object, length: int) -> str | None:
    """Return what MLflow would not keep of the value's text, or None if it keeps everything."""
    text = str(value)
    if len(text) > length:
        return f"{len(text):,} characters, of which MLflow keeps {length:,}"
    return None if _printable(text) == text else "characters that a database refuses"


def head(value: object, length: int) -> str:
    """Return the value's text without its end if it is too long."""
    text = _printable(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def tail(value: object, length: int) -> str:
    """Return the value's text without its beginning if it is too long, as for a traceback."""
    text = _printable(value)
    return text if len(text) <= length else "…" + text[-(length - 1) :]


def _printable(value: object) -> str:
    # PostgreSQL refuses the zero byte, and UTF-8 half of a surrogate pair.
    return str(value).replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
