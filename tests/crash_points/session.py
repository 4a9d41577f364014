"""The training that is recorded: three attempts, of which SIGKILL ends two.

    python -m crash_points.session ROOT recorded|undisturbed

Each attempt is a fork of this process, which has imported PyTorch. Rank 0 runs the real loop, the
real checkpoint writer and the real journals. The deliverer works in the same process, at random
moments of a fixed seed, so that it is at times far behind the journal and at times at its end.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from rankzero.events import Event, RunStarted, StepsLogged, SystemSampled
from rankzero.experiment import Experiment
from rankzero.ranks import Ranks
from rankzero.run_store import run_locks
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import Journal, read_all
from rankzero.telemetry.sampling_thread import _next_sample
from rankzero.tracking import sync
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.retry import guarded
from rankzero.tracking.run_log import RunLog
from rankzero.training import lifecycle, worker
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.distributed.watchdog import Watchdog
from rankzero.training.distributed.world import World
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.stop import StopRequest
from support.memory_store import MemoryStore, deliverer_to
from support.training import tiny

RUN, STORE = "run", "mlflow"
SAVE_EVERY, EVALUATE_EVERY = 4, 8
KILLED_AT = (9, 17)  # of 24 steps
SAMPLE_EVERY = 5  # events between two samples of the node
WRITER_SECONDS = 0.05  # for the thread that writes checkpoints, while steps wait in the journal


SETTINGS = {
    "train.epochs": 2,
    "train.batch_size": 16,
    "train.log_every": 2,
    "train.eval_every": EVALUATE_EVERY,
    "train.checkpoints.save_every": SAVE_EVERY,
    "train.checkpoints.keep": 1,
}
"""There are checkpoints between the evaluations."""


def experiment() -> Experiment:
    """Return the experiment of all recordings."""
    return tiny(**SETTINGS)


def undisturbed(root: Path) -> Path:
    """Return where the same training runs once without a crash, and without being recorded."""
    return root.with_name(root.name + "-undisturbed")


def create(root: Path) -> RunFolder:
    """Create the run's folder below `root`."""
    identity = Identity(RUN, uuid.uuid4().hex, "crash points", "memory:")
    return RunFolder.create(root / "runs", identity)


class SharedLog(RunLog):
    """Rank 0's log. After each event the node is sampled and the deliverer works, at random."""

    def __init__(
        self, folder: RunFolder, attempt: int, work: Callable[[Event], None], patience: float = 0.0
    ) -> None:
        super().__init__(folder, Journal(folder.events), attempt, None, patience)
        self._work = work

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self._work(event)


def attempt(
    root: Path, seed: int, kill_at: int | None = None, writer_seconds: float = WRITER_SECONDS
) -> None:
    """Train from the newest checkpoint to the end, or until SIGKILL after step `kill_at`."""
    folder, store = RunFolder(root / "runs" / RUN), MemoryStore(root / STORE)
    chance, count = random.Random(seed), 0
    sync.close_if_dead(folder, 0.0)
    number = 1 + sum(isinstance(event, RunStarted) for event in read_all(folder.events))
    run_locks.claim(folder, 0)
    system = Journal(folder.system(0))
    system.flush()
    sample = _next_sample(folder.system(0))
    deliverer = deliverer_to(store, folder)

    def work(event: Event) -> None:
        nonlocal sample, count
        count += 1
        if count % SAMPLE_EVERY == 0:
            system(SystemSampled(time.time(), sample, {"system/load": 1.0}))
            sample += 1
        time.sleep(chance.choice((0.0, writer_seconds)))
        for _ in range(chance.choice((0, 0, 0, 1, 2, 5))):
            guarded(deliverer.work, pause_seconds=0.0)
        if kill_at is not None and isinstance(event, StepsLogged) and event.steps[-1] >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(SharedLog(folder, number, work))
    system.close()
    deliver(deliverer)


def train(log: RunLog) -> None:
    """Run one attempt of the training as `training/worker.py` does, without a launcher."""
    made, totals = experiment(), RunTotals()
    world = World(Ranks(), torch.device("cpu"), time.perf_counter)
    with lifecycle.tracked(log, made, {}, world, totals) as run:
        job, state = build(made, world)
        restore.newest(log.folder.checkpoints, job, state, log.notice)
        run.start(state.step, job.total_steps)
        watchdog = Watchdog(None, 0, ())
        run.outcome = worker._train(job, state, log, StopRequest(), totals, watchdog, {})


def deliver(deliverer: Deliverer, most: int = 1000) -> None:
    """Deliver everything. Raises AssertionError if there is no end to it."""
    for _ in range(most):
        if not guarded(deliverer.work, pause_seconds=0.0) and deliverer.complete:
            guarded(deliverer.commit, pause_seconds=0.0)
            return
    raise AssertionError(f"the delivery does not end: {deliverer.state.retries.error}")


def run_undisturbed(root: Path) -> None:
    """Run the training once in this process. Its forks then find everything loaded."""
    create(undisturbed(root))
    attempt(undisturbed(root), 0)


def in_fork(action: Callable[[], None]) -> int:
    """Run the action in a fork of this process; return its wait status."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(root: Path, what: str) -> None:
    """Train once undisturbed, or in the attempts that are recorded."""
    if what == "undisturbed":
        run_undisturbed(root)
        return
    create(root)
    for seed, kill_at in enumerate((*KILLED_AT, None)):
        status = in_fork(functools.partial(attempt, root, seed, kill_at))
        assert status == (0 if kill_at is None else signal.SIGKILL), status


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
