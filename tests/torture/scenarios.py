"""What can go wrong, each as a scenario: it injects faults at random moments, then asks whether the promises held."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from rankzero.tracking.journal import RunFolder
from rankzero.train import checkpoint
from torture import promises
from torture.damage import DAMAGES
from torture.ground import Broken, Command, Ground, wait_for
from torture.promises import Losses
from torture.proxy import MODES, Proxy

TINY = Path(__file__).parents[1] / "fixtures" / "tiny.py"
CLOCK = TINY.with_name("clocked.py")
STEPS = 200
SETTINGS = (
    "--run-name", "run", "--nproc", 2, "step_seconds=0.01", "dropout=0.2", f"train.steps={STEPS}", "train.log_every=4",
    "train.eval_every=20", "train.keep=2",
)  # fmt: skip
Scenario = Callable[[Ground, Losses], None]


def killed_ranks(ground: Ground, reference: Losses) -> None:
    """SIGKILL of ranks, of the recorder, of the courier, again and again: the training restarts and gets to its end."""
    command = ground.start("train", TINY, *SETTINGS, "--max-restarts", 50)
    while command.running and len(ground.faults) < 6:
        time.sleep(ground.random.uniform(0.2, 3.0))
        _kill(ground, ground.random.choice(("rank 0", "other rank", "recorder", "courier")))
    _ends(command, 0)
    _finished(ground, reference)


def killed_launcher(ground: Ground, reference: Losses) -> None:
    """SIGKILL of the command, or of the server that ranks are forked from: the ranks end, the run goes on later."""
    command = ground.start("train", TINY, *SETTINGS)
    _at_a_random_moment(ground, command)
    _kill(ground, ground.random.choice(("launcher", "server")))
    command.wait()
    promises.nobody_is_left(ground)
    _goes_on(ground, reference, ("KILLED", "FAILED", "FINISHED"))


def signals(ground: Ground, reference: Losses) -> None:
    """SIGTERM, SIGINT, SIGUSR1 or SIGHUP, once or twice, to the command or to a rank: stopped with a checkpoint."""
    command = ground.start("train", TINY, *SETTINGS)
    _at_a_random_moment(ground, command)
    number = ground.random.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP))
    target = ground.random.choice(("launcher", "launcher", "rank 0", "other rank"))
    for _ in range(ground.random.choice((1, 1, 2))):
        victim = ground.roles().get(target)
        if victim is not None:
            with contextlib.suppress(psutil.Error):
                victim.send_signal(number)
                ground.hurt(f"{number.name} to {target}")
        time.sleep(ground.random.uniform(0, 0.3))
    command.wait()
    promises.nobody_is_left(ground)
    _goes_on(ground, reference, ("KILLED", "FAILED", "FINISHED"))


def bad_server(ground: Ground, reference: Losses) -> None:
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
        _ends(command, 0)
        _finished(ground, reference)


def locked_database(ground: Ground, reference: Losses) -> None:
    """The embedded store is locked by somebody else, again and again."""
    command = ground.start("train", TINY, *SETTINGS)
    database = ground.runs_folder.parent / "mlflow.db"
    while command.running:
        time.sleep(ground.random.uniform(0.2, 1.5))
        _lock(ground, database)
    _ends(command, 0)
    _finished(ground, reference)


def full_disk(ground: Ground, reference: Losses) -> None:
    """The disk is full for a while, or to the end: training goes on or says why not; what was saved stays good."""
    with _small_disk(ground.runs_folder.parent) as disk:
        command = ground.start("train", TINY, *SETTINGS)
        _at_a_random_moment(ground, command)
        while command.running and len(ground.faults) < 4:
            disk.fill()
            ground.hurt("disk full")
            time.sleep(ground.random.uniform(0.5, 2.0))
            if ground.random.random() < 0.7:
                disk.empty()
            time.sleep(ground.random.uniform(0.2, 1.0))
        command.wait()
        disk.empty()
        promises.nobody_is_left(ground)
        _goes_on(ground, reference, ("FINISHED", "FAILED", "KILLED"))


def damaged_checkpoints(ground: Ground, reference: Losses) -> None:
    """Checkpoints truncated, with flipped bits, foreign, malicious: never executed, the one before is used."""
    ground.run("train", TINY, *SETTINGS, "train.keep=3")
    run = _run(ground)
    whole = ground.folder / "whole"
    shutil.copytree(run.checkpoints, whole)
    for _ in range(20):
        damage = ground.random.choice(tuple(DAMAGES))
        newest = sorted(run.checkpoints.glob("step_*"))[-1]
        ground.hurt(f"checkpoint {damage}")
        proof = ground.folder / "executed"
        DAMAGES[damage](newest, ground.random, proof)
        path, _ = checkpoint.newest_intact(run.checkpoints)
        if path is None:
            raise Broken(f"corrupt: after {damage}, no checkpoint is left")
        with contextlib.suppress(checkpoint.BrokenCheckpoint):
            checkpoint.load(newest)
        if proof.exists():
            raise Broken(f"executed: loading a checkpoint that is {damage} ran its code")
        if damage == "malicious":
            path = sorted(run.checkpoints.glob("step_*"))[-2]
        saved = checkpoint.load(path)
        if saved["step"] != checkpoint.load(whole / path.name)["step"]:
            raise Broken(f"corrupt: after {damage}, {path.name} is another")
        shutil.rmtree(run.checkpoints)
        shutil.copytree(whole, run.checkpoints)
    DAMAGES[ground.random.choice(("truncated", "bit-flipped", "emptied"))](newest, ground.random, proof)
    ground.run("resume", "run", f"train.steps={STEPS}")
    promises.nothing_is_lost(run, reference, steps=STEPS)


def hurt_ranks(ground: Ground, reference: Losses) -> None:
    """One rank raises, has no memory, is NaN, at a random step: the run has failed, and goes on without that."""
    what = ground.random.choice(("raise", "nan", "memory", "exit", "segfault", "hang"))
    rank, step = ground.random.randrange(2), ground.random.randrange(1, STEPS)
    ground.environ["TORTURE_RANK"] = f"{what} {rank} {step}"
    ground.hurt(f"{what} on rank {rank}")
    command = ground.start("train", CLOCK, *SETTINGS, "train.oom=fail", "train.hang_minutes=0.1")
    _ends(command, 1)
    del ground.environ["TORTURE_RANK"]
    promises.nobody_is_left(ground)
    _goes_on(ground, reference, ("FAILED",))


def stopped_ranks(ground: Ground, reference: Losses) -> None:
    """A process is stopped and continued, as a debugger or a laptop's lid does: a straggler costs time only."""
    command = ground.start("train", TINY, *SETTINGS)
    while command.running and len(ground.faults) < 5:
        time.sleep(ground.random.uniform(0.2, 1.5))
        victim = ground.roles().get(ground.random.choice(("rank 0", "other rank", "recorder", "courier", "launcher")))
        if victim is not None:
            with contextlib.suppress(psutil.Error):
                victim.suspend()
                ground.hurt("SIGSTOP")
                time.sleep(ground.random.uniform(0.1, 1.5))
                victim.resume()
    _ends(command, 0)
    _finished(ground, reference)


