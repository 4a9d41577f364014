"""The server that workers are forked from: Python's forkserver, itself a fork of the command.

multiprocessing starts its server as a new program, which imports PyTorch a second time. That costs
each command two seconds of processor time. A fork has what the command has imported.

Seen with Python 3.11 to 3.13. ``tests/launch/test_fork_server.py`` fails when a private name goes
or changes its meaning: multiprocessing.util.spawnv_passfds, and the program in its last argument;
the two objects that hold what multiprocessing knows of its helpers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn

from rankzero.errors import UserError
from rankzero.launch.parent_death import COMMAND
from rankzero.launch.rendezvous import PLACES
from rankzero.launch.signals import held_back

_FIRST, _LAST = "rankzero.launch.server_imports_begin", "rankzero.launch.server_imports_end"
# A socket's path has at most 107 bytes, 103 on macOS. multiprocessing adds 32.
_LONGEST_FOLDER = 70


def start(shared: Sequence[str] = (), preload: Sequence[str] = ()) -> None:
    """Import the modules `shared` here; start a server that has them, and imports `preload`.

    The server imports in the background. Modules that do not exist are left out.

    A fork lacks the threads of this process, and waits for their locks without end. So the server
    is a new program if a thread runs here, or if somebody may have computed with PyTorch.
    """
    may_fork = sys.platform == "linux" and "torch" not in sys.modules
    if may_fork:
        _import(shared)
    multiprocessing.set_forkserver_preload([_FIRST, *shared, *preload, _LAST])
    with contextlib.ExitStack() as stack:
        if may_fork and threading.active_count() == 1:
            stack.enter_context(forks_programs())
        ensure_running()


def _import(modules: Sequence[str]) -> None:
    # Their objects stay. The collector would walk them again and again: a fifth of the time.
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def ensure_running() -> None:
    """Start the server unless it runs, with signals blocked in it and its forks.

    A scheduler may signal every process of a job. That must not end the server, nor a worker that
    has no signal handlers yet.
    """
    _fit_sockets()
    # The server takes it out of its environment before a worker is forked.
    os.environ[COMMAND] = str(os.getpid())
    try:
        for begin in (resource_tracker.ensure_running, forkserver.ensure_running):
            # For each: the first unblocks signals here once it has started.
            with held_back():
                begin()
    finally:
        del os.environ[COMMAND]


def _fit_sockets() -> None:
    """Have multiprocessing make its sockets elsewhere if $TMPDIR is too long for their paths.

    Processes that it starts inherit the folder. Raises UserError.
    """
    given, before = tempfile.gettempdir(), tempfile.tempdir
    if len(os.fsencode(given)) <= _LONGEST_FOLDER:
        return
    try:
        for place in filter(None, PLACES):
            tempfile.tempdir = place
            with contextlib.suppress(OSError):
                util.get_temp_dir()  # which it keeps, and removes at its end
                return
    finally:
        tempfile.tempdir = before
    raise UserError(
        f"the temporary folder {given} is too long for the paths of sockets: set TMPDIR to a "
        f"folder of at most {_LONGEST_FOLDER} bytes"
    )


@contextlib.contextmanager
def forks_programs() -> Iterator[None]:
    """Let multiprocessing start its server as a fork of this process. Main thread only."""
    starts_program = util.spawnv_passfds

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        program = str(args[-1])
        if not program.startswith("from multiprocessing.forkserver"):  # the resource tracker
            return starts_program(path, args, passfds)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # or each fork would write it once more
        process = os.fork()
        if process == 0:
            util.spawnv_passfds = starts_program
            _become(program, passfds)
        return process

    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = starts_program


def _become(program: str, passed: Sequence[int]) -> NoReturn:
    """Run a Python program with the descriptors that it is passed, and exit."""
    status = 1
    try:
        # They have locks that the parent holds, files that are closed below, and its modules.
        for helper in (forkserver._forkserver, resource_tracker._resource_tracker):
            type(helper).__init__(helper)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if descriptor > 2 and descriptor not in passed:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(descriptor)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # as in a new program
                is_python = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_python else signal.SIG_DFL)
        exec(program, {"__name__": "forkserver"})  # noqa: S102 - multiprocessing's own line
    except SystemExit:
        status = 0  # the last process that may ask for a worker has ended
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
