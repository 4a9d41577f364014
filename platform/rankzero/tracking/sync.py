"""How a run's delivery stands, waiting for it, and doing it where the recorder is dead. Reads the disk, no process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rankzero.events import RunEnded, RunStarted
from rankzero.tracking import incumbent, links, stale
from rankzero.tracking import progress as state
from rankzero.tracking.courier import GRACE_SECONDS, grace_seconds
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.folder import FolderGone, RunFolder
from rankzero.tracking.journal import Journal, read_all
from rankzero.tracking.names import BrokenRun
from rankzero.tracking.trouble import trouble

TROUBLED_SECONDS = 15.0  # where MLflow refuses or hangs: one request's time, and some; what is left comes later
LOOK_SECONDS = 0.5
STARTUP_SECONDS = 20.0  # until a recorder on a busy machine can be expected to hold its lock


class Delivery(NamedTuple):
    """How a delivery stands: points delivered, bytes and things pending, things that MLflow refused.

    `done`: MLflow has all but pictures of the whole run, which the courier draws when nobody waits any more.
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
    undrawn: bool = False
    """Whether pictures of the whole run are still to come."""
    lacks: tuple[str, ...] = ()
    """What is pending, in words."""


def status(folder: RunFolder) -> Delivery:
    """Return how the delivery of the run stands, from the disk alone."""
    progress = state.load(state.path_of(folder, 0))
    claim = incumbent.latest(folder, 0)
    heard = claim is None or claim.token == progress.claim  # else a newer attempt has only just begun
    unread = state.unread_bytes(folder, {folder.events.name: 0, **progress.offsets})
    return Delivery(
        progress.delivered,
        unread + len(progress.uploads) + (progress.ending is not None),
        progress.rejected,
        progress.done and heard and not unread,
        progress.error,
        progress.run_id,
        progress.experiment_id,
        tuple(progress.reasons),
        tuple(trouble(progress)),
        progress.undrawn,
        tuple(_lacking(progress, unread)),
    )


def _lacking(progress: state.Progress, unread: int) -> Iterator[str]:
    """Yield what MLflow does not have yet, pictures of the whole run aside."""
    if progress.run_id is None:
        yield "the whole run"
        return
    if unread:
        yield "the latest values"
    if progress.uploads:
        yield f"{len(progress.uploads)} uploads" if len(progress.uploads) > 1 else "an upload"
    if progress.ending is not None:
        yield "its end"


def told(delivery: Delivery) -> bool:
    """Tell whether MLflow has what a run's end need not go without."""
    return delivery.done


def drawn(delivery: Delivery) -> bool:
    """Tell whether MLflow has all there is, pictures of the whole run, too."""
    return delivery.done and not delivery.undrawn


def wait(
    folder: RunFolder,
    timeout: float | None = None,
    on_progress: Callable[[Delivery], None] | None = None,
    enough: Callable[[Delivery], bool] = told,
) -> Delivery:
    """Return once there is `enough`, or the recorder has given up or made no progress for `timeout` seconds.

    None: as the end of a command does, `grace_seconds` in all, whatever moves, and `TROUBLED_SECONDS` without progress
    where MLflow refuses or does not answer. A study is done when its trials are, which its recorder delivers, too.
    """
    began = moved = time.monotonic()
    before = of_family(folder)
    while not enough(before) and not _long_enough(timeout, before, began, moved) and _recorder_lives(folder):
        time.sleep(0.1)
        now = of_family(folder)
        if _reached(now) != _reached(before):
            moved = time.monotonic()
        if now != before and on_progress is not None:
            on_progress(now)
        before = now
    return of_family(folder)


def _reached(delivery: Delivery) -> tuple[object, ...]:
    """Return how far it is; another failed try, which changes the words about it, is no progress."""
    return delivery.delivered, delivery.pending, delivery.rejected, delivery.done, delivery.undrawn, delivery.run_id


def _long_enough(timeout: float | None, delivery: Delivery, began: float, moved: float) -> bool:
    """Tell whether to wait no longer for what has not `moved` since then; without a `timeout` all of it counts."""
    now = time.monotonic()
    if timeout is not None:
        return now - moved >= timeout
    return now - began >= grace_seconds() or (delivery.error is not None and now - moved >= TROUBLED_SECONDS)


