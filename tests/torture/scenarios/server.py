"""MLflow's server, or the embedded store in its place: refuses, hangs, dies, is locked, is away."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable

from rankzero.events import RunEnded
from rankzero.run_store.journal import read_all
from rankzero.tracking import delivery_status
from rankzero.tracking.deliverer import READ_SECONDS
from rankzero.tracking.delivery_status import Delivery
from torture import promises
from torture.disks import Disk, small_disk
from torture.ground import GRACE_SECONDS, ORPHAN_SECONDS, Broken, Command, Ground, wait_for
from torture.promises import Curves
from torture.proxy import EVERYTHING, MODES, UPLOADS, Proxy
from torture.scenarios.training import (
    CLOCK,
    MOMENTS,
    SETTINGS,
    SLOW,
    TINY,
    at,
    at_a_random_moment,
    ends,
    finished,
    named,
    the_run,
)
from torture.servers import Server

SLACK_SECONDS = 15.0
"""What a busy machine may add to the grace: importing mlflow, on processor time that nobody wants."""
SLOW_SECONDS = 600.0
"""What a courier may take where each answer takes five seconds: it gets on, and is left to."""
UNHURRIED = "step_seconds=0.25"
"""A training of most of a minute: a courier sends every five seconds."""
MEET_SECONDS = 45.0
"""How long a fault waits for somebody to meet it: a writer waits for a lock half of it."""
SERVER_FAULTS = (
    *((mode, EVERYTHING) for mode in MODES),
    *((mode, UPLOADS) for mode in ("500", "half", "close", "hang")),
)
SERVER_FAULTS_EACH = 5
MOST_LOCKS, MOST_FULL = 4, 8
AWAY = ("refuse", "hang", "500", "429", "garbage", "empty", "login", "slow")


def bad_server(ground: Ground, reference: Curves) -> None:
    """An MLflow server that refuses, hangs, answers nonsense, is slow: training ends well, and nothing is lost."""
    with Proxy(ground.environ["TORTURE_SERVER"]) as proxy:
        modes = ground.turn.of(SERVER_FAULTS, SERVER_FAULTS_EACH)
        if ground.random.random() < 0.3:  # from the very start
            proxy.misbehave(*next(modes))
        command = ground.start(
            "train", TINY, *named(ground), UNHURRIED, "--tracking-uri", proxy.uri
        )
        while command.busy():
            _until_met(ground, command, proxy)
            time.sleep(ground.random.uniform(0.5, 2.0))
            proxy.misbehave(*next(modes))
        proxy.behave()
        ends(command, 0)
        finished(ground, reference)


def locked_database(ground: Ground, reference: Curves) -> None:
    """The embedded store is locked by somebody else, again and again, once for longer than a writer waits."""
    command = ground.start("train", TINY, *SETTINGS, "step_seconds=0.35")
    wait_for(lambda: not command.running or _delivered(ground) > 0)
    _lock(ground, command, "refused", _was_refused)
    while command.busy() and len(ground.faults) < MOST_LOCKS:
        time.sleep(ground.random.uniform(0.2, 1.5))
        _lock(ground, command, "waited for", _holds_up(ground))
    ends(command, 0)
    finished(ground, reference)


def killed_server(ground: Ground, reference: Curves) -> None:
    """SIGKILL of MLflow's server, again and again; it comes back on the same store during the run, or only later."""
    with Server(ground.folder / "server", ground.empty) as server:
        command = ground.start("train", CLOCK, *SLOW, "--tracking-uri", server.uri)
        moment, ways = ground.next_pair(
            MOMENTS, (("soon",), ("later",), ("soon", "soon"), ("soon", "later"))
        )
        at(ground, command, moment)
        for back, when in zip(ways, (f"at {moment}", "once more"), strict=False):
            server.kill()
            ground.note_fault(f"SIGKILL of the server {when}, back {back}")
            if back == "soon":
                time.sleep(ground.random.uniform(0.0, 3.0))
                server.start()
                time.sleep(ground.random.uniform(0.0, 2.0))
        ends(command, 0)
        promises.no_process_is_left(ground)
        server.start()
        ground.run("sync")
        finished(ground, reference)


def server_away(ground: Ground, reference: Curves) -> None:
    """No server for the whole run: the command ends within the grace, and the next day `sync` delivers everything."""
    with Proxy(ground.environ["TORTURE_SERVER"]) as proxy:
        mode = ground.next_of(AWAY)
        proxy.misbehave(mode)
        command = ground.start(
            "train", TINY, *named(ground), "step_seconds=0.06", "--tracking-uri", proxy.uri
        )
        ends(command, 0)
        _ends_within_the_grace(ground, command)
        promises.no_process_is_left(ground, SLOW_SECONDS if mode == "slow" else ORPHAN_SECONDS)
        if not proxy.met.is_set():
            raise Broken(f"error: nobody met a server away: {mode}")
        ground.note_fault(f"server away: {mode}")
        if mode != "slow" and ground.random.random() < 0.3:  # too early: it tries for a minute
            ground.run("sync", code=1)
        proxy.behave()
        ground.run("sync")
        finished(ground, reference)


