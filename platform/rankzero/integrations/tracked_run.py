"""`rankzero.track`: the same tracking for a training loop of your own, or another framework's.

    with rankzero.track("my-experiment", config) as run:  # on every rank; only rank 0 writes
        run.log({"loss": loss}, step=i)  # a tensor stays on its device
        run.checkpoint(state_dict, step=i, metrics={"val/loss": v})

Without ``with``, `TrackedRun.finish` ends the run, or the end of the process does. Imports no torch
until `checkpoint` is called.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.util import is_exiting
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rankzero import ranks
from rankzero.errors import UserError
from rankzero.events import (
    Evaluated,
    Event,
    ParamsLogged,
    RunEnded,
    RunStarted,
    Status,
    StepsLogged,
    TagsSet,
)
from rankzero.experiment import Goal
from rankzero.integrations import logged_files, process_end
from rankzero.integrations.params import params_of
from rankzero.integrations.values import snapshot, to_float, to_floats
from rankzero.mlflow_store import uris
from rankzero.redaction.text import settings_without_secrets, url_without_secrets
from rankzero.run_store import delivery_state, provenance
from rankzero.run_store.attempt import take_over
from rankzero.run_store.folder import Identity, RunFolder, new_name
from rankzero.run_store.journal import read_all
from rankzero.run_store.location import is_offline, root_of
from rankzero.tracking.run_log import RunLog

# Values wait on their device until then. A reader sees a new step after two seconds at most.
FLUSH_SECONDS = 2.0
FLUSH_ROWS = 500
# The import of mlflow on a busy machine, and MLflow's answer.
_ID_SECONDS = 20.0
# Each try costs a millisecond, or a process. A loop that logs must not wait for one each time.
_REOPEN_SECONDS = 10.0


class _Value(NamedTuple):
    """A metric's newest value."""

    step: int
    value: float
    time: float


_open: dict[Path, TrackedRun] = {}
"""The open runs of this process, by folder."""


def track(
    experiment: str,
    config: object = None,
    *,
    name: str | None = None,
    goal: Goal | None = None,
    keep: int = 1,
    tracking_uri: str | None = None,
    folder: str | Path | None = None,
    offline: bool | None = None,
) -> TrackedRun:
    """Begin a run. Call it on every rank; only rank 0 writes.

    A ``with`` block ends it, or `TrackedRun.finish`, or the end of the process.

    `config`: the run's params: a mapping, dataclass, `argparse.Namespace`, or any such object.
    `name`: the run's name; an existing run is continued.
    `keep`: the best checkpoints that are kept, in addition to the last.
    `folder`: that of the embedded store and of the runs (default: $RANKZERO_DIR or ./mlruns).
    `offline`: only record; ``rankzero sync NAME`` delivers later (default: $RANKZERO_OFFLINE).

    An initialised process group of torch.distributed determines the rank, otherwise the launcher's
    environment variables do. So under ``torch.multiprocessing.spawn``, initialise the group first.
    Other launchers must set RANK and WORLD_SIZE.

    Raises ConfigError, TrackingError if the store cannot be used, and UserError if another process
    writes that run. The methods of the run never raise, except `TrackedRun.latest`.
    """
    mine = _detected_ranks()
    if not mine.first:
        return _NullTrackedRun()
    # A wrong config must fail before anything is on the disk.
    params = {**params_of(config), **_goal_params(goal)}
    root = root_of(folder).absolute()
    uri = uris.resolve_tracking_uri(tracking_uri, os.environ, root)
    offline = is_offline(offline)
    if not offline:
        uris.prepare_store(uri)
    identity = Identity(
        name or new_name(experiment.replace("/", "-").replace(" ", "-")),
        secrets.token_hex(16),
        experiment,
        uri,
        uris.artifact_root(uri),
        project_dir=str(Path.cwd()),
    )
    opened = functools.partial(_open_log, root / "runs", identity, mine, offline=offline)
    settings = settings_without_secrets(params)
    named = name is not None
    return TrackedRun(opened, goal or Goal(), keep, settings, offline=offline, named=named)


def _goal_params(goal: Goal | None) -> dict[str, str]:
    return {} if goal is None else {f"goal.{k}": value for k, value in params_of(goal).items()}


