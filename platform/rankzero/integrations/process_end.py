"""How this process ends: the error for the runs that a script leaves open."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, NoReturn


class _Raised:
    """The latest exceptions, as far as Python does not keep them until the end."""

    exit: BaseException | None = None
    exit_time = 0.0
    caught: BaseException | None = None


def at_exit(
    end: Callable[[BaseException | None], object], last_use: Callable[[], float]
) -> Finalize:
    """Call `end` with the error that ends this process, or None. `cancel()` prevents it.

    `last_use`: when the run was used last. An exit before that was caught. A ``raise
    SystemExit(1)`` that does not come from `sys.exit` goes unseen.
    """
    sys.exit = _exit
    for name in ("exit", "quit"):
        # At a prompt, both print how to leave it.
        if hasattr(builtins, name) and not hasattr(sys, "ps1"):
            setattr(builtins, name, _exit)
    went_on()
    # Unlike atexit's, its functions also run in the processes of multiprocessing, and only in the
    # process that registered them.
    return Finalize(None, lambda: end(_error(last_use())), exitpriority=100)


def went_on() -> None:
    """Note that the process has not ended: what was raised so far was caught."""
    _Raised.exit, _Raised.caught = None, _uncaught()


def _error(last_use: float) -> BaseException | None:
    # A process of multiprocessing ends while the exception is being raised.
    raised, last = sys.exc_info()[1], _uncaught()
    left = _Raised.exit if last_use <= _Raised.exit_time else None
    if raised is not None and not isinstance(raised, SystemExit):
        return raised
    return left or raised or (None if last is _Raised.caught else last)


def _uncaught() -> BaseException | None:
    # Python keeps the uncaught exception here: last_exc from 3.12 on, last_value before.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _exit(code: Any = None) -> NoReturn:
    """Do what `sys.exit` does, and remember the code, which Python forgets before the end."""
    if threading.current_thread() is threading.main_thread():
        # An exception whose handler gives up says more, as in a process of torch.multiprocessing.
        handled = sys.exc_info()[1] if code else None
        _Raised.exit, _Raised.exit_time = handled or SystemExit(code), time.time()
    raise SystemExit(code)
