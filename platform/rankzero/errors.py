"""What a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend: the message says what to change, and is shown without a traceback."""