def _open_log(runs: Path, identity: Identity, mine: ranks.Ranks, *, offline: bool) -> RunLog:
    folder = RunFolder.open_or_create(runs, identity)
    # As in a notebook, where a cell is run again. Two objects would write one journal.
    if folder.path in _open:
        _open[folder.path].finish()
    take_over(folder)
    return RunLog.open(runs, identity, mine, gpu_uuids=None, offline=offline)


class TrackedRun:
    """A run that is being tracked. Every method is safe on every rank, and in every thread.

    After its end, a method that logs begins a new attempt of the run.
    """

    def __init__(
        self,
        open_log: Callable[[], RunLog],
        goal: Goal,
        keep: int = 1,
        params: Mapping[str, str] | None = None,
        flush_rows: int = FLUSH_ROWS,
        *,
        offline: bool = False,
        named: bool = False,
    ) -> None:
        """`named`: whether MLflow may have a checkpoint of the run that this disk lacks."""
        self._open_log, self._offline = open_log, offline
        self._in_mlflow = named and not offline
        self._goal, self._keep, self._params = goal, keep, dict(params or {})
        self._flush_rows = flush_rows
        self._told: set[str] = set()
        self._refused_until = 0.0
        # A handler of a signal may log while its thread logs.
        self._lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        """Begin an attempt. Raises UserError if another process writes the run."""
        self._log = self._open_log()
        self._rows: list[tuple[Any, float, Mapping[str, Any]]] = []
        self._begun = self._flushed = time.monotonic()
        self._used = 0.0
        self._best: float | None = None
        self._best_step = self._step = 0
        self._newest: dict[str, _Value] = {}
        self._earlier: dict[str, int] = {}
        for event in read_all(self._log.folder.events):
            self._recall(event)
        self._floor = self._step
        self._evaluated: tuple[int, dict[str, float], float] = 0, {}, 0.0
        self._last: dict[str, float] = {}
        self._checkpoints: Any = None
        self.unless_ended: BaseException | None = None
        """The error to assume if the process ends and nobody has ended the attempt."""
        environment = provenance.record(self._log.folder.artifacts, sys.argv)
        environment[provenance.OWN_LOOP] = "true"
        self._log(RunStarted(time.time(), self._params, environment, self._log.attempt))
        _open[self._log.folder.path] = self
        self._at_exit = process_end.at_exit(
            lambda error: self.finish(error or self.unless_ended),
            lambda: self._used,
        )
        self._is_open = True

    def _recall(self, event: Event) -> None:
        """Take the newest steps, and the best value under this goal, from an earlier attempt."""
        if isinstance(event, StepsLogged):
            highest = dict.fromkeys(event.metrics, max(event.steps, default=0))
        elif isinstance(event, Evaluated):
            highest = dict.fromkeys(event.metrics, event.step)
            value = event.metrics.get(self._goal.metric)
            if value is not None and self._goal.better(value, self._best):
                self._best, self._best_step = value, event.step
        else:
            return
        for name, step in highest.items():
            self._earlier[name] = max(step, self._earlier.get(name, step))
            self._step = max(step, self._step)

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
            if self._log.folder.path in _open:
                raise UserError("a later call of track() continues it")
            self._begin()
        except Exception as error:  # tracking must not end a training
            text = f"what is logged after the end of {self.name} is lost: {error}"
            self._tell("reopen", text)
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

        None offline, on other ranks than 0, and after 20 seconds since the attempt began.
        """
        from rankzero.catalog.lookup import mlflow_id

        while not self._offline:
            found = mlflow_id(self._log.folder)
            if found is not None or time.monotonic() - self._begun > _ID_SECONDS:
                return found
            time.sleep(0.1)
        return None

    @property
    def url(self) -> str | None:
        """The run's page on MLflow's server; None without a server, or as for `id`."""
        folder, run_id = self._log.folder, self.id
        uri = folder.identity.tracking_uri
        if run_id is None or not uri.startswith("http"):
            return None
        experiment = delivery_state.load(delivery_state.path_of(folder, 0)).experiment_id
        return f"{url_without_secrets(uri)}/#/experiments/{experiment}/runs/{run_id}"

    @property
    def step(self) -> int:
        """The newest step so far; 0 on other ranks than 0."""
        with self._lock:
            if self._is_open:
                self._flush()
            return self._step

    def __enter__(self) -> TrackedRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(error)

    def finish(self, error: BaseException | None = None) -> None:
        """End the run: FINISHED; FAILED with the traceback of `error`, or KILLED by Ctrl-C."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._at_exit.cancel()
            _open.pop(self._log.folder.path, None)
            # The end must reach the journal, even if a failed GPU cannot give the last values.
            self._guarded("the values logged last are lost", self._flush)
            status, reason = _status(error)
            self._guarded(
                "the last checkpoint is not kept",
                lambda: self._close_checkpoints(finished=status == "FINISHED"),
            )
            if status == "FINISHED" and self._checkpoints and self._checkpoints.failure:
                status, reason = "FAILED", f"{reason}; {self._checkpoints.failure}"
            text = None
            if error is not None and status != "FINISHED":
                text = "".join(traceback.format_exception(error))
            best = {} if self._best is None else {"best": self._best}
            self._log(RunEnded(time.time(), status, reason, text, {**self._last, **best}))
            self._log.close(finished=status == "FINISHED")

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log 0-d tensors or numbers at `step`, without a host sync: tensors stay on their device.

        Any other value is logged as NaN, with one warning. Without a step that is an integer, the
        steps count on as soon as a metric would get a second value.
        """
        # The loop may overwrite a tensor in place before it is read.
        values = {str(name): snapshot(value) for name, value in metrics.items()}
        with self._lock:
            if not self.reopen():
                return
            at = step if step is None else snapshot(step)
            moment = time.time()
            self._rows.append((at, moment, values))
            if process_end.in_main_thread():
                self._used = moment
            due = time.monotonic() - self._flushed > FLUSH_SECONDS
            if due or len(self._rows) >= self._flush_rows:
                self._flush()

    log_metrics = log

    def evaluated(self, metrics: Mapping[str, Any], step: int | None = None) -> bool:
        """Log validation metrics. Return whether the goal's is the best so far.

        `step`: by default the newest one. Always False on other ranks than 0.
        """
        with self._lock:
            if not self.reopen():
                return False
            self._flush()
            _, better = self._log_evaluation(_as_floats(metrics), self._as_step(step, ()))
            return better

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
            self._flush()
            at = self._as_step(step, ())
            measured, better = self._log_evaluation(_as_floats(metrics or {}), at)
            self._guarded(
                f"the checkpoint of step {at} is not kept",
                lambda: self._log_all(self._writer().save(state_dict, at, measured, better)),
            )

    def log_params(self, params: object) -> None:
        """Add params at any time: anything that `track` takes as a config.

        MLflow never changes a param: a later value becomes a tag, ``rankzero.param.<name>``.
        """

        def event() -> Event:
            found = settings_without_secrets(params_of(params))
            self._params |= found
            return ParamsLogged(time.time(), found)

        self._keep_event("a param", event)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags. Those that begin with ``rankzero.`` are RankZero's own."""

        def event() -> Event:
            texts = {str(name): str(value) for name, value in tags.items()}
            own = [name for name in texts if name.startswith("rankzero.")]
            if own:
                raise ValueError(f"{own[0]} is RankZero's own")
            return TagsSet(time.time(), settings_without_secrets(texts))

        self._keep_event("a tag", event)

    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None) -> None:
        """Copy a file or folder to the run's artifacts, below the folder `artifact_path` there.

        Returns once it is copied, so the program may change or delete it.
        """
        path = Path(local_path)
        self._keep_event(
            str(path),
            lambda: logged_files.copy(self._log.folder, path, artifact_path, self._note),
        )

    def log_text(self, text: str, artifact_file: str) -> None:
        """Write a text as an artifact."""
        self._keep_file(artifact_file, lambda path: path.write_text(text, encoding="utf-8"))

    def log_dict(self, dictionary: Mapping[str, Any], artifact_file: str) -> None:
        """Write plain values as an artifact: as YAML if the file is called so, else as JSON."""
        self._keep_file(artifact_file, lambda path: logged_files.save_dict(dictionary, path))

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

        MLflow's page shows the images of a key by step. `step`: by default the newest one.
        """
        if artifact_file is not None:
            self._keep_file(artifact_file, lambda path: logged_files.save_image(image, path))
            return

        def event() -> Event:
            with self._lock:
                self._flush()
                at = self._as_step(step, ())
            return logged_files.keep_picture(self._log.folder, key or "image", image, at)

        self._keep_event("an image", event)

    def _keep_file(self, name: str, save: Callable[[Path], object]) -> None:
        self._keep_event(name, lambda: logged_files.write(self._log.folder, name, save))

    def _keep_event(self, what: str, make: Callable[[], Event]) -> None:
        """Log the event that `make` returns. If that fails, a note has the reason."""

        def keep() -> None:
            event = make()  # A copy takes long, and other threads log meanwhile.
            with self._lock:
                if self.reopen():
                    self._log(event)

        with self._lock:
            is_open = self.reopen()
        if is_open:
            process_end.went_on()
            self._guarded(f"{what} is not logged", keep)

    def latest(self) -> dict[str, Any] | None:
        """Return the state of the run's last checkpoint, on the CPU; None if it has none.

        Call it on every rank, once the process group is initialised: it is a collective. If this
        disk has no checkpoint of a run with a `name`, it takes the newest that MLflow has under
        that name. Raises UserError, on every rank, if MLflow does not answer.
        """
        from rankzero.integrations import last_checkpoint

        with self._lock:
            if self._is_open and self._checkpoints is not None:
                self._log_all(self._checkpoints.finish())
            found = last_checkpoint.load(
                self._log.folder, self._log.notice, in_mlflow=self._in_mlflow
            )
            if found is None:
                return None
            state, self._step = found
            self._floor = self._step
            return state

    def _writer(self) -> Any:
        # Imports torch, which a program without checkpoints may not even have.
        from rankzero.training.checkpoints.writer import Checkpoints, unlogged

        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                self._log.folder.path,
                self._keep,
                self._goal,
                notice=self._log.notice,
                flush_journal=self._log.flush,
                sync_journal=self._log.sync,
            )
            events = read_all(self._log.folder.events)
            self._log_all(unlogged(self._log.folder.path, events, self._keep, self._goal))
        return self._checkpoints

    def _close_checkpoints(self, *, finished: bool) -> None:
        if self._checkpoints is not None:
            patience_seconds = self._log.patience_seconds(finished=finished)
            self._log_all(self._checkpoints.close(patience_seconds))

    def _guarded(self, consequence: str, action: Callable[[], None]) -> None:
        """Run the action. If it fails, as with a failed GPU, log the consequence."""
        try:
            action()
        except Exception as error:  # Tracking must not end a training.
            self._note(f"{consequence}: {type(error).__name__}: {error}")

    def _note(self, text: str) -> None:
        with self._lock:
            self._log.notice(text)

    def _log_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._log(event)

    def _log_evaluation(
        self, metrics: Mapping[str, float], step: int
    ) -> tuple[dict[str, float], bool]:
        """Log what is new at this step. Return the metrics as logged, and if the goal's is best."""
        at, known, when = self._evaluated
        known = known if at == step else {}
        # A point that is sent twice with one time stays one point in MLflow.
        times = [
            self._newest[name].time
            for name in sorted(metrics, key=lambda name: name != self._goal.metric)
            if name in self._newest and self._newest[name].step == step
        ]
        when = when if known else next(iter(times), time.time())
        measured = {}
        for name, value in metrics.items():
            self._is_first(name, step, value, when)
            if self._newest[name].time == when:
                measured[name] = self._newest[name].value
        new = {name: value for name, value in measured.items() if name not in known}
        self._evaluated = step, {**known, **new}, when
        goal = new.get(self._goal.metric)
        better = goal is not None and self._goal.better(goal, self._best)
        if better:
            self._best, self._best_step = goal, step
        if new:
            self._last = self._evaluated[1]
            self._log(Evaluated(when, step, new, better))
        return measured, better or (self._goal.metric in known and step == self._best_step)

    def _flush(self) -> None:
        if self._is_open:  # Else the process may end now, with an error for all its runs.
            process_end.went_on()
        rows, self._rows, self._flushed = self._rows, [], time.monotonic()
        if self._checkpoints is not None:
            self._log_all(self._checkpoints.poll())
        self._warn_of_odd_values(rows)
        # All rows are read together: each read of a GPU waits until the GPU has caught up.
        values = [value for _, _, metrics in rows for value in metrics.values()]
        floats = iter(to_floats(values, self._log.notice))
        # Rows of the same metrics are one event, which costs half of what an event each does.
        events: dict[tuple[str, ...], tuple[list[int], list[float], dict[str, list[float]]]] = {}
        for step, moment, metrics in rows:
            row = {name: next(floats) for name in metrics}
            at = self._as_step(step, row)
            new = {n: v for n, v in row.items() if self._is_first(n, at, v, moment)}
            steps, times, columns = events.setdefault(tuple(new), ([], [], {n: [] for n in new}))
            steps.append(at)
            times.append(moment)
            for name, value in new.items():
                columns[name].append(value)
        for steps, times, columns in events.values():
            if columns:
                self._log(StepsLogged(steps, times, columns))
        self._log.flush()

    def _is_first(self, name: str, step: int, value: float, moment: float) -> bool:
        """Return whether it is the metric's first value at this step. Note values that differ.

        MLflow would keep both, and no reader would know which of them counts.
        """
        before = self._newest.get(name)
        if before is not None and step == before.step:
            if repr(value) != repr(before.value):
                self._tell(
                    f"{name} twice",
                    f"{name} was logged twice at step {step}: the first value counts",
                )
            return False
        if before is not None and step < before.step:
            self._tell(f"{name} back", f"the steps of {name} go back from {before.step} to {step}")
        if step <= self._earlier.get(name, step - 1):
            self._tell(
                f"attempt {self._log.attempt}",
                f"step {step} of {name} has a value of an earlier attempt, as after a resume: "
                "MLflow keeps the earlier values, and events.jsonl has both",
            )
        self._newest[name] = _Value(step, value, moment)
        return True

    def _tell(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._log.notice(text)

    def _as_step(self, step: Any, names: Iterable[str]) -> int:
        """Return the step as an int. Without one, the next at which the metrics have no value."""
        read = to_float(step)
        # MLflow stores steps in 64 bits.
        if read.is_integer() and abs(read) < 2**63:
            self._step = step if type(step) is int else int(read)
            return self._step
        if any(
            (name in self._earlier and self._floor == self._step)
            or (name in self._newest and self._newest[name].step == self._step)
            for name in names
        ):
            self._step += 1
        if step is not None:
            self._tell(
                "step", f"a step must be an integer, not {step!r:.80}: it counts as {self._step}"
            )
        return self._step

    def _warn_of_odd_values(self, rows: Iterable[tuple[Any, float, Mapping[str, Any]]]) -> None:
        for name, value in (item for _, _, metrics in rows for item in metrics.items()):
            # `snapshot` replaces a value that cannot be logged by a text that describes it.
            if isinstance(value, str):
                self._tell(
                    f"{name} odd",
                    f"{name} is not a number but {value!r}: it is logged as NaN; log its mean, for "
                    "instance",
                )


def _leave_to_parent() -> None:
    """End no run of the parent in a forked process, nor write its journal, nor wait for its lock.

    Values that are logged there are lost, with a note, while the parent's run is open.
    """
    for run in _open.values():
        run.disown()
    _open.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class _NullTrackedRun(TrackedRun):
    """The run on every other rank than 0: all methods but `latest` do nothing, at no cost."""

    name = folder = id = url = None
    step = 0

    def __init__(self) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    finish = log = log_metrics = checkpoint = log_params = set_tags = _nothing
    log_artifact = log_text = log_dict = log_figure = log_image = _nothing

    def reopen(self) -> bool:
        return False

    def evaluated(self, *_: Any, **__: Any) -> bool:
        return False

    def latest(self) -> dict[str, Any] | None:
        from rankzero.integrations import last_checkpoint

        found = last_checkpoint.load(None, print)
        return None if found is None else found[0]


def _as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): to_float(value) for name, value in metrics.items()}


def _detected_ranks() -> ranks.Ranks:
    launched = ranks.detect()
    # A program that has not imported torch has no process group. Importing it here costs seconds.
    if "torch.distributed" not in sys.modules:
        return launched
    from rankzero.training.distributed.world import process_group_ranks

    group = process_group_ranks()
    if group is None or (group.rank, group.world_size) == (launched.rank, launched.world_size):
        return launched  # The launcher's variables also know the node.
    # A process that spawns its ranks itself is one task to its launcher, so the group knows better.
    return group


def _status(error: BaseException | None) -> tuple[Status, str]:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "FINISHED", "finished"
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", "stopped by Ctrl-C"
    if isinstance(error, SystemExit):
        return "FAILED", f"exited with {error.code}"
    try:
        text = str(error)
    except Exception:  # A user's type may raise anything.
        text = "without a text"
    return "FAILED", f"{type(error).__name__}: {text}"
