"""How much of a run is delivered, and waiting for the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rankzero.catalog import lookup
from rankzero.mlflow_store.patience import grace_seconds, patience
from rankzero.reporting.delivery_problems import trouble
from rankzero.run_store import delivery_state, run_locks
from rankzero.run_store.delivery_state import DeliveryState, Task
from rankzero.run_store.folder import RunFolder

# Until a recorder on a busy machine can be expected to hold its lock.
STARTUP_SECONDS = 20.0


class Delivery(NamedTuple):
    """How a delivery stands."""

    delivered: int
    """Points sent."""
    pending: int
    """Bytes of journal, uploads and ends that are not delivered yet."""
    rejected: int
    """Things that MLflow refused."""
    done: bool
    """Whether MLflow has all but the page update, which no command waits for."""
    error: str | None
    run_id: str | None
    trouble: tuple[str, ...]
    """The problems, in words."""
    page_update_waits: bool
    """Whether problems since the run's end may be missing on its page."""
    lacks: tuple[str, ...]
    """The pending items, in words."""

    @property
    def complete(self) -> bool:
        """Whether MLflow has everything, the page update included."""
        return self.done and not self.page_update_waits


def status(folder: RunFolder) -> Delivery:
    """Return how the delivery of the run stands, from the disk alone."""
    state = delivery_state.load(delivery_state.path_of(folder, 0))
    claim = run_locks.latest(folder, 0)
    # Otherwise a newer attempt has only just begun, and nothing of it is delivered.
    knows_latest = claim is None or claim.token == state.claim
    unread = delivery_state.unread_bytes(folder, {folder.events.name: 0, **state.cursor.offsets})
    queue = state.queue
    pending = unread + len(queue.awaited) + (queue.ending is not None)
    return Delivery(
        state.cursor.delivered,
        pending,
        state.problems.rejected,
        queue.ended and knows_latest and not pending,
        state.retries.error,
        state.run_id,
        tuple(trouble(state)),
        queue.page_update_waits,
        tuple(_lacking(state, unread)),
    )


def _lacking(state: DeliveryState, unread: int) -> Iterator[str]:
    """Yield what MLflow does not have yet, except for the page update."""
    uploads = sum(upload is not Task.PAGE for upload in state.queue.awaited)
    if state.run_id is None:
        yield "the whole run"
        return
    if unread:
        yield "the latest values"
    if state.queue.ending is not None:
        yield "its end"
    if Task.PAGE in state.queue.awaited:
        yield "its page"
    if uploads:
        yield f"{uploads} uploads" if uploads > 1 else "an upload"


def wait(
    folder: RunFolder,
    timeout: float | None = None,
    enough: Callable[[Delivery], bool] = lambda delivery: delivery.done,
) -> Delivery:
    """Wait until the delivery is `enough` or the recorder has ended, and return how it stands.

    A `timeout` ends it after so many seconds without progress. Without one, it ends as `patience`
    has it: after so many seconds in all, or after fewer without progress while MLflow fails. A
    study is done when its trials are.
    """
    most, before = patience(), combined_status(folder)
    began = moved = time.monotonic()
    while not enough(before) and recorder_lives(folder):
        idle, total = time.monotonic() - moved, time.monotonic() - began
        too_long = idle >= timeout if timeout is not None else total >= most.seconds
        troubled = timeout is None and before.error is not None
        if too_long or (troubled and idle >= most.troubled_seconds):
            break
        time.sleep(0.1)
        now = combined_status(folder)
        if _progress(now) != _progress(before):
            moved = time.monotonic()
        before = now
    return combined_status(folder)


def wait_for_recorder(folder: RunFolder, hurried: Callable[[], bool] = lambda: False) -> None:
    """Return once the run's end is written and its recorder has ended, or when it takes too long.

    For offline runs, which have no courier to wait for.
    """
    until = time.monotonic() + grace_seconds()
    while not hurried() and time.monotonic() < until:
        # A recorder that is still starting holds no lock yet. A written end needs no recorder.
        ended = lookup.last_end(folder) is not None
        starting = not ended and recorder_lives(folder)
        if not (run_locks.has_live_recorder(folder) or starting):
            return
        time.sleep(0.05)


def _progress(delivery: Delivery) -> tuple[object, ...]:
    """Return what changes with progress. One more failed request, which changes words, is none."""
    d = delivery
    return d.delivered, d.pending, d.rejected, d.done, d.page_update_waits, d.run_id


def combined_status(folder: RunFolder) -> Delivery:
    """Return how the delivery of a run and its children stands, as one."""
    own = status(folder)
    children = [_of_all_nodes(child) for child in folder.children if child.events.exists()]
    late = sum(not child.done for child in children)
    return own._replace(
        delivered=own.delivered + sum(child.delivered for child in children),
        pending=own.pending + sum(child.pending for child in children),
        done=own.done and all(child.done for child in children),
        error=own.error or next((child.error for child in children if child.error), None),
        page_update_waits=own.page_update_waits
        or any(child.page_update_waits for child in children),
        lacks=(*own.lacks, *([f"{late} of its {len(children)} runs"] if late else [])),
    )


def _of_all_nodes(child: RunFolder) -> Delivery:
    """Return how a child's delivery stands. Its parent's courier delivers all of its nodes."""
    found, late = status(child), delivery_state.late_nodes(child)
    return found._replace(done=found.done and not late, pending=found.pending + len(late))


def recorder_lives(folder: RunFolder) -> bool:
    """Return whether the newest attempt's recorder or courier lives, or may just be starting."""
    if run_locks.is_recording(folder) or run_locks.has_live_recorder(folder):
        return True
    claim = run_locks.latest(folder, 0)
    # A recorder that was only just started may not hold a lock yet.
    starts = claim is not None and time.time() - claim.time < STARTUP_SECONDS
    return starts and not run_locks.has_announced(folder)