def of_family(folder: RunFolder) -> Delivery:
    """Return how the delivery of a run and its children stands, as one."""
    own = status(folder)
    children = [status(child) for child in folder.children if child.events.exists()]
    late = sum(not child.done for child in children)
    return own._replace(
        delivered=own.delivered + sum(child.delivered for child in children),
        pending=own.pending + sum(child.pending for child in children),
        done=own.done and all(child.done for child in children),
        error=own.error or next((child.error for child in children if child.error), None),
        undrawn=own.undrawn or any(child.undrawn for child in children),
        lacks=(*own.lacks, *([f"{late} of its {len(children)} trials"] if late else [])),
    )


def deliver(
    folder: RunFolder, *, on_progress: Callable[[Delivery], None] | None = None, patience: float = GRACE_SECONDS
) -> Delivery:
    """Deliver what a dead recorder left, of all nodes, in this process.

    Gives up `patience` seconds after the last progress. A run whose writer died without a word is
    closed as FAILED. Where a recorder is still at work, waits for it, and does what it leaves.
    Raises FolderGone and BrokenRun; the latter for a child only after the others.
    """
    links.refuse(folder.path)
    for node in _nodes(folder):
        if not _delivered_here(folder, node, on_progress, patience) and node == 0:
            wait(folder, patience, on_progress, drawn)
            _delivered_here(folder, node, on_progress, patience)
    broken = []
    for child in folder.children:  # after their parent, whose run id they need
        try:
            if not drawn(status(child)):
                deliver(child, on_progress=on_progress, patience=patience)
        except FolderGone:
            continue
        except BrokenRun as error:
            broken.append(error)
    if broken:
        raise broken[0]
    return status(folder)


def _delivered_here(
    folder: RunFolder, node: int, on_progress: Callable[[Delivery], None] | None, patience: float
) -> bool:
    """Deliver where nobody else does; return whether that is so."""
    with incumbent.lock(folder, node) as mine:
        if mine:
            _deliver_node(folder, node, on_progress, patience)
        return mine


def _deliver_node(
    folder: RunFolder, node: int, on_progress: Callable[[Delivery], None] | None, patience: float
) -> None:
    if node == 0:
        close_if_dead(folder, patience)
    if not incumbent.writer_lives(folder):
        for journal in (folder.system(node), *([folder.events] if node == 0 else [])):
            _close_off(journal)
    deliverer, moved = Deliverer(folder, node), time.monotonic()
    deliverer.hasten()
    while not deliverer.complete and time.monotonic() - moved < patience:
        if deliverer.work():
            moved = time.monotonic()
            if on_progress is not None:
                on_progress(status(folder))
        else:
            time.sleep(0.1)
    deliverer.commit()


def close_if_dead(folder: RunFolder, patience: float) -> None:
    """Write the end that nobody is left to write.

    A recorder that lives writes it itself, within seconds, and is waited for; where it has not in time, as when it is
    stopped, the run stays open until it goes.
    """
    until = time.monotonic() + patience
    while _is_dead(folder) and incumbent.is_stood_by(folder) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    if _is_dead(folder) and not incumbent.is_stood_by(folder):
        stale.close(folder)


def _close_off(journal: Path) -> None:
    """End a line that has no end, of a full disk or a machine that went down: it would count as undelivered."""
    with contextlib.suppress(OSError):
        if journal.exists():
            Journal(journal).close()


def _is_dead(folder: RunFolder) -> bool:
    """Tell whether a run's writer is gone without a word; of one that nobody has claimed yet, only after a while."""
    if folder.is_elsewhere:
        return False
    if incumbent.writer_lives(folder) or _is_ended(folder):
        return False
    return incumbent.is_known(folder) or stale.is_stale(folder)


def _is_ended(folder: RunFolder) -> bool:
    """Tell whether the journal's last attempt has its end."""
    ended = False
    for event in read_all(folder.events):
        if isinstance(event, (RunStarted, RunEnded)):
            ended = isinstance(event, RunEnded)
    return ended


def _nodes(folder: RunFolder) -> list[int]:
    found = (path.stem.rpartition("_")[2] for path in folder.path.glob("system-node_*.jsonl"))
    return sorted({0, *(int(number) for number in found if number.isdigit())})


def _recorder_lives(folder: RunFolder) -> bool:
    if incumbent.is_recording(folder) or incumbent.is_stood_by(folder):
        return True
    claim = incumbent.latest(folder, 0)
    return claim is not None and time.time() - claim.time < STARTUP_SECONDS
