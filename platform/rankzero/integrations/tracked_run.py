"""The same tracking for people who keep their own loop: plain DDP, Lightning, Accelerate, DeepSpeed, Horovod, Keras.

    with rankzero.track("my-experiment", config) as run:      # safe on every rank: only rank 0 writes
        run.log({"loss": loss}, step=i)                        # tensors are fine; no sync until the report
        run.checkpoint(state_dict, step=i, metrics={"val/loss": v})

Imports no torch: `checkpoint` does, when it is called.
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

from rankzero import config as configs
from rankzero import ranks
from rankzero.catalog import lookup
from rankzero.config.values import render
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, Status, StepsLogged
from rankzero.experiment import Goal
from rankzero.integrations.values import kept, number, numbers, whole
from rankzero.mlflow_store import uris
from rankzero.redaction.text import settings_without_secrets
from rankzero.run_store import provenance
from rankzero.run_store.attempt import take_over
from rankzero.run_store.folder import Identity, RunFolder, new_name
from rankzero.run_store.location import is_offline, root_of
from rankzero.tracking.run_log import RunLog

FLUSH_SECONDS = 2.0
FLUSH_ROWS = 500
Row = tuple[Any, float, Mapping[str, Any]]


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
    """Return a run to enter with ``with``; inside it, log from wherever you like.

    `config` is a mapping (may be nested) or a dataclass; it becomes the run's params. Call it on
    every rank: rank 0 writes, on other ranks nothing happens. An existing `name` is gone on with.
    Who is rank 0 says the process group of torch.distributed, where it has been joined, else the launcher's
    environment: under ``torch.multiprocessing.spawn``, join it before. Other ways must set RANK and WORLD_SIZE.
    `offline`: only record the run; ``rankzero sync NAME`` delivers it to MLflow later (default: $RANKZERO_OFFLINE).
    Raises TrackingError where the store cannot be used, UserError where another process writes that run; once the
    block is entered, tracking cannot raise.
    """
    mine = _mine()
    if not mine.first:
        return TrackedRun(None, goal or Goal(), keep)
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
    wanted = (
        {} if goal is None else {f"goal.{key}": value for key, value in params_of(goal).items()}
    )
    return TrackedRun(
        log, goal or Goal(), keep, settings_without_secrets({**params_of(config), **wanted})
    )


class TrackedRun:
    """A run that is being tracked. Every method is safe on every rank."""

    def __init__(
        self, log: RunLog | None, goal: Goal, keep: int, params: Mapping[str, str] | None = None
    ) -> None:
        self._log, self._goal, self._keep, self._params = log, goal, keep, dict(params or {})
        self._rows: list[Row] = []
        self._told: set[str | None] = set()
        self._step = 0
        self._flushed = time.monotonic()
        self._best = None if log is None else lookup.best_so_far(log.folder, goal)
        self._last: dict[str, float] = {}
        self._checkpoints: Any = None

    @property
    def name(self) -> str | None:
        """The run's name; None on other ranks than 0."""
        return self._log.folder.path.name if self._log else None

    @property
    def folder(self) -> Path | None:
        """The run's folder; None on other ranks than 0."""
        return self._log.folder.path if self._log else None

    def __enter__(self) -> TrackedRun:
        if self._log is not None:
            found = provenance.collect(Path.cwd(), sys.argv, os.environ)
            provenance.write_artifacts(found, self._log.folder.artifacts)
            environment = provenance.environment(found)
            self._log(RunStarted(time.time(), self._params, environment, self._log.attempt))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._log is None:
            return
        self._guarded("what was logged last is lost", self._flush)
        self._guarded("the last checkpoint is not kept", self._close_checkpoints)
        status, reason = _status(error)
        text = None if error is None else "".join(traceback.format_exception(error))
        best = {} if self._best is None else {"best": self._best}
        self._log(RunEnded(time.time(), status, reason, text, {**self._last, **best}))
        self._log.close()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log 0-d tensors or numbers at `step`. Tensors are copied on their device; no sync until the report.

        What is neither becomes NaN, and is told once. A step that is no whole number counts as the one before it.
        """
        if self._log is None:
            return
        values = {str(name): kept(value) for name, value in metrics.items()}
        self._rows.append((kept(step), time.time(), values))
        if len(self._rows) >= FLUSH_ROWS or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def evaluated(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Log validation metrics; return whether the goal's is the best so far (False on other ranks than 0)."""
        if self._log is None:
            return False
        self._flush()
        return self._evaluated(
            {str(name): number(value) for name, value in metrics.items()}, self._at(step)
        )

    def checkpoint(
        self, state_dict: Mapping[str, Any], step: int, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Keep `state_dict` (tensors and plain values) as the checkpoint of `step`; returns once it is copied.

        `metrics` are validation metrics; the goal's metric among them decides which checkpoints are kept.
        """
        if self._log is None:
            return
        self._flush()
        measured, at = (
            {str(name): number(value) for name, value in (metrics or {}).items()},
            self._at(step),
        )
        better = self._evaluated(measured, at)
        self._guarded(
            f"the checkpoint of step {at} is not kept",
            lambda: self._tell(self._store().save(state_dict, at, measured, better)),
        )

    def _close_checkpoints(self) -> None:
        if self._checkpoints is not None:
            self._tell(self._checkpoints.close())

    def _guarded(self, failed: str, action: Callable[[], None]) -> None:
        """Do it; where that fails, as it does on a GPU that has failed, say what has."""
        assert self._log is not None
        try:
            action()
        except Exception as error:
            self._log.notice(f"{failed}: {type(error).__name__}: {error}")

    def _tell(self, events: Iterable[Event]) -> None:
        """Log what became of checkpoints."""
        assert self._log is not None
        for event in events:
            self._log(event)

    def _store(self) -> Any:
        from rankzero.training.checkpoints.writer import Checkpoints

        if self._checkpoints is None:
            assert self._log is not None
            self._checkpoints = Checkpoints(
                self._log.folder.path, self._keep, self._goal, notice=self._log.notice
            )
        return self._checkpoints

    def _evaluated(self, metrics: Mapping[str, float], step: int) -> bool:
        assert self._log is not None
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
        assert self._log is not None
        if self._checkpoints is not None:
            self._tell(self._checkpoints.poll())
        self._tell_what_is_no_number(rows)
        found = iter(
            numbers(
                [value for _, _, metrics in rows for value in metrics.values()], self._log.notice
            )
        )
        for step, moment, metrics in rows:
            columns = {name: [next(found)] for name in metrics}
            self._log(StepsLogged([self._at(step)], [moment], columns))
        self._log.flush()

    def _at(self, step: Any) -> int:
        """Return the step as a whole number; of one that is none, the one before it, and tell so once."""
        found = whole(step)
        if found is not None:
            self._step = found
        elif None not in self._told:  # a metric may be called anything
            assert self._log is not None
            self._told.add(None)
            self._log.notice(
                f"a step must be a whole number, not {step!r:.80}: it counts as step {self._step}"
            )
        return self._step

    def _tell_what_is_no_number(self, rows: list[Row]) -> None:
        assert self._log is not None
        odd = {
            name: value
            for _, _, metrics in rows
            for name, value in metrics.items()
            if isinstance(value, str)
        }
        for name in sorted(odd.keys() - self._told):
            self._told.add(name)
            self._log.notice(
                f"{name} is no number but {odd[name]!r}: it is logged as NaN; log its mean, for instance"
            )


def _mine() -> ranks.Ranks:
    """Return which rank this is: as the launcher says, unless torch.distributed knows better."""
    said = ranks.detect()
    if "torch.distributed" not in sys.modules:
        return said
    from rankzero.training.distributed.world import process_group_ranks

    group = process_group_ranks()
    if group is None or (group.rank, group.world_size) == (said.rank, said.world_size):
        return said
    return group  # a process that spawns others is one task to its launcher


def params_of(config: object) -> dict[str, str]:
    """Return a config's settings as text: of a mapping (nested or not), a dataclass, or None."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return {key: render(value) for key, value in _dotted(config, "")}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {key: render(value) for key, value in _dotted(dataclasses.asdict(config), "")}
    raise configs.ConfigError(
        f"a config must be a mapping or a dataclass, got {type(config).__name__}"
    )


def _dotted(nested: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in nested.items():
        pairs += (
            _dotted(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else [(f"{prefix}{key}", value)]
        )
    return pairs


def _status(error: BaseException | None) -> tuple[Status, str]:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "FINISHED", "finished"
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return (
            ("KILLED", "stopped by Ctrl-C")
            if isinstance(error, KeyboardInterrupt)
            else ("FAILED", f"exited with {error.code}")
        )
    return "FAILED", f"{type(error).__name__}: {error}"
