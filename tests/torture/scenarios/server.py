"""Faults of MLflow's server and of the embedded store: errors, hangs, kills, locks, full disks."""

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

# A busy machine may add this to the grace: the courier imports mlflow at a low priority.
SLACK_SECONDS = 15.0
# The limit for a courier if each answer takes five seconds. It makes progress, so nothing ends it.
SLOW_SECONDS = 600.0
# A training of most of a minute, because a courier sends every five seconds.
UNHURRIED = "step_seconds=0.25"
# How long a fault lasts until a request meets it. A writer waits half of that for a lock.
MEET_SECONDS = 45.0
SERVER_FAULTS = (
    *((mode, EVERYTHING) for mode in MODES),
    *((mode, UPLOADS) for mode in ("500", "half", "close", "hang")),
)
SERVER_FAULTS_EACH = 5
MOST_LOCKS, MOST_FULL = 4, 8
AWAY = ("refuse", "hang", "500", "429", "garbage", "empty", "login", "slow")


def bad_server(ground: Ground, reference: Curves) -> None:
    """The server refuses, hangs, is slow or answers nonsense: the run finishes, nothing is lost."""
    with Proxy(ground.environ["TORTURE_SERVER"]) as proxy:
        modes = ground.turn.of(SERVER_FAULTS, SERVER_FAULTS_EACH)
        # Sometimes the server misbehaves from the start.
        if ground.random.random() < 0.3:
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
    """Lock the embedded store repeatedly, once for longer than a writer waits."""
    command = ground.start("train", TINY, *SETTINGS, "step_seconds=0.35")
    wait_for(lambda: not command.running or _delivered(ground) > 0)
    _lock(ground, command, "refused", _was_refused)
    while command.busy() and len(ground.faults) < MOST_LOCKS:
        time.sleep(ground.random.uniform(0.2, 1.5))
        _lock(ground, command, "waited for", _holds_up(ground))
    ends(command, 0)
    finished(ground, reference)


def killed_server(ground: Ground, reference: Curves) -> None:
    """Kill MLflow's server. It restarts on the same store, during the run or after it."""
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
    """No server for the whole run: the command ends in time, and `sync` delivers later."""
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
            raise Broken(f"error: no request met the server in mode {mode}")
        ground.note_fault(f"server away: {mode}")
        # Sometimes `sync` comes too early. It tries for a minute.
        if mode != "slow" and ground.random.random() < 0.3:
            ground.run("sync", code=1)
        proxy.behave()
        ground.run("sync")
        finished(ground, reference)


def full_server_disk(ground: Ground, reference: Curves) -> None:
    """The disk of MLflow's server is full for a while: the server gets everything later."""
    root = ground.folder / "server"
    with small_disk(root) as disk, Server(root, ground.empty) as server:
        command = ground.start(
            "train", CLOCK, *SLOW, "step_seconds=0.05", "--tracking-uri", server.uri
        )
        _fill_now_and_then(ground, command, disk, "the server's disk full")
        finished(ground, reference)


def full_store_disk(ground: Ground, reference: Curves) -> None:
    """The disk of the embedded store is full for a while. The run's own disk is not."""
    root = ground.folder / "store"
    with small_disk(root) as disk:
        (root / "mlflow.db").write_bytes(ground.empty.read_bytes())
        command = ground.start(
            *("train", CLOCK),
            *SLOW,
            *("step_seconds=0.05", "--tracking-uri", f"sqlite:///{root / 'mlflow.db'}"),
        )
        _fill_now_and_then(ground, command, disk, "the store's disk full")
        finished(ground, reference)


def _fill_now_and_then(ground: Ground, command: Command, disk: Disk, what: str) -> None:
    """Fill the store's disk now and then until the training has ended, and deliver the rest."""
    # A command whose store cannot be written at its start ends with an error and begins no run.
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
    """Check that the command ends soon after its training, although the server does not answer."""
    at, allowed = command.ended, GRACE_SECONDS + SLACK_SECONDS
    ended = [
        event.time for event in read_all(the_run(ground).events) if isinstance(event, RunEnded)
    ]
    if at - ended[-1] > allowed:
        raise Broken(
            f"hang: the command ended {at - ended[-1]:.0f} s after its training, "
            f"wanted {allowed:.0f} s"
        )


def _until_met(
    ground: Ground, command: Command, proxy: Proxy, seconds: float = MEET_SECONDS
) -> None:
    """Keep the proxy's mode until a request meets it. Without that, it is no fault."""
    mode, aim = proxy.mode, proxy.aim
    if mode == "good":
        return
    wait_for(lambda: proxy.met.is_set() or not command.running, seconds)
    time.sleep(ground.random.uniform(0.0, 2.0))
    if proxy.behave():
        ground.note_fault(f"server {mode}{' at an upload' if aim == UPLOADS else ''}")


def _lock(
    ground: Ground,
    command: Command,
    what: str,
    met: Callable[[Delivery], bool],
    seconds: float = MEET_SECONDS,
) -> None:
    """Lock the database until a writer meets the lock. Without that, it is no fault."""
    with contextlib.closing(
        sqlite3.connect(ground.database, timeout=1, isolation_level=None)
    ) as other:
        try:
            other.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return
        wait_for(lambda: not command.running or met(_delivery(ground)), seconds)
        time.sleep(ground.random.uniform(0.0, 1.0))
        if met(_delivery(ground)):
            ground.note_fault(f"database locked, {what}")
        other.execute("ROLLBACK")


def _was_refused(delivery: Delivery) -> bool:
    """Return whether a writer gave up: it waits twenty seconds for a lock."""
    return "locked" in (delivery.error or "")


def _holds_up(ground: Ground) -> Callable[[Delivery], bool]:
    """Return a condition that is true while a writer waits for a lock."""
    # After this time it has read all that is journaled now, but nothing arrives.
    delivered, over = _delivered(ground), time.monotonic() + READ_SECONDS + 1.0
    return lambda now: time.monotonic() > over and now.pending > 0 and now.delivered == delivered


def _delivery(ground: Ground) -> Delivery:
    return delivery_status.status(the_run(ground))


def _delivered(ground: Ground) -> int:
    run = ground.the_run()
    return 0 if run is None or not run.events.exists() else delivery_status.status(run).delivered
