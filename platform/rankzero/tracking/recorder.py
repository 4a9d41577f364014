"""The process that records a run next to rank 0, one on each node.

    rank 0   start() ── pipe ──▶ python -m rankzero.tracking.recorder ── starts ──▶ courier
             appends events.jsonl        appends system-node_<i>.jsonl          sends both to MLflow
             close() or death            sees the pipe close, writes FAILED     sends the rest, ends
                                         if rank 0 wrote no end

It samples the node, writes the end that a killed rank 0 could not, and keeps a courier alive. It
costs the training process one spawn, ignores Ctrl-C, and lasts while MLflow is down. In the end
`rankzero sync` delivers what is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero import ranks
from rankzero.run_store import run_locks, symlinks
from rankzero.run_store.folder import RunFolder

if TYPE_CHECKING:
    from rankzero.run_store.attempt import LiveAttempt
    from rankzero.tracking.courier_supervisor import CourierSupervisor

# The training process imports this module, so `main` imports what only the recorder needs.

_SOURCE_ROOT = str(Path(__file__).parents[2])
_IGNORED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class RecorderHandle:
    """Rank 0's end of the pipe. The recorder ends after it is closed or this process dies."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self.is_reaped = pid, False
        self._pipe: int | None = pipe
        _handles.add(self)

    def close(self) -> None:
        """Signal that no more events come. A second call does nothing."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._pipe is None


# The recorders of this process that are not reaped, or whose pipe is open. The set is global
# because a fork copies the pipes of all of them.
_handles: set[RecorderHandle] = set()


def _close_inherited() -> None:
    """Close the pipes in a forked child. A data-loading process must not look like rank 0."""
    for handle in _handles:
        with contextlib.suppress(OSError):
            handle.close()
    _handles.clear()


os.register_at_fork(after_in_child=_close_inherited)


def start(
    folder: RunFolder,
    gpu_uuids: Sequence[str] | None,
    node: int,
    node_count: int = 1,
    *,
    offline: bool = False,
) -> RecorderHandle:
    """Start the recorder of this node. Takes milliseconds and never waits.

    Call it before the attempt's first event. `gpu_uuids` are the GPUs to sample; None means all
    in CUDA_VISIBLE_DEVICES. With `offline` the recorder starts no courier.
    """
    # The claim comes first: an older recorder sees it and stops before this one delivers.
    claim = run_locks.claim(folder, node)
    # The process above all of this node's ranks.
    several = ranks.detect(os.environ).local_world_size > 1
    job = os.getppid() if several else os.getpid()
    reader, writer = os.pipe()
    command = [
        *(sys.executable, "-P", "-m", "rankzero.tracking.recorder", str(folder.path)),
        *("--token", claim.token, "--node", str(node), "--nodes", str(node_count)),
        *("--job", str(job), *(() if gpu_uuids is None else ("--gpus", *gpu_uuids))),
        *(("--offline",) if offline else ()),
    ]
    # One thread a library, and no warnings as errors.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    path = [entry for entry in (kept.get("PYTHONPATH"), _SOURCE_ROOT) if entry]
    log = folder.path / ("recorder.log" if node == 0 else f"recorder-node_{node}.log")
    with open(log, "ab", opener=symlinks.no_follow) as output:
        # In a session of its own, so that a Ctrl-C at the terminal does not reach it.
        process = subprocess.Popen(
            command,
            stdin=reader,
            stdout=output,
            stderr=output,
            env={**kept, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )
    os.close(reader)
    # It outlives this process, so Popen is not to warn that nobody waited for it.
    process.returncode = 0
    _reap()
    return RecorderHandle(process.pid, writer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record one attempt on one node."""
    from rankzero.redaction.text import log_without_secrets
    from rankzero.run_store.attempt import LiveAttempt
    from rankzero.run_store.provenance import write_packages
    from rankzero.telemetry.sampling_thread import SamplingThread
    from rankzero.tracking.courier_supervisor import CourierSupervisor
    from rankzero.tracking.retry import guarded

    parser = argparse.ArgumentParser(prog="rankzero.tracking.recorder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--token", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--gpus", nargs="*")
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args(arguments)
    # They are meant for the training, and the recorder is there to record how that ends.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    log_without_secrets()
    folder = RunFolder(options.folder)
    attempt = LiveAttempt(folder, options.node, options.token)
    sampling = SamplingThread(folder, options.gpus, options.node, options.nodes, options.job)
    if options.offline and options.node == 0:  # Otherwise the courier writes it.
        guarded(lambda: write_packages(folder.artifacts))
    has_parent = _delivered_by_parent(folder)
    courier = None if options.offline or has_parent else CourierSupervisor(attempt)
    follow(attempt, courier)
    guarded(sampling.stop)  # It fails on a full disk, and the courier still needs us.
    # The end of a study is news, and that of one of its trials is not.
    finish(attempt, courier, notifies=options.node == 0 and not has_parent)


def follow(
    attempt: LiveAttempt,
    courier: CourierSupervisor | None,
    *,
    tick_seconds: float = 0.5,
    pause_seconds: float = 5.0,
) -> None:
    """Keep the courier alive until rank 0 has ended or a newer attempt begins."""
    from rankzero.tracking.retry import guarded

    # A lock that others test to learn whether this recorder lives. It is never closed.
    announced = None
    while attempt.is_latest and not attempt.over:
        if announced is None:
            announced = run_locks.announce_recorder(attempt.folder, attempt.node, attempt.token)
        if courier is not None:
            courier.tend()
        guarded(lambda: attempt.wait(tick_seconds), pause_seconds)


def finish(
    attempt: LiveAttempt,
    courier: CourierSupervisor | None,
    *,
    notifies: bool = False,
    pause_seconds: float = 5.0,
) -> None:
    """Write the run's end if rank 0 did not, and keep the courier alive until it has delivered.

    Writing is retried for `grace_seconds`. With `notifies`, the webhook gets the news meanwhile.
    """
    from rankzero.mlflow_store.patience import grace_seconds
    from rankzero.redaction.text import NOTIFY
    from rankzero.tracking import notification
    from rankzero.tracking.retry import guarded, succeeds

    until = time.monotonic() + grace_seconds()
    written = succeeds(attempt.ensure_run_ended, pause_seconds)
    if attempt.node == 0:
        guarded(lambda: _end_children(attempt.folder))
    sender = None
    webhook = os.environ.get(NOTIFY) if notifies else None
    if webhook and attempt.is_latest:
        sender = notification.start(attempt.folder, attempt.token, webhook)
    if courier is not None:
        courier.finish()
    while (courier is not None and courier.tend()) or (not written and time.monotonic() < until):
        if not written and succeeds(attempt.ensure_run_ended, pause_seconds):
            written = True
            guarded(lambda: _end_children(attempt.folder))
        time.sleep(0.1)
    if sender is not None:
        sender.join(notification.LONGEST_SECONDS)


def _end_children(folder: RunFolder) -> None:
    """End the trials of a search that has died. One that has finished has waited for them."""
    from rankzero.catalog import dead_runs, lookup

    end = lookup.last_end(folder)
    if end is not None and end.status != "FINISHED":
        dead_runs.close_children(folder)


def _delivered_by_parent(folder: RunFolder) -> bool:
    """Return whether the courier of the study or repeat that launched the run delivers it.

    The run may continue by itself later, after its parent's end. Then it has a courier of its own.
    """
    from rankzero.catalog import lookup

    if folder.identity.parent is None:
        return False
    parent = RunFolder(folder.path.parent / folder.identity.parent)
    end, claim = lookup.last_end(parent), run_locks.latest(folder, 0)
    if end is None:
        return run_locks.writer_lives(parent)
    # A short parent may end while this recorder starts. Its process may live on, as a notebook's.
    return claim is not None and claim.time < end.time


def _reap() -> None:
    """Reap recorders that have ended. A notebook starts many runs in one process."""
    for handle in tuple(_handles):
        with contextlib.suppress(ChildProcessError):
            if not handle.is_reaped and os.waitpid(handle.pid, os.WNOHANG)[0] == 0:
                continue
        handle.is_reaped = True
        # A run that outlives its recorder keeps the pipe, which a forked child must close.
        if handle.is_closed:
            _handles.discard(handle)


if __name__ == "__main__":
    main()
