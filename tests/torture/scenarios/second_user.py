"""Another user of the machine, `nobody`, who reads, locks, links, connects and guesses names."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from rankzero.errors import FINISHED, RESUMABLE
from support.second_user import (
    as_nobody,
    listening,
    nobody_locks,
    readable,
    send_garbage,
    store_keys,
)
from torture.ground import Broken, Command, Ground, NotRun
from torture.promises import Curves
from torture.scenarios.training import BEFORE_THE_END, CLOCK, SLOW, at_a_random_moment, finished

GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04cos\nsystem\n", b"\x00" * 4096, b"\xff" * 4096)


def second_user(ground: Ground, reference: Curves) -> None:
    """Let `nobody` do what it can to a run. It stops, resumes and ends as if it were alone."""
    if os.geteuid() != 0:
        raise NotRun("only root can act as another user")
    with _temporary_folder_for_all(ground) as temporary:
        precious = _plant_links(ground, temporary)
        command = ground.start("train", CLOCK, *SLOW)
        at_a_random_moment(ground, command, BEFORE_THE_END)
        with nobody_locks(ground.folder) as held:
            if str(ground.folder) not in held:
                raise Broken("wrong: `nobody` cannot even read the folder, so this tries nothing")
            ground.note_fault("locks of another user")
            _read_and_guess(ground, temporary)
            _connect(ground, command)
            _send_signals(ground, command)
            command.process.send_signal(signal.SIGTERM)
            if (code := command.wait()) not in (FINISHED, RESUMABLE):
                raise Broken(f"wrong status: exit code {code} after SIGTERM: {command.tail()}")
            if code == RESUMABLE:
                ground.run("resume", "run")
        if [path.name for path in precious.iterdir()] != ["kept"]:
            raise Broken("wrong: something was written through a link of another user")
        finished(ground, reference)


@contextlib.contextmanager
def _temporary_folder_for_all(ground: Ground) -> Iterator[Path]:
    """Let all users enter the scenario's folder; give its commands a shared temporary folder."""
    for folder in (ground.folder, *ground.folder.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    # Not in the scenario's folder: a path of a socket has at most about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="rz-", ignore_cleanup_errors=True) as shared:
        Path(shared).chmod(0o1777)
        ground.environ["TMPDIR"] = shared
        yield Path(shared)


def _plant_links(ground: Ground, temporary: Path) -> Path:
    """Let `nobody` take the names that can be guessed; return the folder to which they lead."""
    precious = ground.folder / "precious"
    precious.mkdir()
    (precious / "kept").touch()
    names = (f"rankzero-{os.getuid()}", "torchinductor_root", "rankzero", "rankzero.lock")

    def plant() -> None:
        for name in names:
            (temporary / name).symlink_to(precious)

    as_nobody(plant)
    ground.note_fault("links of another user")
    return precious


def _read_and_guess(ground: Ground, temporary: Path) -> None:
    found = [path for path in as_nobody(readable, temporary) if "/precious/" not in path]
    if found:
        raise Broken(f"open: another user can read {found}")
    locks = [path for path in as_nobody(readable, ground.folder) if path.endswith(".lock")]
    if locks:
        raise Broken(f"open: another user can take {locks}")
    ground.note_fault("another user reads")


def _connect(ground: Ground, command: Command) -> None:
    """Let `nobody` connect to every port of the job, and speak to it."""
    try:
        addresses = listening(psutil.Process(command.process.pid))
    except psutil.NoSuchProcess:  # the run ended meanwhile, so nobody can connect to it
        return
    stores = [address for address in addresses if as_nobody(store_keys, *address) is not None]
    if stores:
        raise Broken(f"open: another user can use the store at {stores}")
    for address in addresses:
        as_nobody(send_garbage, *address, ground.random.choice(GARBAGE))
        ground.note_fault("connections of another user")


def _send_signals(ground: Ground, command: Command) -> None:
    def kill(pid: int) -> bool:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(command.process.pid)
        for one in (process, *process.children(recursive=True)):
            if as_nobody(kill, one.pid):
                raise Broken(f"open: another user killed {one}")
    ground.note_fault("signals of another user")
