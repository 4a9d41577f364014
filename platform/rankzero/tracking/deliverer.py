"""Brings a run's journals to MLflow: one writer, in order, at least once.

    take     the next MiB of each journal -> points, tags, beginnings of attempts
    send     them one by one; what fails is tried again later, what is refused is set aside
    commit   delivery.json; a crash before it replays the MiB, which changes nothing in MLflow
    then     uploads of artifacts and checkpoints, and last the run's end

Points go before uploads, so that files that are big or cannot be stored never hold up the curves.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero.events import DataDescribed, Event, RunEnded, RunStarted, decode
from rankzero.faults import refusal
from rankzero.mlflow_store.items import RETRIES, MetricBatch, MlflowItem, RunEnd, Tags, name_of
from rankzero.mlflow_store.uris import RunGone
from rankzero.redaction.text import line_without_secrets, text_without_secrets
from rankzero.run_store import claims
from rankzero.run_store import delivery_state as state
from rankzero.run_store.folder import EVENTS, FolderGone, RunFolder
from rankzero.run_store.journal import READ_BYTES, take
from rankzero.tracking import description, open_run
from rankzero.tracking.retry import Backoff, BlameTracker
from rankzero.tracking.translate import ending, translate, trouble_of
from rankzero.tracking.uploads import upload

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, OpenRun

TAKE_SECONDS = 5.0  # few large batches: each costs the server as much as a thousand points do
MOST_WITHOUT_MEMORY = (
    4  # tries of one upload that ran out of memory: it may ask for more than there is
)

log = logging.getLogger("rankzero.recorder")


class Deliverer:
    """Delivers what one node is responsible for: node 0 the run and its own samples, the others their samples.

    One at a time may work on a run's node: hold `incumbent.lock` around it. Call `work` until it returns False,
    wait a little, and again.
    """

    def __init__(
        self,
        folder: RunFolder,
        node: int = 0,
        connect: Callable[[str], MlflowRuns] = open_run.connect,
    ) -> None:
        self._folder, self._node, self._connect = folder, node, functools.cache(connect)
        self._path, self._directory = state.path_of(folder, node), claims.directory(folder)
        self.progress = state.load(self._path)
        for name in self._journals():
            self.progress.offsets.setdefault(name, 0)
        self._committed = copy.deepcopy(self.progress)
        self._items: deque[MlflowItem] = deque()
        self._taken: dict[str, int] = dict(self.progress.offsets)
        self._take_at = 0.0
        self._tracker: MlflowRuns | None = None
        self._run: OpenRun | None = None
        self._sending, self._uploading = Backoff(), Backoff()
        self._away_since: float | None = None
        self._hurry = False
        self._suspicion = BlameTracker()

    @property
    def complete(self) -> bool:
        """Tell whether MLflow has everything that the journals hold now."""
        return not (self._items or self._unread() or self.progress.waiting or self.progress.ending)

    def work(self) -> bool:
        """Do one thing that is due; return whether anything was done. Raises nothing that MLflow or the data cause."""
        if not self._sending.over:
            return False
        if self._run is None:
            return not self.complete and self._try(self._open, self._sending)
        if not self._items and self._take_due():
            self._take()
        if self._items:
            return self._try(self._send, self._sending, self._set_item_aside)
        if self.progress.ending is not None and (
            self._uploading.failures or not self.progress.uploads
        ):
            self._items.extend(
                self._ending(self.progress.ending)
            )  # uploads that fail do not hold up the end
            return True
        if self.progress.waiting and self._uploading.over:
            return self._try(self._upload, self._uploading, self._set_upload_aside)
        return False

    def hasten(self) -> None:
        """Take from now on what there is at once: nothing more comes, and somebody waits."""
        self._hurry = True
        self._sending.hasten()
        self._uploading.hasten()

    def commit(self) -> None:
        """Write down how far it is; only between items, since `progress` is ahead of what is sent while some wait.

        Raises FolderGone where the folder was moved or deleted: another run of its name knows nothing of this. Its
        number tells, which no other folder gets while the lock, a file in it, is open.
        """
        if claims.directory(self._folder) != self._directory:
            raise FolderGone(f"{self._folder.path} was moved or deleted while it was delivered")
        if not self._items:
            self._committed = copy.deepcopy(self.progress)
        for name in (
            "error",
            "failures",
            "outages",
            "away_seconds",
        ):  # true at once, whatever is sent
            setattr(self._committed, name, getattr(self.progress, name))
        claim = claims.latest(self._folder, self._node)
        self._committed.claim = claim.token if claim else ""
        self._committed.pending_bytes = state.unread_bytes(self._folder, self._committed.offsets)
        state.save(self._path, self._committed)

    def snapshot(self) -> state.DeliveryState:
        """Return the progress as it is on the disk."""
        return self._committed

    def _journals(self) -> list[str]:
        system = self._folder.system(self._node).name
        return [EVENTS, system] if self._node == 0 else [system]

    def _unread(self) -> int:
        return state.unread_bytes(self._folder, self._taken)

    def _try(
        self,
        action: Callable[[], bool],
        backoff: Backoff,
        set_aside: Callable[[str], None] | None = None,
    ) -> bool:
        try:
            did = action()
        except Exception as error:  # a hostile value, a full disk, a server on fire: none of them may end the delivery
            return self._failed(error, backoff, set_aside)
        if did and self._away_since is not None:
            self.progress.away_seconds += time.monotonic() - self._away_since
            self._away_since = None
        backoff.reset()
        self._suspicion.clear()
        self.progress.error = None
        return did

    def _failed(
        self, error: Exception, backoff: Backoff, set_aside: Callable[[str], None] | None
    ) -> bool:
        reason = refusal(error)
        if reason is not None:
            self._suspicion.clear()
        elif backoff is self._sending and self._suspicion.confirmed(
            backoff.failures, self._answers
        ):
            reason = f"fails while MLflow answers otherwise: {error!r}"
        if (
            isinstance(error, MemoryError)
            and backoff is self._uploading
            and backoff.failures >= MOST_WITHOUT_MEMORY
        ):
            reason = "there was not enough memory for it, however often it was tried"
        if isinstance(error, RunGone):
            self._abandon(str(error))
            return True
        if reason is not None and set_aside is not None:
            return self._try(lambda: self._aside(set_aside, reason, backoff), backoff)
        backoff.fail(wait=backoff is self._uploading or not self._suspicion.stands)
        self.progress.failures += 1
        if self._away_since is None:
            self._away_since = time.monotonic()
            self.progress.outages += 1
        self.progress.error = line_without_secrets(f"{type(error).__name__}: {error}")
        log.warning("try %d failed: %s", backoff.failures, self.progress.error)
        self.commit()
        return False

    def _aside(self, set_aside: Callable[[str], None], reason: str, backoff: Backoff) -> bool:
        self._known_tracker().require_run(
            self._open_run().run_id
        )  # is it the item, or is the whole run gone?
        log.warning("set aside: %s", text_without_secrets(reason))
        set_aside(reason)
        return True

    def _answers(self) -> bool:
        """Tell whether MLflow takes something else now: it is written, since one whose disk is full answers well."""
        try:
            tracker, run_id = self._known_tracker(), self._open_run().run_id
            tracker.require_run(run_id)
            tracker.set_tags(run_id, {RETRIES: str(self.progress.failures)})
        except Exception:
            return False
        return True

    def _open(self) -> bool:
        """Find or make the MLflow run, or wait for whoever makes it."""
        opened = open_run.open_run(self._folder, self._node, self._connect)
        if opened is None:
            self._sending.fail()
            return False
        self._tracker, self._run = opened
        if self.progress.run_id is None:
            open_run.adopt(
                self.progress, self._run, self._folder.identity.mlflow_run_id is not None
            )
        self.commit()
        return True

    def _take_due(self) -> bool:
        unread = self._unread()
        return unread > 0 and (
            self._hurry or unread >= READ_BYTES or time.monotonic() >= self._take_at
        )

    def _take(self) -> None:
        self._take_at = time.monotonic() + TAKE_SECONDS
        events: list[Event] = []
        for name in self._journals():
            taken = take(self._folder.path / name, self._taken[name])
            events += taken.events
            if taken.foreign:
                self.progress.reject(
                    f"{name} before byte {taken.offset:,}", f"{taken.foreign} lines are no events"
                )
            self._taken[name] = taken.offset
        self._items.extend(translate(events, self.progress))
        self.progress.put_last_things_last()
        self.progress.offsets = dict(self._taken)
        if not self._items:
            self.commit()

    def _send(self) -> bool:
        item, tracker, run_id = self._items[0], self._known_tracker(), self._open_run().run_id
        match item:
            case RunStarted():
                tracker.start_attempt(run_id, item)
            case DataDescribed():
                tracker.log_data(run_id, item)
            case MetricBatch():
                tracker.log_metrics(run_id, item.points)
                self.progress.delivered += len(item.points)
            case Tags():
                tracker.set_tags(run_id, item.tags)
            case RunEnd():
                tracker.close_run(run_id, item.event)
                self.progress.ending, self.progress.ended = None, True
                self.progress.waiting = [*self.progress.uploads, *state.LAST]
        self._sent()
        return True

    def _sent(self) -> None:
        self._items.popleft()
        if not self._items:
            self.commit()

    def _set_item_aside(self, reason: str) -> None:
        """Set the refused item aside; of a batch, find the points that are to blame and save the others."""
        item = self._items[0]
        match item:
            case MetricBatch(points) if len(points) > 1:
                half = len(points) // 2
                self._replace(MetricBatch(points[:half]), MetricBatch(points[half:]))
            case Tags(tags) if len(tags) > 1:
                self._replace(*(Tags({key: value}) for key, value in tags.items()))
            case _:
                if isinstance(item, RunEnd):
                    self.progress.ending = None
                self.progress.reject(name_of(item), reason)
                self._sent()

    def _replace(self, *items: MlflowItem) -> None:
        self._items.popleft()
        self._items.extendleft(reversed(items))

    def _upload(self) -> bool:
        tracker, run = self._known_tracker(), self._open_run()
        if self.progress.waiting[0] == state.AFTERWORD:
            self._items.extend(description.retold(tracker, run, self._folder, self.progress))
        else:
            upload(tracker, run, self._folder, self.progress)
        self.progress.waiting.pop(0)
        self.commit()
        return True

    def _set_upload_aside(self, reason: str) -> None:
        self.progress.reject(f"upload {self.progress.waiting.pop(0)[:100]}", reason)
        if self.progress.ended:  # its page has been written
            self._items.append(Tags(trouble_of(self.progress)))
        self.commit()

    def _ending(self, line: str) -> list[MlflowItem]:
        event = decode(line)
        assert isinstance(event, RunEnded)
        return ending(
            event, description.description(self._folder, self.progress, event), self.progress
        )

    def _abandon(self, reason: str) -> None:
        """Stop: someone deleted the run in MLflow. The journal keeps everything."""
        log.error("%s; the rest of its journal is not delivered", reason)
        self.progress.reject("run", reason)
        self._items.clear()
        self._taken = {name: _size(self._folder.path / name) for name in self._journals()}
        self.progress.offsets = dict(self._taken)
        self.progress.waiting, self.progress.ending, self.progress.ended = [], None, True
        self.commit()

    def _known_tracker(self) -> MlflowRuns:
        assert self._tracker is not None
        return self._tracker

    def _open_run(self) -> OpenRun:
        assert self._run is not None
        return self._run


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
