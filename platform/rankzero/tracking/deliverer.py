"""Brings a run's journals to MLflow: one writer, in order, at least once.

It is a state machine, and docs/structure.md draws it. Its states are the members of `Activity`.
`Deliverer._next` decides between them, by what there is to do, and nothing else does.

OPEN, SEND and each kind of upload make requests. After an error each has a wait of its own
(`RetryPolicy`, 1 to 30 s) and is then tried again. If the MLflow run was deleted, the deliverer
asks once a minute whether it is restored, and for a child less and less often. If another machine
has continued it, nothing follows.

A crash before delivery.json is written replays the same items, which changes nothing in MLflow. A
journal is synced before its events are sent, and delivery.json has a checksum of what was read. If
a power loss takes a part of the journal nevertheless, the deliverer reads it again from the start.
Points go first, then the end, then uploads. So uploads that wait or fail hold up neither the curves
nor the run's status, also if a container ends all processes after the command. One under way does.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero.catalog import command_lines
from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    DataDescribed,
    Event,
    ModelLogged,
    ParamsLogged,
    PicturesTaken,
    RunEnded,
    RunStarted,
)
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.items import (
    CLAIM,
    RETRIES,
    MetricBatch,
    MlflowItem,
    Tags,
    name_of,
    parts_of,
)
from rankzero.mlflow_store.uris import (
    ExperimentGone,
    RunContinued,
    RunErased,
    RunGone,
    sqlite_path,
)
from rankzero.permanent_errors import ANY_CAUSE, lacks_rights, refusal
from rankzero.redaction.text import line_without_secrets, text_without_secrets
from rankzero.run_store import delivery_state, disk, run_locks
from rankzero.run_store.delivery_state import Problems, Task, Upload
from rankzero.run_store.folder import EVENTS, FolderGone, RunFolder
from rankzero.run_store.journal import READ_BYTES, read_all, take
from rankzero.tracking import description, open_run
from rankzero.tracking.open_run import Target
from rankzero.tracking.retry import LONGEST_WAIT_SECONDS, RetryPolicy, log
from rankzero.tracking.translate import ending, problem_tags, steps_before, translate
from rankzero.tracking.uploads import upload

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns

# Few large batches: each costs the server as much as a thousand points do.
READ_SECONDS = 5.0
# How often MLflow is asked whether another machine has continued a run, or a deleted one is back.
_LOOK_SECONDS = 60.0
# After so many failures in a row the item itself may be to blame, and another request tests it.
_SUSPICIOUS_FAILURES = 8
# With a failure before each: a server that answers now and then proves nothing.
_CERTAIN_ANSWERS = 3
# An upload that so often ran out of memory may need more than the machine has.
_MOST_WITHOUT_MEMORY = 4


class Activity(enum.Enum):
    """The deliverer's next action: the states of its machine."""

    IDLE = enum.auto()
    OPEN = enum.auto()
    READ = enum.auto()
    SEND = enum.auto()
    END = enum.auto()
    UPLOAD = enum.auto()


