"""Which errors of MLflow or of a file system no retry can mend."""

from __future__ import annotations

import errno

_REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"}
_NO_RIGHTS = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
ANY_CAUSE = "BAD_REQUEST"
"""MLflow answers so for bad data, and while its database is read-only or lacks connections."""
# These depend on rights, a proxy or the load, and may change. Other 4xx codes reject the request.
_MAY_CHANGE = {401, 403, 404, 407, 408, 409, 425, 429, 499}
# A file system never accepts these names.
_BAD_NAME = {
    errno.ENAMETOOLONG,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.ELOOP,
    errno.EILSEQ,
}
_SCARCE = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
# In the messages of torch.save on a full disk.
TORCH_WRITER_ERRORS = ("PytorchStreamWriter", "inline_container", "iostream")
_TORCH_SCARCE = (*TORCH_WRITER_ERRORS, "DefaultCPUAllocator")


class NeverAccepted(Exception):
    """A request that cannot succeed, however often it is tried. The message gives the reason."""


def refusal(error: Exception) -> str | None:
    """Return why no retry can help with the error, or None if one may."""
    # The attributes of MLflow's and requests' exceptions are enough: neither is imported here.
    code = getattr(error, "error_code", None)
    if isinstance(error, NeverAccepted) or code in _REFUSALS:
        return str(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    is_4xx = isinstance(status, int) and 400 <= status < 500
    if is_4xx and status not in _MAY_CHANGE and code != ANY_CAUSE:
        return str(error)
    return str(error) if isinstance(error, OSError) and error.errno in _BAD_NAME else None


def lacks_rights(error: Exception) -> bool:
    """Return whether a server answered that this user may not do it, or must log in."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in (401, 403) or getattr(error, "error_code", None) in _NO_RIGHTS


def lacks_resources(error: Exception) -> bool:
    """Return whether the machine lacks space, memory, files or a disk. The data are fine."""
    if isinstance(error, OSError):
        # Libraries raise an OSError without a number for data that they do not accept.
        return error.errno is not None and error.errno not in _BAD_NAME
    return isinstance(error, MemoryError)


def lacks_memory_or_space(error: Exception) -> bool:
    """Return whether memory, space or open files ran out, also where a user's file may be missing.

    PyTorch reports either as a RuntimeError.
    """
    if isinstance(error, OSError):
        return error.errno in _SCARCE
    if isinstance(error, RuntimeError):
        return any(text in str(error) for text in _TORCH_SCARCE)
    return isinstance(error, MemoryError)
