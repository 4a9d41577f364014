"""What runs and experiments may be called: their names become folders' names, and MLflow's. Pure."""

from __future__ import annotations

import re

from rankzero.errors import UserError

LONGEST_BYTES = 200  # a folder's name may have 255
LONGEST_GIVEN_BYTES = 160  # others are made from it: a study's trials
LONGEST_STEM_BYTES = 80
LONGEST_EXPERIMENT = 500  # MLflow's limit
_PLAIN = re.compile(r"[A-Za-z0-9][\w.\-]*")
_NOT_PLAIN = re.compile(r"[^\w.\-]+")


class InvalidRunFolder(UserError, ValueError):
    """A run's folder that is none: the message names the file."""


def is_plain(name: object) -> bool:
    """Tell whether this is a run's name: one folder below the runs' folder, whatever the file system."""
    return (
        isinstance(name, str)
        and _PLAIN.fullmatch(name) is not None
        and len(_bytes(name)) <= LONGEST_BYTES
    )


def checked_run(name: str) -> str:
    """Return the name that somebody gives a run. Raises UserError where it is not plain."""
    if not is_plain(name) or len(_bytes(name)) > LONGEST_GIVEN_BYTES:
        raise UserError(
            "a run's name may have letters, digits, '.', '_' and '-', starts with a letter or a digit, and has at "
            f"most {LONGEST_GIVEN_BYTES} bytes: got {shown(name)}"
        )
    return name


def made_plain(text: str) -> str:
    """Return the beginning of a run's name for any text."""
    plain = _bytes(_NOT_PLAIN.sub("-", text).lstrip("-._"))[:LONGEST_STEM_BYTES].decode(
        "utf-8", "ignore"
    )
    return plain if is_plain(plain) else f"run-{plain}".rstrip("-")


def check_experiment(name: str) -> None:
    """Raise UserError for the name of an MLflow experiment that MLflow, or a line of text, cannot hold."""
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_EXPERIMENT:
        raise UserError(
            f"an experiment's name is 1 to {LONGEST_EXPERIMENT} characters that can be printed: got {shown(name)}"
        )


def shown(name: str) -> str:
    """Return the name as a message may show it."""
    return repr(name) if len(name) <= 80 else f"{name[:60]!r}… of {len(name):,} characters"


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
