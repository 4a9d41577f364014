"""What a command can fail with, and people can mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend: the message says what to change, and is shown without a traceback."""


class RunFailed(Exception):
    """A run that was started and failed: the message says why, and is shown without a traceback."""


class NotFinite(Exception):
    """The training diverged: its loss is NaN or infinite."""


FINISHED, FAILED, USAGE, RESUMABLE = 0, 1, 2, 75  # 75 is sysexits' EX_TEMPFAIL: stopped, try again
