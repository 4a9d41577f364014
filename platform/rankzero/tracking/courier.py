"""The process that talks to MLflow: `python -m rankzero.tracking.courier`.

It is apart from the recorder, which must sample on time: importing mlflow takes about a second of
processor time, and this process leaves it to the training (`throttle`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankzero.mlflow_store.patience import grace_seconds
from rankzero.redaction.text import log_without_secrets
from rankzero.run_store import lock_files, run_locks
from rankzero.run_store.attempt import LiveAttempt, closed, finish_lines
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import finish_line
from rankzero.run_store.provenance import write_packages
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.retry import PAUSE_SECONDS, guarded, succeeds
from rankzero.tracking.throttle import Throttle, give_way
from rankzero.tracking.trial_deliverers import TrialDeliverers


def deliver_attempt(
    attempt: LiveAttempt,
    deliverer: Deliverer,
    trials: TrialDeliverers,
    recorder: int,
    *,
    tick_seconds: float = 0.5,
    pause_seconds: float = PAUSE_SECONDS,
    on_idle: Callable[[], object] = lambda: None,
) -> None:
    """Deliver until the attempt has ended and all is delivered, or a newer attempt begins.

    Gives up after `grace_seconds` without progress since the end. `recorder` is a pipe that the
    recorder closes after its last sample. The recorder may die before rank 0. Calls `on_idle`
    whenever nothing is due, unless MLflow fails.
    """
    run = functools.partial(guarded, pause_seconds=pause_seconds)

    write_end = functools.partial(succeeds, lambda: _end_journals(attempt), pause_seconds)
    ended = end_written = False
    moved = time.monotonic()
    while attempt.is_latest:
        run(lambda: attempt.wait(0.0))
        run(trials.look)
        if not ended and attempt.over and closed(recorder):
            ended, moved, end_written = True, time.monotonic(), write_end()
            deliverer.hasten()
            trials.hasten()
        # Each for itself: one whose folder was moved must not stop the others.
        worked = [run(each.work) for each in (deliverer, *trials)]
        if any(worked):
            moved = time.monotonic()
            continue
        # Not `complete`: the next steps often come while these are sent.
        if all(each.state.retries.error is None for each in (deliverer, *trials)):
            on_idle()
        # Complete counts only after the end: before it, more events may come.
        complete = end_written and run(lambda: _is_complete(attempt, deliverer, trials))
        if ended and (complete or time.monotonic() - moved > grace_seconds()):
            break
        end_written = end_written or (ended and write_end())
        run(lambda: attempt.wait(tick_seconds))
    # The last write: retries may have changed the counts since the last batch.
    run(trials.close)
    run(deliverer.commit)


def _end_journals(attempt: LiveAttempt) -> None:
    attempt.ensure_run_ended()
    # A full disk or SIGKILL of the recorder may have cut the last sample.
    finish_line(attempt.folder.system(attempt.node))


def _is_complete(attempt: LiveAttempt, deliverer: Deliverer, trials: TrialDeliverers) -> bool:
    # Rank 0 may have died after its end, within a further line.
    if not run_locks.writer_lives(attempt.folder):
        finish_lines(attempt.folder, attempt.node)
    return deliverer.complete and trials.complete


def main(arguments: Sequence[str] | None = None) -> None:
    """Deliver one attempt's journals of one node."""
    parser = argparse.ArgumentParser(prog="rankzero.tracking.courier")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--token", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--idle", action="store_true", help="use only idle processor time")
    behind = "seconds since an earlier courier has delivered something"
    parser.add_argument("--behind", type=float, default=0.0, help=behind)
    # A recorder of an earlier version passes it, if RankZero is upgraded during its run.
    parser.add_argument("--nice", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    log_without_secrets()
    # A study may have a thousand trials. Each holds two files as long as MLflow is away.
    lock_files.allow_many_files()
    folder = RunFolder(options.folder)
    throttle = Throttle(functools.partial(closed, options.pipe), behind=options.behind)
    if options.idle:
        give_way()
    with contextlib.nullcontext() if options.idle else throttle:
        if options.node == 0:
            # It takes a tenth of a second, which the training process need not spend.
            guarded(lambda: write_packages(folder.artifacts))
        deliver_attempt(
            LiveAttempt(folder, options.node, options.token),
            Deliverer(folder, options.node),
            TrialDeliverers(folder),
            options.pipe,
            on_idle=throttle.caught_up,
        )


if __name__ == "__main__":
    main()