class Deliverer:
    """Delivers one node's journals: node 0 the run and its own samples, others their samples.

    The caller holds the node's lock (`run_locks.acquire`), calls `work` until it returns False,
    waits a little, and calls it again.
    """

    def __init__(
        self,
        folder: RunFolder,
        node: int = 0,
        connect: Callable[[str], MlflowRuns] = open_run.connect,
        longest_wait: float = LONGEST_WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sync: Callable[[Path], None] = disk.sync,
    ) -> None:
        self._folder, self._node, self._clock = folder, node, clock
        self._connect, self._sync = functools.cache(connect), sync
        self._path = delivery_state.path_of(folder, node)
        self._directory = run_locks.directory(folder)
        system = folder.system(node).name
        self._journals = [EVENTS, system] if node == 0 else [system]
        # Reads the journal: once an attempt, and only if it repeats steps.
        self._before = functools.lru_cache(1)(
            lambda attempt: steps_before(attempt, read_all(folder.events))
        )
        self.state = delivery_state.check_journals(
            delivery_state.load(self._path), folder, self._journals
        )
        """As it is once `_items` are sent. Until then the file has the state before them."""
        self._committed = self.state
        # A replaced machine has no file.
        self._is_lost = self._path.exists() and not self.state.updated
        self._items: deque[MlflowItem] = deque()
        self._whole = math.inf  # So many of them lie behind the parts of a divided batch.
        self._target: Target | None = None
        # The last tag that was no newer attempt's. To look for others reads the journal.
        self._claim: str | None = None
        self._retry = RetryPolicy(longest_wait, clock)
        self._now = 0.0  # when the activity began: its upload stays the next one until its end
        self._hurried, self._read_at, self._look_at = False, 0.0, 0.0
        # Until then a run that was deleted or continued elsewhere is not asked for.
        self._gone_until, self._gone_wait = 0.0, _LOOK_SECONDS
        self.is_refused = False
        """Whether MLflow does not let this user open the run, until somebody changes that."""
        # The unread bytes that are no whole line: there is nothing to read until they change.
        self._unfinished = 0

    @property
    def complete(self) -> bool:
        """Whether nothing is to do: MLflow has all that the journals hold, or takes no more."""
        queue = self.state.queue
        is_gone = self._clock() < self._gone_until
        return is_gone or not (self._items or self._unread() or queue.waiting or queue.ending)

    def work(self) -> bool:
        """Do the next activity; return whether anything was done.

        Raises nothing that MLflow or the data cause. Raises OSError for the run's own disk.
        """
        self._now = self._clock()
        activity, target = self._next(), self._target
        kind = self._kind(activity)
        match activity:
            case Activity.IDLE:
                return False
            case Activity.READ:
                return self._read()
            case Activity.END:
                if (end := self.state.queue.ending) is not None:
                    items, self.state = ending(end, self.state)
                    self._items.extend(items)
                self._look_at = 0.0
                return True
        try:
            if target is None:
                done = self._open()
            else:
                self._look(activity, target)
                (self._send if activity is Activity.SEND else self._upload)(target)
                done = True
        # A hostile value, a full disk, a broken server: none of them may end the delivery.
        except Exception as error:
            return self._handle(error, activity, target)
        self._succeeded(kind, done)
        # Not above: an error of the run's own disk is no outage of MLflow.
        if done and not self._items:
            self.commit()
        return done

    def hasten(self) -> None:
        """Read and retry at once from now on: the journals are complete, and a command waits."""
        self._hurried, self._gone_until = True, 0.0
        self._retry.hasten()

    def commit(self) -> None:
        """Write the state to delivery.json: `state`, or while items wait, the one before them.

        Raises FolderGone if the folder was moved or deleted. Another run of its name must not get
        this state. No other folder gets the inode while a lock in this one is open.
        """
        if run_locks.directory(self._folder) != self._directory:
            raise FolderGone(f"{self._folder.path} was moved or deleted while it was delivered")
        before = self._committed if self._items else self.state
        claim = run_locks.latest(self._folder, self._node)
        # Until it has opened the run, nobody has asked what another machine sent meanwhile.
        is_known = self._target is not None or (self.complete and not self._gone_until)
        token = claim.token if claim else ""
        self._committed = dataclasses.replace(
            before,
            retries=self.state.retries,  # True at once, whatever is sent.
            claim=token if is_known else self._committed.claim,
        )
        delivery_state.save(self._path, self._committed)

    def _next(self) -> Activity:
        """Return what to do next. Every transition of the machine is decided here."""
        queue = self.state.queue
        if self._clock() < self._gone_until:
            return Activity.IDLE
        if self._target is None:
            return Activity.IDLE if self.complete else self._if_due(Activity.OPEN)
        if self._items:
            return self._if_due(Activity.SEND)
        unread = self._unread()
        is_due = self._hurried or unread >= READ_BYTES or self._clock() >= self._read_at
        if unread not in (0, self._unfinished) and is_due:
            return Activity.READ
        if queue.ending is not None:
            return Activity.END
        return self._if_due(Activity.UPLOAD) if queue.waiting else Activity.IDLE

    def _if_due(self, activity: Activity) -> Activity:
        return activity if self._retry.is_due(self._kind(activity)) else Activity.IDLE

    def _kind(self, activity: Activity) -> Hashable:
        """Return what has a wait of its own: the activity, or the kind of the next upload."""
        return _kind_of(self._next_upload) if activity is Activity.UPLOAD else activity

    @property
    def _next_upload(self) -> Upload:
        """The first one that is due, else of the kind due first. The page update is the last."""
        queue = self.state.queue
        uploads = queue.awaited or queue.waiting
        return min(uploads, key=lambda one: max(self._now, self._retry.of(_kind_of(one)).due))

    def _unread(self) -> int:
        return delivery_state.unread_bytes(self._folder, self.state.cursor.offsets)

    def _succeeded(self, kind: Hashable, done: bool = True) -> None:
        if len(self._items) <= self._whole:
            self._whole = math.inf
        self._change(retries=self._retry.succeeded(kind, self.state.retries, reached=done))

    def _handle(self, error: Exception, activity: Activity, target: Target | None) -> bool:
        """Set the item aside if it is to blame, else back off. Return whether anything was done."""
        self._look_at, kind = 0.0, self._kind(activity)
        try:
            if isinstance(error, RunGone):
                raise error
            reason = None if target is None else self._fault_of_item(error, activity, target)
            if target is not None and reason is not None:
                # Is it the item, or was the whole run deleted?
                target.store.require_run(target.run.run_id)
                log.warning("set aside: %s", text_without_secrets(reason))
                self._set_aside(activity, reason)
                self._succeeded(kind)
                return True
        except RunGone as gone:
            self._abandon(gone)
            return True
        except Exception as later:
            error = later
        # The store's address, and with it a password, may be part of the message.
        text = line_without_secrets(f"{type(error).__name__}: {error}")
        answered = isinstance(error, ExperimentGone) or lacks_rights(error)
        self.is_refused = answered and target is None
        retries = self._retry.failed(kind, self.state.retries, text, answered=answered)
        self._change(retries=retries)
        log.warning("try %d failed: %s", self._retry.of(kind).failures, text)
        self.commit()
        return False

    def _fault_of_item(self, error: Exception, activity: Activity, target: Target) -> str | None:
        """Return why MLflow will never accept the first item or upload, or None if it may."""
        kind, reason = self._kind(activity), refusal(error)
        failures = self._retry.of(kind).failures
        is_bad_request = getattr(error, "error_code", None) == ANY_CAUSE
        # The size of an upload may explain any other error, however MLflow answers others.
        if activity is Activity.UPLOAD and not is_bad_request:
            if isinstance(error, MemoryError) and failures >= _MOST_WITHOUT_MEMORY:
                return "there was not enough memory for it, however often it was tried"
            return reason
        # The batch that it is a part of has failed so often.
        is_part = is_bad_request and len(self._items) > self._whole
        if reason is not None or (failures < _SUSPICIOUS_FAILURES and not is_part):
            return reason
        if self._retry.answered(kind, self._accepts_another(target)) <= _CERTAIN_ANSWERS:
            return None
        return f"fails while MLflow accepts other requests: {error!r}"

    def _accepts_another(self, target: Target) -> bool:
        """Return whether MLflow accepts another request now.

        It is a write, because a server whose disk is full still answers reads.
        """
        try:
            target.store.require_run(target.run.run_id)
            failures = str(self.state.retries.failures)
            target.store.set_tags(target.run.run_id, {RETRIES: failures})
        except Exception:
            return False
        return True

    def _open(self) -> bool:
        """Find or create the MLflow run. Return False while another process has yet to."""
        target = open_run.open_run(self._folder, self._node, self._connect, self.state.run_id)
        if target is None:
            # A child looks for its parent's run on this disk, others ask the server.
            if self._folder.identity.parent is None:
                self._retry.postpone(Activity.OPEN)
            return False
        folder, node, run = self._folder, self._node, target.run
        # The nodes of an attempt share it, and only node 0 has the run's journal.
        other = open_run.other_attempt(folder, run) if node == 0 else None
        is_new = self._is_new_attempt()
        # Without a state of our own, MLflow may have points that another process sent.
        if self.state.run_id is None:
            is_replaced = node > 0 and not self._is_lost
            from_elsewhere = is_replaced or folder.identity.mlflow_run_id is not None
            self.state = open_run.adopt(self.state, run, node, bool(other) or from_elsewhere)
        # Nothing shows that a second machine has taken the place of a helper's.
        elif other or is_new or node > 0:
            sent = is_new and open_run.has_others_samples(folder, node, self.state, run)
            self.state = open_run.adopt(self.state, run, node, bool(other) or sent)
        if other is not None:
            self.state = open_run.leave_to(other, self.state, run)
        open_run.refuse_older(folder, other, is_new)
        self._claim = run.tags.get(CLAIM)
        self._target, self._look_at = target, self._clock() + _LOOK_SECONDS
        return True

    def _look(self, activity: Activity, target: Target) -> None:
        """Raise RunContinued if another machine has begun a newer attempt meanwhile.

        Asks MLflow before an end and before each upload, after an error, and once a minute.
        """
        is_due = activity is Activity.UPLOAD or self._clock() >= self._look_at
        # Processes on one disk share a folder, whose claim and locks keep them apart.
        if self._node > 0 or self._is_embedded or not is_due:
            return
        identity = dataclasses.replace(self._folder.identity, mlflow_run_id=target.run.run_id)
        try:
            run = target.store.find_open_run(identity)
        except Exception as error:
            if refusal(error) is None:
                raise
            return  # not about the item, whose own request decides
        claim = None if run is None else run.tags.get(CLAIM)
        if run is not None and claim != self._claim:
            open_run.refuse_older(self._folder, open_run.other_attempt(self._folder, run))
        self._claim, self._look_at = claim, self._clock() + _LOOK_SECONDS

    @property
    def _is_embedded(self) -> bool:
        return sqlite_path(self._folder.identity.tracking_uri) is not None

    def _is_new_attempt(self) -> bool:
        """Return whether another machine may have continued the run since the state was written.

        Not within an attempt: a replay must send its points again, though MLflow has them.
        """
        claim = run_locks.latest(self._folder, self._node)
        return not self._is_embedded and claim is not None and claim.token != self._committed.claim

    def _read(self) -> bool:
        """Read on in the journals. Return whether there was a whole line to read."""
        self._read_at = self._clock() + READ_SECONDS
        self._unfinished, unread = 0, self._unread()
        events: list[Event] = []
        cursor, problems = self.state.cursor, self.state.problems
        offsets, checksums = dict(cursor.offsets), dict(cursor.checksums)
        for name in self._journals:
            path = self._folder.path / name
            chunk = take(path, offsets[name], checksum=checksums[name])
            if chunk.offset == offsets[name]:
                continue
            events += chunk.events
            if chunk.foreign:
                problems = problems.reject(
                    f"{name} before byte {chunk.offset:,}", f"{chunk.foreign} lines are no events"
                )
            problems = self._confirm(path, chunk.events, problems)
            offsets[name], checksums[name] = chunk.offset, chunk.checksum
        # A killed writer may leave a part of a line, which must not hold up the end.
        if offsets == cursor.offsets:
            self._unfinished = unread
            return False
        cursor = dataclasses.replace(cursor, offsets=offsets, checksums=checksums)
        # Only now: an error of `translate` must not lose the events.
        state = dataclasses.replace(self.state, cursor=cursor, problems=problems)
        size = limits.METRICS_PER_TRANSACTION if self._is_embedded else limits.METRICS_PER_BATCH
        items, self.state = translate(events, state, size, self._before)
        self._items.extend(items)
        if not items:
            self.commit()
        return True

    def _confirm(self, path: Path, events: Iterable[Event], problems: Problems) -> Problems:
        """Sync the pictures that events name, then their journal. Return the problems."""
        run = self._folder
        taken = [run.path / event.path for event in events if isinstance(event, PicturesTaken)]
        pictures = functools.partial(disk.sync_all, taken, run.path, self._sync)
        journal = functools.partial(self._sync, path)
        # A power loss must not take from the journal what MLflow has: the steps would be trained
        # again, with other values.
        for name, sync in ((run.pictures.name, pictures), (path.name, journal)):
            try:
                sync()
            except OSError as error:
                problems = problems.remark(
                    name, f"the disk did not confirm it; a power loss may take a part: {error}"
                )
        return problems

    def _send(self, target: Target) -> None:
        (store, run), item = target, self._items[0]
        match item:
            case RunStarted():
                store.start_attempt(run.run_id, item)
            case DataDescribed():
                store.log_data(run.run_id, item)
            case ParamsLogged():
                store.log_params(run.run_id, item.params)
            case MetricBatch(points):
                store.log_metrics(run.run_id, points)
                delivered = self.state.cursor.delivered + len(points)
                self._change(cursor=dataclasses.replace(self.state.cursor, delivered=delivered))
            case Tags(tags):
                store.set_tags(run.run_id, tags)
            case RunEnded():
                store.close_run(run.run_id, item)
                self._queue_page(ended=True)
        self._items.popleft()

    def _queue_page(self, *, ended: bool) -> None:
        """Note that the end needs no more requests, and that the page comes next.

        Uploads that fail later may add problems, which belong on the page as well.
        """
        uploads = [one for one in self.state.queue.awaited if one is not Task.PAGE]
        waiting = (Task.PAGE, *uploads, Task.PAGE_UPDATE)
        self._change_queue(ending=None, ended=ended, waiting=waiting)

    def _upload(self, target: Target) -> None:
        item = self._next_upload
        if item is Task.PAGE or item is Task.PAGE_UPDATE:
            tags, self.state = description.page_tags(item, target, self._folder, self.state)
            self._items.extend(tags)
        else:
            until = self._clock() + READ_SECONDS
            for state in upload(item, target, self._folder, self.state, self._before):
                is_sent = state.queue.uploaded is not self.state.queue.uploaded
                self.state = state
                # Points, the end and other uploads come first, also if there are many files.
                if item is Task.ARTIFACTS and is_sent and self._clock() >= until:
                    self._drop(item)
                    self._change_queue(waiting=(*self.state.queue.waiting, item))
                    return
        # Only now: a crash before this repeats the upload, which is harmless.
        self._drop(item)

    def _drop(self, upload: Upload) -> None:
        waiting = self.state.queue.waiting
        self._change_queue(waiting=tuple(one for one in waiting if one is not upload))

    def _set_aside(self, activity: Activity, reason: str) -> None:
        """Count the refused item or upload and continue. A batch is first divided."""
        if activity is Activity.UPLOAD:
            file = self._next_upload
            self._drop(file)
            name = file.value if isinstance(file, Task) else f"{type(file).__name__} {file.path}"
            self._reject(f"upload {name}", reason)
            if self.state.queue.ended:  # The page has been written without this.
                self._items.append(Tags(problem_tags(self.state)))
            self.commit()
            return
        item = self._items[0]
        parts = parts_of(item)
        if parts:
            self._items.popleft()
            self._whole = min(self._whole, len(self._items))
            self._items.extendleft(reversed(parts))
            return
        if isinstance(item, RunEnded):
            self._queue_page(ended=False)
        self._reject(name_of(item), reason)
        self._items.popleft()
        if not self._items:
            self.commit()

    def _abandon(self, gone: RunGone) -> None:
        """Stop: the run was deleted in MLflow, or another machine has continued it.

        The rest waits for somebody to restore it, or for a later attempt here.
        """
        is_final = self._hurried or isinstance(gone, RunContinued)
        self._gone_until = math.inf if is_final else self._clock() + self._gone_wait
        self._target, name, error = None, self._folder.path.name, str(gone)
        back = functools.partial(command_lines.line, self._folder.root, "delete")
        is_child = self._folder.identity.parent is not None
        # One courier asks for all trials of a study, of which a thousand may be deleted.
        self._gone_wait = min(self._gone_wait * (2 if is_child else 1), 3600.0)
        if isinstance(gone, RunErased):
            error += f": if it was erased, `{back('--discard-undelivered', name)}` deletes it here"
            error += ", too; if MLflow has another database now, see docs/troubleshooting.md"
        elif type(gone) is RunGone:
            restore = f"`{back('--restore', name)}` brings it back"
            error += f": {'restore it in MLflow' if is_child else restore}"
        if error != self.state.retries.error:
            log.error("%s; the rest of its journal is not delivered", error)
        self._change(retries=dataclasses.replace(self.state.retries, error=error, gone=True))
        self.commit()

    def _reject(self, what: str, reason: str) -> None:
        self._change(problems=self.state.problems.reject(what, reason))

    def _change_queue(self, **changes: Any) -> None:
        self._change(queue=dataclasses.replace(self.state.queue, **changes))

    def _change(self, **changes: Any) -> None:
        self.state = dataclasses.replace(self.state, **changes)


def _kind_of(upload: Upload) -> Hashable:
    """Return what keeps its order: checkpoints do, for the best, deletions and models' metrics."""
    if isinstance(upload, CheckpointSaved | CheckpointDeleted | ModelLogged):
        return "checkpoints"
    return upload if isinstance(upload, Task) else type(upload).__name__
