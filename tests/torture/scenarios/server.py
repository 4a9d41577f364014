"""MLflow's server, or the embedded store in its place: refuses, hangs, dies, is locked, is away."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from rankzero.events import RunEnded
from rankzero.tracking.journal import read_all
from torture import promises
from torture.disks import Disk, small_disk
from torture.ground import GRACE_SECONDS, Broken, Command, Ground, wait_for
from torture.promises import Curves
from torture.proxy import MODES, Proxy
from torture.scenarios.training import SETTINGS, TINY, at_a_random_moment, ends, finished, the_run
from torture.servers import Server

SLACK_SECONDS = 15.0
"""What a busy machine may add to the grace: importing mlflow, on processor time that nobody wants."""


def bad_server(ground: Ground, reference: Curves) -> None:
    """An MLflow server that refuses, hangs, answers nonsense, is slow: training ends well, and nothing is lost."""
    server = ground.environ["TORTURE_SERVER"]
    with Proxy(server) as proxy:
        if ground.random.random() < 0.3:
            _misbehave(ground, proxy)  # from the very start
        settings = ("--run-name", f"run-{ground.mark}", *SETTINGS[2:])
        command = ground.start("train", TINY, *settings, "--tracking-uri", proxy.uri)
        while command.running:
            time.sleep(ground.random.uniform(0.2, 1.0))
            _misbehave(ground, proxy)
            time.sleep(ground.random.uniform(0.2, 1.0))
            proxy.mode = "good"
        proxy.mode = "good"
        ends(command, 0)
        finished(ground, reference)


def locked_database(ground: Ground, reference: Curves) -> None:
    """The embedded store is locked by somebody else, again and again."""
    command = ground.start("train", TINY, *SETTINGS)
    database = ground.runs_folder.parent / "mlflow.db"
    while command.running:
        time.sleep(ground.random.uniform(0.2, 1.5))
        _lock(ground, database)
    ends(command, 0)
    finished(ground, reference)


def killed_server(ground: Ground, reference: Curves) -> None:
    """SIGKILL of MLflow's server, again and again; it comes back on the same store during the run, or only later."""
    with Server(ground.folder / "server", ground.empty) as server:
        command = ground.start("train", TINY, *SETTINGS, "--tracking-uri", server.uri)
        at_a_random_moment(ground, command)
        for _ in range(ground.random.choice((1, 1, 2))):
            server.kill()
            ground.hurt("SIGKILL of the server")
            if ground.random.random() < 0.6:
                time.sleep(ground.random.uniform(0.0, 3.0))
                server.start()
                time.sleep(ground.random.uniform(0.0, 2.0))
        ends(command, 0)
        promises.nobody_is_left(ground)
        server.start()
        ground.run("sync")
        finished(ground, reference)


def server_away(ground: Ground, reference: Curves) -> None:
    """No server for the whole run: the command ends within the grace, and the next day `sync` delivers everything."""
    with Proxy(ground.environ["TORTURE_SERVER"]) as proxy:
        proxy.mode = ground.random.choice(("refuse", "hang", "500", "garbage", "empty", "login"))
        ground.hurt(f"server away: {proxy.mode}")
        settings = ("--run-name", f"run-{ground.mark}", *SETTINGS[2:])
        command = ground.start("train", TINY, *settings, "--tracking-uri", proxy.uri)
        ends(command, 0)
        _ends_within_the_grace(ground, command)
        promises.nobody_is_left(ground)
        if ground.random.random() < 0.3:  # too early: it tries for a minute
            ground.run("sync", code=1)
        proxy.mode = "good"
        ground.run("sync")
        finished(ground, reference)


def full_server_disk(ground: Ground, reference: Curves) -> None:
    """The disk of MLflow's server is full for a while: it answers with errors, and gets everything later."""
    root = ground.folder / "server"
    with small_disk(root) as disk, Server(root, ground.empty) as server:
        command = ground.start("train", TINY, *SETTINGS, "--tracking-uri", server.uri)
        _fill_now_and_then(ground, command, disk, "the server's disk full")
        finished(ground, reference)


def full_store_disk(ground: Ground, reference: Curves) -> None:
    """The disk of the embedded store is full for a while, the run's own is not."""
    root = ground.folder / "store"
    with small_disk(root) as disk:
        (root / "mlflow.db").write_bytes(ground.empty.read_bytes())
        command = ground.start("train", TINY, *SETTINGS, "--tracking-uri", f"sqlite:///{root / 'mlflow.db'}")
        _fill_now_and_then(ground, command, disk, "the store's disk full")
        finished(ground, reference)


def _fill_now_and_then(ground: Ground, command: Command, disk: Disk, what: str) -> None:
    """Fill a disk that the training itself does not need, until that has ended well and everything is delivered.

    Not before there is a run: a store that cannot be written then is told in a message, and nothing is begun.
    """
    wait_for(lambda: ground.the_run() is not None or not command.running)
    at_a_random_moment(ground, command)
    while command.running and len(ground.faults) < 4:
        disk.fill()
        ground.hurt(what)
        time.sleep(ground.random.uniform(0.5, 3.0))
        if ground.random.random() < 0.7:
            disk.empty()
        time.sleep(ground.random.uniform(0.2, 1.0))
    ends(command, 0)
    promises.nobody_is_left(ground)
    disk.empty()
    ground.run("sync")


def _ends_within_the_grace(ground: Ground, command: Command) -> None:
    """The command ends soon after its training, whose server does not answer."""
    at, allowed = command.ended, GRACE_SECONDS + SLACK_SECONDS
    ended = [event.time for event in read_all(the_run(ground).events) if isinstance(event, RunEnded)]
    if at - ended[-1] > allowed:
        raise Broken(f"hang: the command ended {at - ended[-1]:.0f} s after its training, wanted {allowed:.0f} s")


def _lock(ground: Ground, database: Path) -> None:
    """Keep everybody else out of the database for a while."""
    with contextlib.closing(sqlite3.connect(database, timeout=1, isolation_level=None)) as other:
        try:
            other.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return
        ground.hurt("database locked")
        time.sleep(ground.random.uniform(0.2, 2.0))
        other.execute("ROLLBACK")


def _misbehave(ground: Ground, proxy: Proxy) -> None:
    proxy.mode = ground.random.choice(MODES)
    ground.hurt(f"server {proxy.mode}")
