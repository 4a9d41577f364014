"""Names of runs and experiments. They become names of folders, and names in MLflow."""

from __future__ import annotations

import re

from rankzero.errors import UserError

# A folder's name may have 255.
_MAX_BYTES = 200
# Other names are derived from it, such as those of a study's trials.
_MAX_GIVEN_BYTES = 160
MAX_STEM_BYTES = 80
"""The most of a name that is made of a text."""
# MLflow's limit.
_MAX_EXPERIMENT = 500
_PLAIN = re.compile(r"[A-Za-z0-9][\w.\-]*")
_NOT_PLAIN = re.compile(r"[^\w.\-]+")


class InvalidRunFolder(UserError, ValueError):
    """The folder of a run cannot be used; the message names the file."""


def is_plain(name: object) -> bool:
    """Return whether this is a run's name: one folder, whatever the file system."""
    return (
        isinstance(name, str)
        and _PLAIN.fullmatch(name) is not None
        and len(_bytes(name)) <= _MAX_BYTES
    )


def checked_run(name: str) -> str:
    """Return the name that a user gives a run. Raises UserError if it is not plain."""
    if not is_plain(name) or len(_bytes(name)) > _MAX_GIVEN_BYTES:
        raise UserError(
            "a run's name may have letters, digits, '.', '_' and '-', starts with a letter or a "
            f"digit, and has at most {_MAX_GIVEN_BYTES} bytes: got {shown(name)}"
        )
    return name


def made_plain(text: str, most: int = MAX_STEM_BYTES) -> str:
    """Return the beginning of a run's name for any text, of at most so many bytes of it."""
    stem = _bytes(_NOT_PLAIN.sub("-", text).lstrip("-._"))[:most]
    plain = stem.decode("utf-8", "ignore")
    return plain if is_plain(plain) else f"run-{plain}".rstrip("-")


def check_experiment(name: str) -> None:
    """Raise UserError if MLflow, or a line of text, cannot hold an experiment's name."""
    if not name.strip() or not name.isprintable() or len(name) > _MAX_EXPERIMENT:
        raise UserError(
            f"an experiment's name has 1 to {_MAX_EXPERIMENT} printable characters: "
            f"got {shown(name)}"
        )


def shown(name: str) -> str:
    """Return the name as a message may show it."""
    return repr(name) if len(name) <= 80 else f"{name[:60]!r}… of {len(name):,} characters"


def printable(text: str) -> str:
    """Return the text with its control characters escaped."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
