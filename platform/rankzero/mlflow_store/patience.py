"""How long the end of a run may wait for MLflow."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

GRACE, WAIT = "RANKZERO_DELIVERY_GRACE_SECONDS", "RANKZERO_WAIT_DELIVERY"
GRACE_SECONDS = 60.0
A_DAY = 86_400.0
"""The longest wait of a command with `--wait-delivery` and no number."""
# Long enough for one request while MLflow refuses or hangs. The rest is delivered later.
_TROUBLED_SECONDS = 15.0
# In a container, no process remains to deliver later: ten minutes, or one without progress.
_CONTAINED_SECONDS, _CONTAINED_TROUBLED_SECONDS = 600.0, 60.0
# The background processes of a command that was asked to wait a day may not stay for a day.
_BACKGROUND_SECONDS = 600.0
# Docker's, Podman's, and those that images bring along.
_INITS = ("docker-init", "catatonit", "tini", "dumb-init")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


class Patience(NamedTuple):
    """How long a command waits for the delivery."""

    seconds: float
    """In all."""
    troubled_seconds: float
    """Without progress, while MLflow fails."""
    required: bool
    """Whether the user asked for it, so the exit code shows an incomplete delivery."""


def patience(environ: Mapping[str, str] = os.environ) -> Patience:
    """Return how long this command waits: as asked, as configured, or by where it runs."""
    wait, grace = _seconds_in(environ, WAIT), _seconds_in(environ, GRACE)
    if wait is not None:
        return Patience(wait, math.inf, True)
    if grace is None and goes_with_its_container(environ):
        return Patience(_CONTAINED_SECONDS, _CONTAINED_TROUBLED_SECONDS, False)
    return Patience(GRACE_SECONDS if grace is None else grace, _TROUBLED_SECONDS, False)


def grace_seconds(environ: Mapping[str, str] = os.environ) -> float:
    """Return how long recorder and courier try after rank 0's end without progress."""
    wait, grace = _seconds_in(environ, WAIT), _seconds_in(environ, GRACE)
    return max(GRACE_SECONDS if grace is None else grace, min(wait or 0.0, _BACKGROUND_SECONDS))


def seconds(text: str) -> float:
    """Return the seconds that `text` gives. Raises ValueError for nan and negative numbers, too."""
    found = float(text)
    if not found >= 0:
        raise ValueError(f"{text!r} is not a number of seconds")
    return found


def _seconds_in(environ: Mapping[str, str], name: str) -> float | None:
    # Commands check the option. Elsewhere, a typo in the environment must not end the delivery.
    try:
        return seconds(environ.get(name, ""))
    except ValueError:
        return None


def goes_with_its_container(
    environ: Mapping[str, str] = os.environ,
    parent: int | None = None,
    namespace: Path = Path("/proc/self/ns/pid"),
    proc: Path = Path("/proc"),
) -> bool:
    """Return whether the end of this command ends its child processes, too.

    This holds in a Slurm job, a pod and a systemd service. It also holds in a container, if this
    command or the shell that started it is the container's first process, or that one's child if
    the first is an init such as that of ``docker run --init``.
    """
    if environ.get("SLURM_JOB_ID") or environ.get("KUBERNETES_SERVICE_HOST"):
        return True
    # The main process of a service. Its other descendants inherit the variable.
    mine = (os.getpid(), os.getppid() if parent is None else parent)
    if environ.get("SYSTEMD_EXEC_PID", "") in [str(pid) for pid in mine]:
        return True
    try:
        if str(namespace.readlink()) == _FIRST_PID_NAMESPACE:
            return False
        if 1 in mine:
            return True
        above = (proc / str(mine[1]) / "stat").read_text().rpartition(")")[2].split()[1]
        return above == "1" and (proc / "1" / "comm").read_text().strip() in _INITS
    except (OSError, IndexError):
        return False
