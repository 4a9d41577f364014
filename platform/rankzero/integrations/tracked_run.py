"""`rankzero.track`: the same tracking for a training loop of your own, or another framework's.

    with rankzero.track("my-experiment", config) as run:  # on every rank; only rank 0 writes
        run.log({"loss": loss}, step=i)  # a tensor stays on its device
        run.checkpoint(state_dict, step=i, metrics={"val/loss": v})

Imports no torch until `checkpoint` is called.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rankzero import ranks
from rankzero.config import ConfigError, dotted
from rankzero.config.values import render
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, Status, StepsLogged
from rankzero.experiment import Goal
from rankzero.integrations.values import snapshot, to_float, to_floats
from rankzero.mlflow_store import uris
from rankzero.redaction.text import settings_without_secrets
from rankzero.run_store import provenance
from rankzero.run_store.attempt import take_over
from rankzero.run_store.folder import Identity, RunFolder, new_name
from rankzero.run_store.journal import read_all
from rankzero.run_store.location import is_offline, root_of
from rankzero.tracking.run_log import RunLog

# Values wait on their device until then. A reader sees a new step after two seconds at most.
FLUSH_SECONDS = 2.0
FLUSH_ROWS = 500


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
    """Return a run to enter with ``with``. Call it on every rank; only rank 0 writes.

    `config`: a mapping (nested or not) or a dataclass; it becomes the run's params.
    `name`: the run's name; an existing run is continued.
    `keep`: the best checkpoints that are kept, in addition to the last.
    `folder`: that of the embedded store and of the runs (default: $RANKZERO_DIR or ./mlruns).
    `offline`: only record; ``rankzero sync NAME`` delivers later (default: $RANKZERO_OFFLINE).

    An initialised process group of torch.distributed determines the rank, otherwise the launcher's
    environment variables do. So under ``torch.multiprocessing.spawn``, initialise the group first.
    Other launchers must set RANK and WORLD_SIZE.

    Raises TrackingError if the store cannot be used, and UserError if another process writes that
    run. Inside the block, tracking never raises.
    """
    mine = _detected_ranks()
    if not mine.first:
        return _NullTrackedRun()
    # A wrong config must fail before anything is on the disk.
    params = params_of(config)
    if goal is not None:
        params |= {f"goal.{key}": value for key, value in params_of(goal).items()}
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
    take_over(RunFolder.open_or_create(root / "runs", identity))
    log = RunLog.open(root / "runs", identity, mine, gpu_uuids=None, offline=offline)
    return TrackedRun(log, goal or Goal(), keep, settings_without_secrets(params))


class TrackedRun:
    """A run that is being tracked. Every method is safe on every rank.

    Not thread-safe: use a run in one thread, or lock around its methods.
    """

    def __init__(
        self,
        log: RunLog,
        goal: Goal,
        keep: int = 1,
        params: Mapping[str, str] | None = None,
        flush_rows: int = FLUSH_ROWS,
    ) -> None:
        self._log, self._goal, self._keep, self._params = log, goal, keep, dict(params or {})
        self._rows: list[tuple[Any, float, Mapping[str, Any]]] = []
        self._flush_rows, self._flushed = flush_rows, time.monotonic()
        self._warned: set[str] = set()
        self._step, self._warned_of_step = 0, False
        self._best = self._best_so_far()
        self._last: dict[str, float] = {}
        self._checkpoints: Any = None

    def _best_so_far(self) -> float | None:
        """Return the goal metric's best value in the run's earlier attempts, under this goal."""
        best: float | None = None
        for event in read_all(self._log.folder.events):
            value = event.metrics.get(self._goal.metric) if isinstance(event, Evaluated) else None
            if value is not None and self._goal.better(value, best):
                best = value
        return best

    @property
    def name(self) -> str | None:
        """The run's name; None on other ranks than 0."""
        return self._log.folder.path.name

    @property
    def folder(self) -> Path | None:
        """The run's folder; None on other ranks than 0."""
        return self._log.folder.path

    def __enter__(self) -> TrackedRun:
        environment = provenance.record(self._log.folder.artifacts, sys.argv)
        self._log(RunStarted(time.time(), self._params, environment, self._log.attempt))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The end must reach the journal, even if a failed GPU cannot give the last values.
        self._guarded("the values logged last are lost", self._flush)
        status, reason = _status(error)
        self._guarded(
            "the last checkpoint is not kept",
            lambda: self._close_checkpoints(finished=status == "FINISHED"),
        )
        if status == "FINISHED" and self._checkpoints is not None and self._checkpoints.failure:
            status, reason = "FAILED", f"{reason}; {self._checkpoints.failure}"
        text = None if error is None else "".join(traceback.format_exception(error))
        best = {} if self._best is None else {"best": self._best}
        self._log(RunEnded(time.time(), status, reason, text, {**self._last, **best}))
        self._log.close(finished=status == "FINISHED")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log 0-d tensors or numbers at `step`, without a host sync: tensors stay on their device.

        Any other value is logged as NaN, with one warning. A step that is not an integer is
        replaced by the previous step.
        """
        # The loop may overwrite a tensor in place before it is read.
        values = {str(name): snapshot(value) for name, value in metrics.items()}
        self._rows.append((snapshot(step), time.time(), values))
        due = time.monotonic() - self._flushed > FLUSH_SECONDS
        if due or len(self._rows) >= self._flush_rows:
            self._flush()

    def evaluated(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Log validation metrics. Return whether the goal's is the best so far.

        Always False on other ranks than 0.
        """
        self._flush()
        return self._log_evaluation(_as_floats(metrics), self._as_step(step))

    def checkpoint(
        self, state_dict: Mapping[str, Any], step: int, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Keep `state_dict` (tensors and plain values) as a checkpoint. Return once it is copied.

        `metrics` are validation metrics. The goal's metric among them decides which checkpoints are
        kept.
        """
        self._flush()
        measured, at = _as_floats(metrics or {}), self._as_step(step)
        better = self._log_evaluation(measured, at)
        self._guarded(
            f"the checkpoint of step {at} is not kept",
            lambda: self._log_all(self._writer().save(state_dict, at, measured, better)),
        )

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
            self._log.notice(f"{consequence}: {type(error).__name__}: {error}")

    def _log_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self._log(event)

    def _log_evaluation(self, metrics: Mapping[str, float], step: int) -> bool:
        value = metrics.get(self._goal.metric)
        better = value is not None and self._goal.better(value, self._best)
        if better:
            self._best = value
        if metrics:
            self._last = dict(metrics)
            self._log(Evaluated(time.time(), step, dict(metrics), better))
        return better

    def _flush(self) -> None:
        rows, self._rows, self._flushed = self._rows, [], time.monotonic()
        if self._checkpoints is not None:
            self._log_all(self._checkpoints.poll())
        self._warn_of_odd_values(rows)
        # All rows are read together: each read of a GPU waits until the GPU has caught up.
        values = [value for _, _, metrics in rows for value in metrics.values()]
        floats = iter(to_floats(values, self._log.notice))
        for step, moment, metrics in rows:
            columns = {name: [next(floats)] for name in metrics}
            self._log(StepsLogged([self._as_step(step)], [moment], columns))
        self._log.flush()

    def _as_step(self, step: Any) -> int:
        """Return the step as an int, or the previous step with one warning."""
        read = to_float(step)
        # MLflow stores steps in 64 bits.
        if read.is_integer() and abs(read) < 2**63:
            self._step = step if type(step) is int else int(read)
        elif not self._warned_of_step:
            self._warned_of_step = True
            self._log.notice(
                f"a step must be an integer, not {step!r:.80}: it counts as step {self._step}"
            )
        return self._step

    def _warn_of_odd_values(self, rows: Iterable[tuple[Any, float, Mapping[str, Any]]]) -> None:
        for name, value in (item for _, _, metrics in rows for item in metrics.items()):
            # `snapshot` replaces a value that cannot be logged by a text that describes it.
            if isinstance(value, str) and name not in self._warned:
                self._warned.add(name)
                self._log.notice(
                    f"{name} is not a number but {value!r}: it is logged as NaN; log its mean, for "
                    "instance"
                )


class _NullTrackedRun(TrackedRun):
    """The run on every other rank than 0: all methods do nothing, at no cost."""

    name = folder = None

    def __init__(self) -> None: ...

    def __enter__(self) -> TrackedRun:
        return self

    def __exit__(self, *_: object) -> None: ...

    def log(self, *_: Any, **__: Any) -> None: ...

    def evaluated(self, *_: Any, **__: Any) -> bool:
        return False

    def checkpoint(self, *_: Any, **__: Any) -> None: ...


def params_of(config: object) -> dict[str, str]:
    """Return a config's settings as text: of a mapping (nested or not), a dataclass, or None."""
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if isinstance(config, Mapping):
        return {key: render(value) for key, value in dotted(config)}
    raise ConfigError(f"a config must be a mapping or a dataclass, got {type(config).__name__}")


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
    return "FAILED", f"{type(error).__name__}: {error}"
