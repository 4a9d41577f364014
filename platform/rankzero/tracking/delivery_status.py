"""How far the delivery of a run is, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rankzero.catalog import lookup
from rankzero.reporting.delivery_problems import trouble
from rankzero.run_store import claims, delivery_state
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.folder import RunFolder
from rankzero.tracking.retry import grace_seconds

TROUBLED_SECONDS = (
    15.0  # where MLflow refuses or hangs: one request's time, and some; what is left comes later
)
STARTUP_SECONDS = 20.0  # until a recorder on a busy machine can be expected to hold its lock


class Delivery(NamedTuple):
    """How a delivery stands: points delivered, bytes and things pending, things that MLflow refused.

    `done`: MLflow has all but the page update, which no command waits for.
    """

    delivered: int
    pending: int
    rejected: int
    done: bool
    error: str | None
    run_id: str | None
    experiment_id: str | None
    reasons: tuple[str, ...]
    trouble: tuple[str, ...] = ()
    """What went wrong on the way, in words."""
    page_update_waits: bool = False
    """Whether problems since the run's end may be missing on its page."""
    lacks: tuple[str, ...] = ()
    """What is pending, in words."""


def status(folder: RunFolder) -> Delivery:
    """Return how the delivery of the run stands, from the disk alone."""
    state = delivery_state.load(delivery_state.path_of(folder, 0))
    claim = claims.latest(folder, 0)
    # Otherwise a newer attempt has only just begun, and nothing of it is delivered.
    knows_latest = claim is None or claim.token == state.claim
    unread = delivery_state.unread_bytes(folder, {folder.events.name: 0, **state.cursor.offsets})
    queue, problems = state.queue, state.problems
    return Delivery(
        state.cursor.delivered,
        unread + len(queue.awaited) + (queue.ending is not None),
        problems.rejected,
        state.done and knows_latest and not unread,
        state.retries.error,
        state.run_id,
        state.experiment_id,
        problems.reasons,
        tuple(trouble(state)),
        queue.page_update_waits,
        tuple(_lacking(state, unread)),
    )


def _lacking(state: DeliveryState, unread: int) -> Iterator[str]:
    """Yield what MLflow does not have yet, except for the page update."""
    uploads = len(state.queue.awaited)
    if state.run_id is None:
        yield "the whole run"
        return
    if unread:
        yield "the latest values"
    if uploads:
        yield f"{uploads} uploads" if uploads > 1 else "an upload"
    if state.queue.ending is not None:
        yield "its end"


def is_delivered(delivery: Delivery) -> bool:
    """Tell whether MLflow has what a run's end need not go without."""
    return delivery.done


def is_complete(delivery: Delivery) -> bool:
    """Return whether MLflow has all there is, the page update included."""
    return delivery.done and not delivery.page_update_waits


def wait(
    folder: RunFolder,
    timeout: float | None = None,
    on_progress: Callable[[Delivery], None] | None = None,
    enough: Callable[[Delivery], bool] = is_delivered,
) -> Delivery:
    """Return once there is `enough`, or the recorder has given up or made no progress for `timeout` seconds.

    None: as the end of a command does, `grace_seconds` in all, whatever moves, and `TROUBLED_SECONDS` without progress
    where MLflow refuses or does not answer. A study is done when its trials are, which its recorder delivers, too.
    """
    began = moved = time.monotonic()
    before = combined_status(folder)
    while (
        not enough(before)
        and not _long_enough(timeout, before, began, moved)
        and _recorder_lives(folder)
    ):
        time.sleep(0.1)
        now = combined_status(folder)
        if _reached(now) != _reached(before):
            moved = time.monotonic()
        if now != before and on_progress is not None:
            on_progress(now)
        before = now
    return combined_status(folder)


def wait_for_recorder(folder: RunFolder, hurried: Callable[[], bool] = lambda: False) -> None:
    """Return once the run's end is written and its recorder has ended, or when it takes too long.

    For offline runs, which have no courier to wait for.
    """
    until = time.monotonic() + grace_seconds()
    while not hurried() and time.monotonic() < until:
        # A recorder that is still starting holds no lock yet; a written end needs no recorder.
        ended = lookup.last_end(folder) is not None
        if not (claims.has_live_recorder(folder) or (not ended and _recorder_lives(folder))):
            return
        time.sleep(0.05)


def _reached(delivery: Delivery) -> tuple[object, ...]:
    """Return how far it is; another failed try, which changes the words about it, is no progress."""
    return (
        delivery.delivered,
        delivery.pending,
        delivery.rejected,
        delivery.done,
        delivery.page_update_waits,
        delivery.run_id,
    )


def _long_enough(timeout: float | None, delivery: Delivery, began: float, moved: float) -> bool:
    """Tell whether to wait no longer for what has not `moved` since then; without a `timeout` all of it counts."""
    now = time.monotonic()
    if timeout is not None:
        return now - moved >= timeout
    return now - began >= grace_seconds() or (
        delivery.error is not None and now - moved >= TROUBLED_SECONDS
    )


def combined_status(folder: RunFolder) -> Delivery:
    """Return how the delivery of a run and its children stands, as one."""
    own = status(folder)
    children = [status(child) for child in folder.children if child.events.exists()]
    late = sum(not child.done for child in children)
    return own._replace(
        delivered=own.delivered + sum(child.delivered for child in children),
        pending=own.pending + sum(child.pending for child in children),
        done=own.done and all(child.done for child in children),
        error=own.error or next((child.error for child in children if child.error), None),
        page_update_waits=own.page_update_waits
        or any(child.page_update_waits for child in children),
        lacks=(*own.lacks, *([f"{late} of its {len(children)} trials"] if late else [])),
    )


def _recorder_lives(folder: RunFolder) -> bool:
    if claims.is_recording(folder) or claims.has_live_recorder(folder):
        return True
    claim = claims.latest(folder, 0)
    return claim is not None and time.time() - claim.time < STARTUP_SECONDS
