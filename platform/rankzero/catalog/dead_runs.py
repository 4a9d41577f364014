"""Runs that say RUNNING and are not: their processes are gone, and nobody was left to say so.

Their heartbeat are the journals: rank 0 appends to its own at least when a window of steps ends, each node's
recorder to the node's every ten seconds.
"""

from __future__ import annotations

import time

from rankzero.catalog.lookup import last_end
from rankzero.catalog.summary import STARTING_SECONDS
from rankzero.run_store import claims
from rankzero.run_store.attempt import DIED_WITHOUT_END, append_run_ended
from rankzero.run_store.folder import RunFolder

QUIET_SECONDS = 30.0  # three times the longest silence of a recorder that lives


def is_stale(folder: RunFolder, quiet_seconds: float = QUIET_SECONDS) -> bool:
    """Tell whether a run ended without a word: its writer is dead, its recorder too, nothing has moved since.

    A recorder that lives says the end itself, whether it delivers or not. A helping machine does not know.
    """
    if folder.is_elsewhere or last_end(folder) is not None:
        return False
    if (
        claims.writer_lives(folder)
        or claims.is_recording(folder)
        or claims.has_live_recorder(folder)
    ):
        return False
    quiet = quiet_seconds if claims.is_known(folder) else max(quiet_seconds, STARTING_SECONDS)
    return silence(folder) > quiet and not _has_living_parent(folder)


def silence(folder: RunFolder) -> float:
    """Return for how many seconds nothing of the run has moved."""
    return max(0.0, time.time() - claims.last_heartbeat(folder))


def close(folder: RunFolder) -> str:
    """Write the end that nobody wrote: FAILED, at the last sign of life. Returns the reason."""
    at, claim = claims.last_heartbeat(folder), claims.latest(folder, 0)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    where = f" on {claim.host}" if claim else ""
    reason = (
        f"{DIED_WITHOUT_END}, with its recorder, or the machine went down; no sign of life since {moment}{where}"
        if folder.events.exists()
        else f"never began: its processes were gone by {moment}"
    )
    with claims.exclusive_end(folder):
        # Since one looked, an attempt may have begun.
        if last_end(folder) is None and not claims.writer_lives(folder):
            append_run_ended(folder, claim.time if claim else 0.0, reason, at)
    return reason


def _has_living_parent(folder: RunFolder) -> bool:
    parent = folder.identity.parent
    return parent is not None and claims.writer_lives(RunFolder(folder.path.parent / parent))
