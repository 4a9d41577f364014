"""Errors that a command shows without a traceback, and its exit codes."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend. The message names the change."""


class RunFailed(Exception):
    """A run was started and failed. The message gives the reason."""


class NotFinite(Exception):
    """The training diverged: its loss is NaN or infinite."""


# 75 is EX_TEMPFAIL of sysexits.h: the run was stopped and can be resumed.
FINISHED, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75
