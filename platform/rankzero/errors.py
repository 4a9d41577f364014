"""Errors that a command shows without a traceback, and its exit codes."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend. The message names the change."""


class RunFailed(Exception):
    """A run was started and failed. The message gives the reason."""


class NotFinite(Exception):
    """The training diverged: its loss is NaN or infinite."""


# Two codes are from sysexits.h. EX_IOERR: the run has finished and --wait-delivery ended before
# its delivery. EX_TEMPFAIL: the run was stopped and can be resumed.
FINISHED, FAILED, USAGE, NOT_DELIVERED, RESUMABLE = 0, 1, 2, 74, 75