def jumping_clock(ground: Ground, reference: Losses) -> None:
    """The clock jumps by hours, forwards and backwards, on one rank or on both."""
    jumps = ground.random.randrange(1, 5)
    ground.environ["TORTURE_CLOCK"] = " ".join(
        f"{ground.random.randrange(-1, 2)}:{ground.random.randrange(1, STEPS)}:{ground.random.uniform(-1e5, 1e5):.0f}"
        for _ in range(jumps)
    )
    for _ in range(jumps):
        ground.hurt("clock jumps")
    ground.run("train", CLOCK, *SETTINGS)
    _finished(ground, reference)


def torn_journal(ground: Ground, reference: Losses) -> None:
    """A machine dies, its journal has torn or foreign lines; what is whole is delivered, and the run goes on."""
    command = ground.start("train", TINY, *SETTINGS)
    _at_a_random_moment(ground, command, earliest="step")
    for role in ("courier", "recorder", "launcher", "rank 0", "other rank", "server"):
        _kill(ground, role)
    command.wait()
    promises.nobody_is_left(ground)
    run = _run(ground)
    with run.events.open("ab") as file:
        file.write(ground.random.choice((b'{"torn": ', b"\xff\xfe\x00garbage\n", b'["foreign", 1]\n', b"\n\n")))
    ground.hurt("journal torn")
    _goes_on(ground, reference, ("FAILED", "FINISHED"))


