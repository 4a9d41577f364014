"""The process that talks to MLflow, on processor time that nobody wants: `python -m rankzero.tracking.courier`.

Apart from the recorder, which must sample on time: importing mlflow takes seconds of processor
time, and a busy machine may give this process none for minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rankzero.redaction.log_format import log_without_secrets
from rankzero.run_store.attempt import LiveAttempt, closed
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.provenance import write_packages
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.retry import grace_seconds, guarded, succeeds
from rankzero.tracking.study_deliverer import StudyDeliverer

TICK_SECONDS = 0.5
MODEST = (
    10  # a nice value: about a tenth of a processor where all are taken, none where one is free
)


def deliver_attempt(
    attempt: LiveAttempt, deliverer: Deliverer | StudyDeliverer, recorder: int
) -> None:
    """Deliver until the attempt is over and all is delivered, or nothing moves any more, or a newer attempt begins.

    `recorder`: a pipe that the recorder closes when it has written its last; it may die before rank 0 does.
    """
    ended, said, moved = False, False, time.monotonic()
    while attempt.is_latest:
        guarded(lambda: attempt.wait(0.0))
        if not ended and attempt.over and closed(recorder):
            ended, moved = True, time.monotonic()
            _come_forward()
            said = succeeds(attempt.ensure_run_ended)
            deliverer.hasten()
        if guarded(deliverer.work):
            moved = time.monotonic()
        elif ended and (
            (said and guarded(lambda: deliverer.complete))
            or time.monotonic() - moved > grace_seconds()
        ):
            break
        else:
            said = said or (ended and succeeds(attempt.ensure_run_ended))
            guarded(lambda: attempt.wait(TICK_SECONDS))
    guarded(deliverer.commit)


def main(arguments: Sequence[str] | None = None) -> None:
    """Deliver one attempt's journals of one node."""
    options = _parse(arguments)
    log_without_secrets()
    _go_to_the_background(options.nice)
    folder = RunFolder(options.folder)
    if options.node == 0:  # a tenth of a second that the training process need not spend
        guarded(lambda: write_packages(folder.artifacts))
    deliver_attempt(
        LiveAttempt(folder, options.node, options.token),
        StudyDeliverer(folder, options.node),
        options.pipe,
    )


def _go_to_the_background(nice: int) -> None:
    with contextlib.suppress(
        OSError
    ):  # desktops weigh a session as a whole, whatever its processes' priorities
        Path("/proc/self/autogroup").write_text(str(nice or 19))
    try:
        if not nice:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        nice = 19
    os.nice(nice)


def _come_forward() -> None:
    """Take a little processor time that others want, too, where that may be asked back: the training is over."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, MODEST)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rankzero.tracking.courier")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--token", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--nice", type=int, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
