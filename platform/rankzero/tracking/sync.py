"""How a run's delivery stands, waiting for it, and doing it where the recorder is dead. Reads the disk, no process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rankzero.catalog import dead_runs
from rankzero.events import RunEnded, RunStarted
from rankzero.run_store import claims, symlinks
from rankzero.run_store.folder import FolderGone, RunFolder
from rankzero.run_store.journal import Journal, read_all
from rankzero.run_store.names import InvalidRunFolder
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.delivery_status import Delivery, is_complete, status, wait
from rankzero.tracking.retry import GRACE_SECONDS

LOOK_SECONDS = 0.5


def deliver(
    folder: RunFolder,
    *,
    on_progress: Callable[[Delivery], None] | None = None,
    patience: float = GRACE_SECONDS,
) -> Delivery:
    """Deliver what a dead recorder left, of all nodes, in this process.

    Gives up `patience` seconds after the last progress. A run whose writer died without a word is
    closed as FAILED. Where a recorder is still at work, waits for it, and does what it leaves.
    Raises FolderGone and BrokenRun; the latter for a child only after the others.
    """
    symlinks.refuse(folder.path)
    for node in _nodes(folder):
        if not _delivered_here(folder, node, on_progress, patience) and node == 0:
            wait(folder, patience, on_progress, is_complete)
            _delivered_here(folder, node, on_progress, patience)
    broken = []
    for child in folder.children:  # after their parent, whose run id they need
        try:
            if not is_complete(status(child)):
                deliver(child, on_progress=on_progress, patience=patience)
        except FolderGone:
            continue
        except InvalidRunFolder as error:
            broken.append(error)
    if broken:
        raise broken[0]
    return status(folder)


def _delivered_here(
    folder: RunFolder, node: int, on_progress: Callable[[Delivery], None] | None, patience: float
) -> bool:
    """Deliver where nobody else does; return whether that is so."""
    with claims.lock(folder, node) as mine:
        if mine:
            _deliver_node(folder, node, on_progress, patience)
        return mine


def _deliver_node(
    folder: RunFolder, node: int, on_progress: Callable[[Delivery], None] | None, patience: float
) -> None:
    if node == 0:
        close_if_dead(folder, patience)
    if not claims.writer_lives(folder):
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
    while _is_dead(folder) and claims.has_live_recorder(folder) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    if _is_dead(folder) and not claims.has_live_recorder(folder):
        dead_runs.close(folder)


def _close_off(journal: Path) -> None:
    """End a line that has no end, of a full disk or a machine that went down: it would count as undelivered."""
    with contextlib.suppress(OSError):
        if journal.exists():
            Journal(journal).close()


def _is_dead(folder: RunFolder) -> bool:
    """Tell whether a run's writer is gone without a word; of one that nobody has claimed yet, only after a while."""
    if folder.is_elsewhere:
        return False
    if claims.writer_lives(folder) or _is_ended(folder):
        return False
    return claims.is_known(folder) or dead_runs.is_stale(folder)


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
