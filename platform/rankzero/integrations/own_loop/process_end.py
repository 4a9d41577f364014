"""How this process ends: the error for the runs that a script leaves open."""

from __future__ import annotations

import builtins
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import current_process, parent_process
from multiprocessing.util import Finalize
from typing import Any

from rankzero.events import Status
from rankzero.launch.failures import reason

# The names of the code that a person types at a prompt of Python, or of `IPython.embed()`.
_PROMPTS = ("<stdin>", "<python-input-", "<console>", "<ipython-input-")


class Stopped(KeyboardInterrupt):
    """A stop by a signal that a framework has handled: its name, as in ``Stopped("SIGTERM")``."""


class _Raised:
    """The latest exceptions, as far as Python does not keep them until the end."""

    exit: BaseException | None = None
    exit_time = 0.0
    caught: BaseException | None = None
    leave: Callable[[Any], object] | None = None
    """The `sys.exit` before ours: a debugger's or a test's."""
    cells: list[float] | None = None
    """When IPython's cells that run now began, if `watch_cells` follows them: one can run others.

    The first is 0.0: the cell, or the script, that `watch_cells` has not seen begin.
    """


def at_exit(
    end: Callable[[BaseException | None], object], last_use: Callable[[], float]
) -> Finalize:
    """Call `end` with the error that ends this process, or None. `cancel()` prevents it.

    `last_use`: when the main thread used the run last. An exit before that was caught. A ``raise
    SystemExit(1)`` that does not come from `sys.exit` goes unseen: Python calls nothing for it, and
    a class in place of `SystemExit` would not catch what C code raises.
    """
    if _Raised.leave is None:
        _Raised.leave = sys.exit
        # The script may have executed `from sys import exit`.
        for module in (sys, sys.modules.get("__main__")):
            if getattr(module, "exit", None) is _Raised.leave:
                module.exit = _exit  # type: ignore[union-attr]  # a test's may return
    for name in ("exit", "quit"):
        # At a prompt, both print how to leave it.
        if hasattr(builtins, name) and not hasattr(sys, "ps1"):
            setattr(builtins, name, _exit)
    forget()
    # Not atexit: this also runs in processes of multiprocessing, and only in the one it began in.
    return Finalize(None, lambda: end(_error(last_use())), exitpriority=100)


def watch_cells(end: Callable[[BaseException, float], object]) -> None:
    """In IPython, call `end` with the error of each cell that fails, and when the cell began.

    At the end of the process, such an error has no known run.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or _Raised.cells is not None:
        return
    began = _Raised.cells = [0.0]

    def begin(*_: object) -> None:
        if not in_main_thread():  # Others may run a cell at the same time.
            return
        if began == [0.0] and (error := _uncaught()) is not None:
            end(error, began.pop())  # The script of `ipython -i train.py` has failed.
        began.append(time.time())
        forget()

    def finish(result: Any) -> None:
        if not in_main_thread():
            return
        error = getattr(result, "error_in_exec", None) or getattr(result, "error_before_exec", None)
        error = error or _uncaught()  # `%run` shows an error, and succeeds.
        since = began.pop() if began else 0.0
        if error is not None:
            end(error, since)
        forget()

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", finish)


def forget() -> None:
    """Note that the process has not ended: what was raised so far was caught."""
    # A function of atexit runs in the main thread, after its end.
    if in_main_thread() and threading.main_thread().is_alive() and not _in_hook():
        _Raised.exit, _Raised.caught = None, _uncaught() or _Raised.caught


def _in_hook() -> bool:
    """Return whether `sys.excepthook` runs: the frames of the program are gone then."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def in_main_thread() -> bool:
    """Return whether the caller is the thread whose end is that of the process."""
    return threading.current_thread() is threading.main_thread()


def status_of(error: BaseException | None) -> tuple[Status, str]:
    """Return the status and the reason of a run that ends with this error."""
    # A generator that its reader leaves early ends by GeneratorExit, whatever the reader raised.
    is_exit = isinstance(error, SystemExit) and not error.code
    if error is None or is_exit or isinstance(error, GeneratorExit):
        return "FINISHED", "finished"
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", f"stopped by {error if isinstance(error, Stopped) else 'Ctrl-C'}"
    if isinstance(error, SystemExit):
        return "FAILED", f"exited with {error.code}"
    return "FAILED", reason(error)


def _error(last_use: float) -> BaseException | None:
    # A process of multiprocessing ends while the exception is being raised.
    raised, last = sys.exc_info()[1], _uncaught()
    left = _Raised.exit if last_use <= _Raised.exit_time else None
    if raised is not None and not isinstance(raised, SystemExit):
        return raised
    if last is not None and (_Raised.cells not in (None, [0.0]) or _is_of_prompt(last)):
        last = None  # That of a cell has ended its runs. A silent cell has none.
    # An exception that ended the process came after an exit that was caught.
    return last or left or raised or _end_of_parent()


def _end_of_parent() -> Stopped | None:
    """Return the stop by a dead parent, which torch.multiprocessing catches without a word."""
    target, parent = getattr(current_process(), "_target", None), parent_process()
    is_spawned = getattr(target, "__module__", "") == "torch.multiprocessing.spawn"
    is_orphan = is_spawned and parent is not None and not parent.is_alive()
    return Stopped("the end of its parent process") if is_orphan else None


def _uncaught() -> BaseException | None:
    """Return the exception that Python keeps as uncaught, unless the process has gone on since."""
    # last_exc is from 3.12 on, last_value from before.
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if last is _Raised.caught else last


def _is_of_prompt(error: BaseException) -> bool:
    """Return whether a prompt has shown the exception, which ends no process then."""
    # A prompt may have been opened before a script fails, or after it.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return hasattr(sys, "ps1") and any(f.f_code.co_filename.startswith(_PROMPTS) for f in frames)


def _exit(code: Any = None) -> None:
    """Do what `sys.exit` does, and remember the code, which Python forgets before the end."""
    if in_main_thread():
        # An exception whose handler gives up says more, as in a process of torch.multiprocessing.
        handled = sys.exc_info()[1] if code else None
        _Raised.exit, _Raised.exit_time = handled or SystemExit(code), time.time()
    assert _Raised.leave is not None
    _Raised.leave(code)