def full_server_disk(ground: Ground, reference: Curves) -> None:
    """The disk of MLflow's server is full for a while: it answers with errors, and gets everything later."""
    root = ground.folder / "server"
    with small_disk(root) as disk, Server(root, ground.empty) as server:
        command = ground.start(
            "train", CLOCK, *SLOW, "step_seconds=0.05", "--tracking-uri", server.uri
        )
        _fill_now_and_then(ground, command, disk, "the server's disk full")
        finished(ground, reference)


def full_store_disk(ground: Ground, reference: Curves) -> None:
    """The disk of the embedded store is full for a while, the run's own is not."""
    root = ground.folder / "store"
    with small_disk(root) as disk:
        (root / "mlflow.db").write_bytes(ground.empty.read_bytes())
        command = ground.start(
            "train",
            CLOCK,
            *SLOW,
            "step_seconds=0.05",
            "--tracking-uri",
            f"sqlite:///{root / 'mlflow.db'}",
        )
        _fill_now_and_then(ground, command, disk, "the store's disk full")
        finished(ground, reference)


def _fill_now_and_then(ground: Ground, command: Command, disk: Disk, what: str) -> None:
    """Fill a disk that the training itself does not need, until that has ended well and everything is delivered.

    Not before there is a run: a store that cannot be written then is told in a message, and nothing is begun.
    """
    wait_for(lambda: ground.the_run() is not None or not command.running)
    moment = at_a_random_moment(ground, command)
    while command.busy() and len(ground.faults) < MOST_FULL:
        disk.fill()
        ground.note_fault(f"{what}, from {moment} on")
        time.sleep(ground.random.uniform(0.5, 3.0))
        if ground.random.random() < 0.7:
            disk.empty()
        time.sleep(ground.random.uniform(0.2, 1.0))
    ends(command, 0)
    promises.no_process_is_left(ground)
    disk.empty()
    ground.run("sync")


def _ends_within_the_grace(ground: Ground, command: Command) -> None:
    """The command ends soon after its training, whose server does not answer, or takes long for each answer."""
    at, allowed = command.ended, GRACE_SECONDS + SLACK_SECONDS
    ended = [
        event.time for event in read_all(the_run(ground).events) if isinstance(event, RunEnded)
    ]
    if at - ended[-1] > allowed:
        raise Broken(
            f"hang: the command ended {at - ended[-1]:.0f} s after its training, wanted {allowed:.0f} s"
        )


def _until_met(ground: Ground, command: Command, proxy: Proxy) -> None:
    """Keep up a proxy's mode until somebody has met it, and a while longer: only then it is a fault."""
    mode, aim = proxy.mode, proxy.aim
    if mode == "good":
        return
    wait_for(lambda: proxy.met.is_set() or not command.running, MEET_SECONDS)
    time.sleep(ground.random.uniform(0.0, 2.0))
    if proxy.behave():
        ground.note_fault(f"server {mode}{' at an upload' if aim == UPLOADS else ''}")


def _lock(ground: Ground, command: Command, what: str, met: Callable[[Delivery], bool]) -> None:
    """Keep everybody else out of the database until a writer has met that: only then it is a fault."""
    with contextlib.closing(
        sqlite3.connect(ground.database, timeout=1, isolation_level=None)
    ) as other:
        try:
            other.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return
        wait_for(lambda: not command.running or met(_delivery(ground)), MEET_SECONDS)
        time.sleep(ground.random.uniform(0.0, 1.0))
        if met(_delivery(ground)):
            ground.note_fault(f"database locked, {what}")
        other.execute("ROLLBACK")


def _was_refused(delivery: Delivery) -> bool:
    """Tell whether a writer gave up: the lock stood longer than the twenty seconds that it waits."""
    return "locked" in (delivery.error or "")


def _holds_up(ground: Ground) -> Callable[[Delivery], bool]:
    """Return what tells that a writer waits: it took what was journaled by now, and nothing of it arrives."""
    delivered, over = _delivered(ground), time.monotonic() + READ_SECONDS + 1.0
    return lambda now: time.monotonic() > over and now.pending > 0 and now.delivered == delivered


def _delivery(ground: Ground) -> Delivery:
    return delivery_status.status(the_run(ground))


def _delivered(ground: Ground) -> int:
    run = ground.the_run()
    return 0 if run is None or not run.events.exists() else delivery_status.status(run).delivered
