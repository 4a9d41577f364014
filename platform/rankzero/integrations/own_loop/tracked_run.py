"""A run of a program's own loop: what the program may call."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.util import is_exiting
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rankzero.errors import UserError
from rankzero.events import Event, ParamsLogged, TagsSet
from rankzero.experiment import Goal
from rankzero.integrations.own_loop import logged_files, mlflow_calls, process_end, tables
from rankzero.integrations.own_loop.attempt import FLUSH_ROWS, Attempt, guarded
from rankzero.integrations.own_loop.own_names import OwnNames, logged_params
from rankzero.integrations.own_loop.params import params_of
from rankzero.integrations.own_loop.values import pairs_of, read_pairs, snapshot
from rankzero.mlflow_store import limits
from rankzero.redaction.text import settings_without_secrets, url_without_secrets
from rankzero.run_store import checkpoint_files, delivery_state, names
from rankzero.run_store.delivery_state import DeliveryState
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tracking.run_log import RunLog

T = TypeVar("T")
# MLflow's answer, and before it the import of mlflow, which a busy machine delays.
_ANSWER_SECONDS, _IMPORT_SECONDS = 20.0, 60.0
# A copy that takes longer delays a training noticeably.
_SLOW_SECONDS = 10.0
# Each try costs a millisecond, or a process. A loop that logs must not wait for one each time.
_REOPEN_SECONDS = 10.0


class TrackedRun:
    """A run that is being tracked. Every method is safe on every rank, and in every thread.

    After its end, a method that logs begins a new attempt of the run.
    """

    def __init__(
        self,
        open_log: Callable[[Identity], RunLog],
        identity: Identity,
        goal: Goal,
        keep: int = 1,
        params: Mapping[str, str] | None = None,
        flush_rows: int = FLUSH_ROWS,
        *,
        offline: bool = False,
        named: bool = False,
    ) -> None:
        """`named`: whether MLflow may have a checkpoint of the run that this disk lacks."""
        self._open_log, self._identity, self._offline = open_log, identity, offline
        self._named = named
        # A child that has ended, and that the program has dropped, cannot begin again.
        self._children = weakref.WeakSet[TrackedRun]()
        self._top = self
        self.is_owned = False
        """Whether a `with` block or an adapter ends the run."""
        self.end_left: Callable[..., object] = lambda *_: None
        """Ends an adapter's run that nothing else will end. The next training calls it."""
        self._active: str | None = None
        self._goal, self._keep, self._params = goal, keep, dict(params or {})
        self._flush_rows = flush_rows
        self._told: set[str] = set()
        self.was_elsewhere = False
        """Whether another process has had an attempt of the run since this one began it."""
        self._newest_attempt, self._refused_until = 0, 0.0
        # A handler of a signal may log while its thread logs.
        self._lock = threading.RLock()
        self._begin()
        folder = self._log.folder
        self._tables = tables.ListedTables(folder, self.tell)
        self._own_params = OwnNames("param", lambda: logged_params(folder), self.tell)
        self._own_images = OwnNames("image", dict, self.tell)
        self._own_tags = OwnNames("tag", lambda: tables.tags_by_name(folder), self.tell)

    def __deepcopy__(self, memo: object) -> TrackedRun:
        return self  # One object writes a run, also for the copy of a model that holds it.

    def _begin(self) -> None:
        """Begin an attempt. Raises UserError if another process writes the run."""
        self._log = self._open_log(self._identity)
        before, self._newest_attempt = self._newest_attempt, self._log.attempt
        self.was_elsewhere |= 0 < before < self._newest_attempt - 1
        self._handled = id(sys.exc_info()[1])
        self._attempt = Attempt(
            *(self._log, self._goal, self._keep, self._flush_rows, self.tell, lambda: self._lock)
        )
        self.unless_ended: BaseException | None = None
        """The error to assume if the process ends and nobody has ended the attempt."""
        self.trains = False
        """Whether an adapter's training began in this attempt, which has not ended."""
        self._attempt.start(self._params)
        OPEN[self._log.folder.path] = self
        self._at_exit = process_end.at_exit(
            lambda error: self.finish(error or self.unless_ended),
            lambda: self._attempt.used,
        )
        process_end.watch_cells(_end_used_runs)
        self._is_open = True

    def reopen(self) -> bool:
        """Begin a new attempt if the run has ended. Return whether the run is open.

        Each method that logs calls it. If it fails, the reason is printed, once.
        """
        if self._is_open:
            return True
        if time.monotonic() < self._refused_until:
            return False
        try:
            if is_exiting():  # Nothing would end the new attempt.
                raise UserError("the process ends")
            # As of a cell that was run again. The two would end each other at every value.
            if self._log.folder.path in OPEN:
                raise UserError("a later call of track() continues it")
            self._begin()
        except Exception as error:  # tracking must not end a training
            text = f"what is logged after the end of {self.name} is lost: {error}"
            self.tell("reopen", text)
            self._refused_until = time.monotonic() + _REOPEN_SECONDS
        return self._is_open

    def disown(self) -> None:
        """Leave the run to the process that this one was forked from."""
        # Another thread of that process may have held the lock.
        self._is_open, self._lock = False, threading.RLock()
        self._log.disown()

    @property
    def name(self) -> str | None:
        """The run's name; None on other ranks than 0."""
        return self._log.folder.path.name

    @property
    def folder(self) -> Path | None:
        """The run's folder; None on other ranks than 0."""
        return self._log.folder.path

    @property
    def id(self) -> str | None:
        """The run's id in MLflow. Waits until the courier has created the run there.

        None offline, on other ranks than 0, and 20 seconds after the attempt began if MLflow does
        not answer, else after a minute.
        """
        from rankzero.catalog.lookup import mlflow_id

        while not self._offline:
            found = mlflow_id(self._log.folder)
            patience = _ANSWER_SECONDS if self._delivery.retries.error else _IMPORT_SECONDS
            if found is not None or time.monotonic() - self._attempt.begun > patience:
                return found
            time.sleep(0.1)
        return None

    @property
    def url(self) -> str | None:
        """The run's page on MLflow's server; None without a server, or as for `id`."""
        run_id, uri = self.id, self._log.folder.identity.tracking_uri
        if run_id is None or not uri.startswith("http"):
            return None
        experiment_id = self._delivery.experiment_id
        return f"{url_without_secrets(uri)}/#/experiments/{experiment_id}/runs/{run_id}"

    @property
    def _delivery(self) -> DeliveryState:
        return delivery_state.load(delivery_state.path_of(self._log.folder, 0))

    @property
    def step(self) -> int:
        """The newest step so far; 0 on other ranks than 0."""
        with self._lock:
            if self._is_open:
                self._attempt.flush()
            return self._attempt.history.step

    @property
    def highest_step(self) -> int:
        """The highest step so far, of earlier attempts too; 0 on other ranks than 0."""
        with self._lock:
            if self._is_open:
                self._attempt.flush()
            return self._attempt.history.highest

    def __enter__(self) -> TrackedRun:
        self.is_owned = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(error)

    def finish(self, error: BaseException | None = None) -> None:
        """End the run: FINISHED; FAILED with the traceback of `error`, or KILLED by Ctrl-C."""
        with self._lock:
            if not self._is_open:
                return
            if error is None and self._top is self:
                self._note_handled(sys.exc_info()[1])
            for child in list(self._children):
                child.finish(error)
            active, self._active = self._active, None
            if active is not None:
                self._guarded("mlflow keeps the run active", lambda: mlflow_calls.leave(active))
            self._is_open = self.trains = False
            self._at_exit.cancel()
            OPEN.pop(self._log.folder.path, None)
            self._attempt.end(error)

    def _note_handled(self, error: BaseException | None) -> None:
        # In a `finally`, nobody knows yet whether the exception will end the process. One that was
        # handled when the attempt began is not of the run.
        if process_end.status_of(error)[0] != "FINISHED" and id(error) != self._handled:
            text = f"finish() was called while {type(error).__name__} was handled: {self.name} is "
            self.tell("handled", text + "FINISHED; use `with`, or finish(error)")

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log 0-d tensors or numbers at `step`, without a host sync: tensors stay on their device.

        Any other value is logged as NaN, with one warning. Without a step that is an integer, the
        steps count on as soon as a metric would get a second value.
        """
        # The loop may overwrite a tensor in place before it is read.
        values = self._read(metrics, snapshot, "metric")
        with self._lock:
            if not self.reopen():
                return
            self._attempt.add(step if step is None else snapshot(step), values)

    log_metrics = log

    def log_metric(self, key: str, value: Any, step: int | None = None) -> None:
        """Log one metric, as `log` does."""
        self.log({key: value}, step)

    def evaluated(self, metrics: Mapping[str, Any], step: int | None = None) -> bool:
        """Log validation metrics. Return whether the goal's is the best so far.

        `step`: by default the newest one, or the next if that has such an evaluation. That of a
        checkpoint may be the same one. Always False on other ranks than 0.
        """
        with self._lock:
            if not self.reopen():
                return False
            return self._attempt.evaluated(self._read(metrics, snapshot, "metric"), step)[2]

    def judge_logged(self) -> None:
        """Judge each value of the goal's metric that `log` gets in this attempt."""
        with self._lock:
            self._attempt.history.judges_rows = True

    def had(self, names: Collection[str], step: int) -> bool:
        """Return whether earlier attempts logged any of these metrics last at this step."""
        with self._lock:
            return self._attempt.history.had(names, step)

    def checkpoint(
        self,
        state_dict: Mapping[str, Any],
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep `state_dict` (tensors and plain values) as a checkpoint. Return once it is copied.

        `metrics` are validation metrics. The goal's metric among them decides which checkpoints are
        kept. Those that `evaluated` has logged at this step are not logged again.
        """
        with self._lock:
            if not self.reopen():
                return
            attempt = self._attempt
            values = self._read({} if metrics is None else metrics, snapshot, "metric")
            at, measured, better = attempt.evaluated(values, step, saves=True)
            self._guarded(
                f"the checkpoint of step {at} is not kept",
                lambda: attempt.save(state_dict, at, measured, better, of_adapter=self.trains),
            )

    def log_params(self, params: object) -> None:
        """Add params at any time: anything that `track` takes as a config.

        MLflow never changes a param: a later value becomes a tag, ``rankzero.param.<name>``.
        """

        def event() -> Event:
            texts = settings_without_secrets(params_of(params, self.tell))
            with self._lock:  # Another thread may log the same name.
                found = self._own_params.of(texts)
                self._params |= found
            return ParamsLogged(time.time(), found)

        self._keep_event("a param", event)

    def log_param(self, key: str, value: Any) -> None:
        """Add one param, as `log_params` does."""
        self.log_params({key: value})

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags. RankZero's own are refused: ``rankzero.…``, and MLflow's list of tables."""

        def event() -> Event | None:
            texts = self._read(tags, str, "tag")
            for name in [*texts]:
                legal = limits.name(name)  # "/rankzero.uuid" is "rankzero.uuid" in MLflow.
                if legal.startswith("rankzero.") or legal == limits.TABLES_TAG:
                    self.tell(f"tag {name}", f"a tag is not logged: {name} is RankZero's own")
                    del texts[name]
            with self._lock:
                found = self._own_tags.of(settings_without_secrets(texts))
            return TagsSet(time.time(), found) if found else None

        self._keep_event("a tag", event)

    def set_tag(self, key: str, value: Any) -> None:
        """Set one tag, as `set_tags` does."""
        self.set_tags({key: value})

    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None) -> None:
        """Copy a file or folder to the run's artifacts, below the folder `artifact_path` there.

        Returns once it is copied, so the program may change or delete it.
        """

        def copy() -> Event:
            began = time.monotonic()
            source = logged_files.path_of(local_path)
            event = logged_files.copy(self._log.folder, source, artifact_path, self._note)
            if (seconds := time.monotonic() - began) > _SLOW_SECONDS:
                self.tell("slow", f"log_artifact took {seconds:.0f} s to copy {local_path}")
            return event

        self._keep_event(str(local_path) or "a file", copy)

    def log_artifacts(self, local_dir: str | Path, artifact_path: str | None = None) -> None:
        """Copy what a folder contains to the run's artifacts, each as `log_artifact` does."""

        def copy() -> None:
            root = self._log.folder.path.parents[1]  # A program may lie next to its runs.
            for path in logged_files.path_of(local_dir).absolute().iterdir():
                if path != root:
                    self.log_artifact(path, artifact_path)

        self._guarded(f"{local_dir or 'a folder'} is not logged", copy)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Write a text as an artifact."""
        self._keep_file(artifact_file, lambda path: path.write_text(text, encoding="utf-8"))

    def log_dict(self, dictionary: Mapping[str, Any], artifact_file: str) -> None:
        """Write plain values as an artifact: as YAML if the file is called so, else as JSON."""
        self._keep_file(artifact_file, lambda path: logged_files.save_dict(dictionary, path))

    def log_table(
        self, data: Any, artifact_file: str, columns: Sequence[str] | None = None
    ) -> None:
        """Write a table, which MLflow's page shows as one. A second call adds rows.

        `data`: columns by name, rows, or a DataFrame. `columns`: the names of rows without names.
        """

        def written() -> Event:
            folder, path = self._log.folder, str(PurePosixPath(artifact_file))
            with self._lock:  # Another thread may add rows.
                before = folder.artifacts / path
                save = functools.partial(tables.save, data, columns, self.tell, before=before)
                event, listed = logged_files.write(folder, path, save), self._tables.add(path)
                if listed is not None and self.reopen():
                    self._log(listed)
                return event

        self._keep_event(artifact_file, written)

    def log_figure(self, figure: Any, artifact_file: str) -> None:
        """Draw a figure of matplotlib or plotly as an artifact. Takes the time of the drawing."""
        self._keep_file(artifact_file, lambda path: logged_files.save_figure(figure, path))

    def log_image(
        self,
        image: Any,
        artifact_file: str | None = None,
        *,
        key: str | None = None,
        step: int | None = None,
    ) -> None:
        """Log a tensor, an array, a PIL image or a figure: as an artifact, or by `key` and step.

        MLflow's page shows the images of a key by step. `step`: by default the newest one. Numbers
        from 0 to 1 and integers to 255 keep their scale. Others are scaled, with one note.
        """
        if artifact_file is not None:
            save = functools.partial(logged_files.save_image, image, artifact_file, self.tell)
            self._keep_file(artifact_file, save)
            if step is not None and key is None:
                self.tell("image step", f"{artifact_file} has no step: log_image has no key for it")
        if artifact_file is not None and key is None:
            return

        def event() -> Event:
            with self._lock:
                self._attempt.flush()
                at = self._attempt.history.step_of(step)
                (own,) = self._own_images.of({key or "image": ""})
            return logged_files.keep_picture(self._log.folder, own, image, at, self.tell)

        self._keep_event("an image", event)

    def log_model(
        self,
        pytorch_model: Any,
        name: str = "model",
        *,
        input_example: Any,
        step: int | None = None,
    ) -> None:
        """Log a module of PyTorch, which ``mlflow.pytorch.load_model`` loads.

        Traces a copy on the CPU, which takes seconds. A model that cannot be traced is not logged:
        nothing is pickled. `input_example`: a batch, as a tensor, an array or a tuple of them.
        """

        def event() -> Event:
            from rankzero.integrations.own_loop import logged_models

            with self._lock:
                self._attempt.flush()
                at = self._attempt.history.step_of(step)
            return logged_models.keep(self._log.folder, pytorch_model, name, input_example, at)

        self._keep_event(f"the model {name!r}", event)

    def _keep_file(self, name: str, save: Callable[[Path], object]) -> None:
        self._keep_event(name, lambda: logged_files.write(self._log.folder, name, save))

    def _keep_event(self, what: str, make: Callable[[], Event | None]) -> None:
        """Log the event that `make` returns, if any. If that fails, note the reason."""

        def keep() -> None:
            event = make()  # A copy takes long, and other threads log meanwhile.
            with self._lock:
                if event is not None and self.reopen():
                    self._log(event)

        with self._lock:
            is_open = self.reopen()
        if is_open:
            self._attempt.note_use(time.time())
            self._guarded(f"{what} is not logged", keep)

    def child(self, name: str, config: object = None) -> TrackedRun:
        """Begin a run below this one, such as a fold's. Hold and end it as any run.

        `name`: unique below this run; an existing child is continued. `config`: its own params. It
        has this run's goal. The end of this run ends it.
        """
        from rankzero.integrations.own_loop.null_run import NullTrackedRun

        params = {key: text for key, text in self._params.items() if key.startswith("goal.")}
        run: TrackedRun = NullTrackedRun()
        top = self._top._log.folder  # Its courier delivers all that is below it.

        def add_params() -> None:
            params.update(settings_without_secrets(params_of(config, self.tell)))

        def open_log(identity: Identity) -> RunLog:
            if not self.reopen():
                raise UserError(f"{self.name} has ended and cannot continue")
            log = self._open_log(identity)
            if log.folder not in top.children:
                top.add_child(identity.name)
            return log

        def begin() -> None:
            nonlocal run
            above = self._log.folder.identity
            identity = top.identity.child(f"{above.name}-{_plain(str(name))}")
            if self._top is not self:
                identity = dataclasses.replace(identity, parent_uuid=above.uuid)
            known = RunFolder(top.path.with_name(identity.name))
            if known.events.exists() and (identity.parent, identity.parent_uuid) != (
                known.identity.parent,
                known.identity.parent_uuid,
            ):
                # Such as the child "b" of "a", if this is "a-b".
                identity = dataclasses.replace(identity, name=f"{identity.name}-{above.uuid[:8]}")
            run = TrackedRun(
                *(open_log, identity, self._goal, self._keep, params, self._flush_rows),
                offline=self._offline,
                named=self._named,
            )
            # The end of a run is its children's, and a child's new attempt is one of its run. With
            # a lock each, they could wait for each other.
            run._top, run._lock = self._top, self._lock
            self._children.add(run)

        with self._lock:
            self._guarded(f"the config of the child {name!r} is not logged", add_params)
            self._guarded(f"the child {name!r} is not tracked", begin)
            return run

    def mlflow(self) -> str | None:
        """Let this thread's own calls of mlflow reach this run, until `finish`. Returns its `id`.

        A note says so if MLflow does not have the run, and then None is returned.
        """
        with self._lock:
            is_open = self.reopen()
        run_id = self.id if is_open else None  # waits, and other threads log meanwhile

        def enter() -> None:
            if run_id is None:
                raise UserError("MLflow does not have the run")
            uri = self._log.folder.identity.tracking_uri
            mlflow_calls.enter(uri, str(self._delivery.experiment_id), run_id)
            self._active = run_id

        lost = f"mlflow's own calls do not reach {self.name}"
        with self._lock:
            reached = guarded(lost, enter, functools.partial(self.tell, "mlflow"))
        return run_id if reached else None

    def tell(self, about: str, text: str) -> None:
        """Note something for people, once for each `about`."""
        with self._lock:
            if about not in self._told:
                self._told.add(about)
                self._log.notice(text)

    def latest(self) -> dict[str, Any] | None:
        """Return the state of the run's last checkpoint, on the CPU; None if it has none.

        Call it on every rank, once the process group is initialised: it is a collective. If this
        disk has no checkpoint of a run with a `name`, it takes the newest that MLflow has under
        that name. Raises UserError, on every rank, if MLflow does not answer.
        """
        from rankzero.integrations.own_loop import last_checkpoint

        with self._lock:
            if self._is_open:
                self._attempt.finish_checkpoints()
            found = last_checkpoint.load(
                self._log.folder, self._log.notice, in_mlflow=self._named and not self._offline
            )
            state, step = found or (None, None)
            kept = checkpoint_files.known(self._log.folder.checkpoints).values()
            self._attempt.history.continue_from(step, kept)
            return state

    def _read(self, entries: object, read: Callable[[Any], T], kind: str) -> dict[str, T]:
        return read_pairs(pairs_of(entries, kind, self.tell), read, kind, self.tell)

    def _guarded(self, consequence: str, action: Callable[[], None]) -> bool:
        return guarded(consequence, action, self._note)

    def _note(self, text: str) -> None:
        with self._lock:
            self._log.notice(text)


def _plain(name: str) -> str:
    """Return a child's name as a part of a folder's name, different for different names."""
    plain, text = names.made_plain(name), name.encode("utf-8", "surrogatepass")
    return plain if plain == name else f"{plain}-{zlib.crc32(text):08x}"


OPEN: dict[Path, TrackedRun] = {}
"""The open runs of this process, by folder. A fork leaves them to its parent."""


def left_open(newest: TrackedRun) -> list[str | None]:
    """Return the names of the other open runs that only the program ends, without children."""
    runs = [run for run in list(OPEN.values()) if run._top is run and not run.is_owned]
    return [run.name for run in runs if run is not newest]


def _end_used_runs(error: BaseException, since: float) -> None:
    """End the open runs that the main thread has used since a time."""
    for run in list(OPEN.values()):
        if run._attempt.used >= since:
            run.finish(error)


def _leave_to_parent() -> None:
    """End no run of the parent in a forked process, nor write its journal, nor wait for its lock.

    Values that are logged there are lost, with a note, while the parent's run is open.
    """
    for run in OPEN.values():
        run.disown()
    OPEN.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