SCENARIOS: dict[str, Scenario] = {
    "killed ranks": killed_ranks,
    "killed launcher": killed_launcher,
    "signals": signals,
    "bad server": bad_server,
    "locked database": locked_database,
    "full disk": full_disk,
    "damaged checkpoints": damaged_checkpoints,
    "hurt ranks": hurt_ranks,
    "stopped ranks": stopped_ranks,
    "jumping clock": jumping_clock,
    "torn journal": torn_journal,
}


def _kill(ground: Ground, role: str) -> None:
    victim = ground.roles().get(role)
    if victim is not None:
        with contextlib.suppress(psutil.Error):
            victim.kill()
            ground.hurt(f"SIGKILL of {role}")


def _at_a_random_moment(ground: Ground, command: Command, earliest: str = "start") -> None:
    """Wait for a moment of the training: its start, a step, a checkpoint, its end."""
    moment = ground.random.choice([one for one in ("start", "step", "checkpoint", "end") if earliest in ("start", one)])

    def reached() -> bool:
        run = ground.the_run()
        if not command.running:
            return True
        if run is None or not run.events.exists():
            return False
        steps = promises.journaled(run)
        if moment == "end":
            return len(steps) >= STEPS - 8
        return len(steps) >= 4 if moment == "step" else any(run.checkpoints.glob("*step_*"))

    if moment != "start":
        wait_for(reached)
    time.sleep(ground.random.uniform(0, 4.0 if moment == "start" else 1.5))


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


def _run(ground: Ground) -> RunFolder:
    run = ground.the_run()
    if run is None:
        raise Broken("lost: there is no run")
    return run


def _ends(command: Command, code: int) -> None:
    found = command.wait()
    if found != code:
        raise Broken(f"wrong status: exit code {found}, wanted {code}: {command.tail()}")


def _finished(ground: Ground, reference: Losses) -> None:
    """Nobody is left, everything is in MLflow, the run has finished."""
    promises.nobody_is_left(ground)
    run = _run(ground)
    promises.nothing_is_lost(run, reference, steps=STEPS)
    promises.status_is(run, "FINISHED")
    promises.checkpoint_is_intact(run)


def _goes_on(ground: Ground, reference: Losses, allowed: tuple[str, ...]) -> None:
    """What there is of the run is true and whole; it goes on to the end of a training that nobody disturbed."""
    run = ground.the_run()
    if run is None or not run.events.exists():  # ended before it began: nothing to be true of
        return
    promises.nothing_is_lost(run, reference)
    status = promises.status_is(run, *allowed)
    step = promises.checkpoint_is_intact(run)
    if status != "FINISHED" and step:
        ground.run("resume", run.path.name)
        _finished(ground, reference)


class _Disk:
    """A file system that can be filled."""

    def __init__(self, path: Path) -> None:
        self._filler = path / "filler"

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def _small_disk(path: Path) -> Iterator[_Disk]:
    """Mount a small file system over a folder, with what is in it, for the duration of the block."""
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(path)], check=True)
    try:
        shutil.copytree(kept, path, dirs_exist_ok=True)
        yield _Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
