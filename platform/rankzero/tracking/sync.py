"""Delivers in this process what a dead recorder left, as `rankzero sync` does."""

from __future__ import annotations

import time

from rankzero.catalog import dead_runs, lookup
from rankzero.mlflow_store.patience import GRACE_SECONDS
from rankzero.run_store import delivery_state, run_locks, symlinks
from rankzero.run_store.attempt import finish_lines
from rankzero.run_store.folder import FolderGone, RunFolder
from rankzero.run_store.names import InvalidRunFolder
from rankzero.tracking import open_run
from rankzero.tracking.deliverer import Deliverer
from rankzero.tracking.delivery_status import Delivery, combined_status, status, wait

# The patience with a store that is away. A refused upload is answered sooner, and others follow.
ONE_TRY_SECONDS = 1.0


def deliver(folder: RunFolder, *, patience: float = GRACE_SECONDS) -> Delivery:
    """Deliver the journals of all nodes, and then the run's children.

    Gives up `patience` seconds after the last progress. If an error keeps all of a run from MLflow,
    each later child gets one try. A run whose writer died without an end becomes FAILED. If a
    recorder still works, waits for it and delivers what it leaves. Returns how all of it stands.
    Raises FolderGone, StoreMoved, InvalidRunFolder and OSError; the last two for a child only after
    the other children.
    """
    symlinks.refuse(folder.path)
    open_run.require_home(folder)
    pending = status(folder).pending
    if lookup.last_end(folder) is not None:
        # The recorder's last sample comes after the end of the run, unless somebody resumes it.
        wait(folder, patience, lambda now: now.complete or lookup.last_end(folder) is None)
    for node in sorted(delivery_state.nodes(folder)):
        if not _deliver_node(folder, node, patience) and node == 0:
            wait(folder, patience, lambda delivery: delivery.complete)
            _deliver_node(folder, node, patience)
    broken = list[InvalidRunFolder | OSError]()
    patience = ONE_TRY_SECONDS if is_away(folder, pending) else patience
    for child in folder.children:  # after their parent, whose run id they need
        # An imported bundle lacks a child that was deleted alone.
        if not child.path.exists():
            continue
        try:
            before = status(child)
            if not before.complete or delivery_state.late_nodes(child):
                deliver(child, patience=patience)
                patience = ONE_TRY_SECONDS if is_away(child, before.pending) else patience
        except FolderGone:
            continue
        except (InvalidRunFolder, OSError) as error:
            broken.append(error)
    if broken:
        raise broken[0]
    return combined_status(folder)


def is_away(folder: RunFolder, pending: int) -> bool:
    """Return whether an error kept all of a run from MLflow, which lacked `pending` before."""
    retries = delivery_state.load(delivery_state.path_of(folder, 0)).retries
    # The end of a dead run was appended meanwhile.
    return bool(retries.error) and not retries.gone and status(folder).pending >= pending


def _deliver_node(folder: RunFolder, node: int, patience: float) -> bool:
    """Deliver a node's journals, or return False if another process holds its lock."""
    with run_locks.lock(folder, node) as mine:
        # A living courier delivers. Two at once would do no harm, and double the work.
        if not mine:
            return False
        if node == 0:
            close_if_dead(folder, patience)
        if not run_locks.writer_lives(folder):
            finish_lines(folder, node)
        deliverer, moved = Deliverer(folder, node), time.monotonic()
        deliverer.hasten()
        while not deliverer.complete:
            if deliverer.work():
                moved = time.monotonic()
            elif time.monotonic() - moved < patience and not deliverer.is_refused:
                time.sleep(0.1)
            else:
                break
        deliverer.commit()
        return True


def close_if_dead(folder: RunFolder, patience: float) -> None:
    """Append the end of a run that no process is left to write.

    A living recorder appends it within seconds, so this waits for it. If the recorder does not in
    time, for example because it is suspended, the run stays open.
    """
    until = time.monotonic() + patience
    while _is_dead(folder) and run_locks.has_live_recorder(folder) and time.monotonic() < until:
        time.sleep(0.5)
    if _is_dead(folder) and not run_locks.has_live_recorder(folder):
        dead_runs.close(folder)


def _is_dead(folder: RunFolder) -> bool:
    """Return whether a run's writer is gone without an end. Without a claim, only after a while."""
    if folder.is_elsewhere or run_locks.writer_lives(folder) or lookup.last_end(folder) is not None:
        return False
    return run_locks.is_known(folder) or dead_runs.is_stale(folder)
