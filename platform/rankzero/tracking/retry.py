"""When to try again, and when not to: waits that grow, and what a store will never take."""

from __future__ import annotations

import errno
import random
import time

LONGEST_WAIT_SECONDS = 30.0
HURRIED_WAIT_SECONDS = 5.0  # where somebody waits, and who tries gives up before long

_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
_MAY_CHANGE = {401, 403, 404, 408, 409, 425, 429}  # the rights, the proxy, the load; not the thing itself
_NEVER = {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ELOOP, errno.EILSEQ}  # of a file


class Impossible(Exception):
    """What is asked for cannot be made, however often it is tried; the message says why."""


class Backoff:
    """When to try again: after about 1, 2, 4 … 30 seconds, at random, so that recorders do not march in step."""

    def __init__(self) -> None:
        self.failures, self._at, self._longest = 0, 0.0, LONGEST_WAIT_SECONDS

    @property
    def over(self) -> bool:
        """Tell whether the wait after the latest failure is over."""
        return time.monotonic() >= self._at

    def fail(self, wait: bool = True) -> None:
        """Wait before the next try, longer with each failure in a row; without `wait`, count the failure only."""
        seconds = min(self._longest, 2.0 ** min(self.failures, 10)) if wait else 0.0
        self.failures += 1
        self._at = time.monotonic() + seconds * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Forget the failures: a try went well."""
        self.failures, self._at = 0, 0.0

    def hasten(self) -> None:
        """Try again at once, and from now on every few seconds."""
        self.reset()
        self._longest = HURRIED_WAIT_SECONDS


def refusal(error: Exception) -> str | None:
    """Return why MLflow, or a file system, will never take what it was given; None where another try may help.

    Looks at what MLflow's and requests' exceptions carry, so that neither needs to be imported.
    """
    if isinstance(error, Impossible) or getattr(error, "error_code", None) in _REFUSALS:
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in _MAY_CHANGE:
        return str(error)
    return str(error) if isinstance(error, OSError) and error.errno in _NEVER else None


def is_want(error: Exception) -> bool:
    """Tell whether the machine lacks something (space, memory, files, a disk that answers), and the data have no fault.

    An OSError without a number is none of the system's: libraries raise it for data that they do not take.
    """
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _NEVER
    return isinstance(error, MemoryError)
