"""Runs whose processes are gone before one of them could write the run's end."""

from __future__ import annotations

import contextlib
import time

from rankzero.catalog.lookup import last_end
from rankzero.catalog.summary import STARTING_SECONDS
from rankzero.run_store import run_locks
from rankzero.run_store.attempt import DIED_WITHOUT_END, append_run_ended, sync_pictures
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.names import InvalidRunFolder

# The journals are a run's heartbeat. Rank 0 appends to its journal at least when a window of steps
# ends, and each node's recorder appends to the node's every ten seconds.
QUIET_SECONDS = 30.0


def is_stale(folder: RunFolder, quiet_seconds: float = QUIET_SECONDS) -> bool:
    """Return whether a run is dead: no end, no writer, no recorder, no heartbeat."""
    if folder.is_elsewhere or last_end(folder) is not None:
        return False
    # A recorder that is alive writes the end itself, even if it does not deliver.
    if (
        run_locks.writer_lives(folder)
        or run_locks.is_recording(folder)
        or run_locks.has_live_recorder(folder)
    ):
        return False
    # A run without a claim may still be starting.
    quiet = quiet_seconds if run_locks.is_known(folder) else max(quiet_seconds, STARTING_SECONDS)
    if silence(folder) <= quiet:
        return False
    parent = folder.identity.parent
    return parent is None or not run_locks.writer_lives(RunFolder(folder.path.parent / parent))


def close_children(folder: RunFolder) -> None:
    """Write the missing ends of the trials of a search that has died.

    A trial's own recorder does that, unless the trial ran on another machine.
    """
    for child in folder.children:
        # The user may have damaged or removed it.
        with contextlib.suppress(InvalidRunFolder):
            # The search's courier may hold the lock of a delivery: no sign of life here.
            lives = run_locks.writer_lives(child) or run_locks.has_live_recorder(child)
            if child.events.exists() and not lives and last_end(child) is None:
                close(child)


def silence(folder: RunFolder) -> float:
    """Return the seconds since the run's last heartbeat."""
    return max(0.0, time.time() - run_locks.last_heartbeat(folder))


def close(folder: RunFolder) -> str:
    """Write the missing end, FAILED at the last heartbeat, and return its reason."""
    at, claim = run_locks.last_heartbeat(folder), run_locks.latest(folder, 0)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    reason = f"never began: its processes were gone by {moment}"
    if folder.events.exists():
        where = f" on {claim.host}" if claim else ""
        reason = (
            f"{DIED_WITHOUT_END}, with its recorder, or the machine went down; "
            f"no sign of life since {moment}{where}"
        )
    sync_pictures(folder)
    with run_locks.exclusive_end(folder):
        # An attempt may have begun since `is_stale`.
        if last_end(folder) is None and not run_locks.writer_lives(folder):
            append_run_ended(folder, claim.time if claim else 0.0, reason, at)
    return reason
