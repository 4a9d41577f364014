"""Which failures of MLflow or of a file system no further try can mend."""

from __future__ import annotations

import errno

_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}


_MAY_CHANGE = {
    401,
    403,
    404,
    408,
    409,
    425,
    429,
}  # the rights, the proxy, the load; not the thing itself


_NEVER = {
    errno.ENAMETOOLONG,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.ELOOP,
    errno.EILSEQ,
}  # of a file


class NeverAccepted(Exception):
    """What is asked for cannot be made, however often it is tried; the message says why."""


def refusal(error: Exception) -> str | None:
    """Return why MLflow, or a file system, will never take what it was given; None where another try may help.

    Looks at what MLflow's and requests' exceptions carry, so that neither needs to be imported.
    """
    if isinstance(error, NeverAccepted) or getattr(error, "error_code", None) in _REFUSALS:
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in _MAY_CHANGE:
        return str(error)
    return str(error) if isinstance(error, OSError) and error.errno in _NEVER else None


def is_want(error: Exception) -> bool:
    """Tell whether the machine lacks something (space, memory, files, a disk that answers), and the data have no fault.

    An OSError without a number is none of the system's: libraries raise it for data that they do
    not take.
    """
    if isinstance(error, OSError):
        return error.errno is not None and error.errno not in _NEVER
    return isinstance(error, MemoryError)
