"""A run that is the parent of others: a study's of its trials, a comparison's, a repeat's."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import RunFailed, UserError
from rankzero.events import RunEnded, RunStarted, Status, StepsLogged, TagsSet
from rankzero.experiment import Experiment
from rankzero.mlflow_store import limits
from rankzero.ranks import Ranks
from rankzero.redaction.text import blotted, rendered_without_secrets
from rankzero.reporting import markdown
from rankzero.run_store import provenance, run_locks
from rankzero.run_store.folder import Identity, write_atomically
from rankzero.scalars import shown
from rankzero.tracking.run_log import RunLog
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.probe.speed_knobs import Effect
from rankzero.tuning.trial import Trial, Trials
from rankzero.tuning.trials.follower import state_text

_RESULT_COLUMNS = ("trial", "state", "value", "seeds", "best", "samples_per_second")
SHOWN_COLUMNS = (*_RESULT_COLUMNS, "batch_size", "precision", "lr", "devices")
"""Columns for people: in the run's description, and in the terminal. `seeds`: the value is a mean
over so many."""
_COLUMNS = (
    *SHOWN_COLUMNS,
    "train_seconds",
    "memory_megabytes",
    "joules",
    "run",
    "reason",
)


class StudyRun:
    """A parent's run, open during a with block of `open`. Its result is its page in MLflow."""

    def __init__(self, log: RunLog, environment: Mapping[str, str]) -> None:
        self.log, self.folder, self.environment = log, log.folder, environment
        """`environment`: the tags of this run, and of its children."""
        self._status: Status = "FAILED"
        self._reason, self._summary = "ended without a verdict", dict[str, float]()
        self._logged, self._best = 0, math.inf

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        runs: Path,
        identity: Identity,
        reference: Experiment,
        argv: Sequence[str],
        *,
        offline: bool,
        tags: Mapping[str, str],
        options: Mapping[str, str] | None = None,
        again: str = "",
    ) -> Iterator[StudyRun]:
        """Open the run for a block. Its params are the reference's settings, and `options`.

        `tags`: the user's. Children have them, too, but without the note. `offline`: record the
        run only; `rankzero sync` delivers it. `again`: the command that continues it, if one does.
        """
        log = RunLog.open(runs, identity, Ranks(), gpu_uuids=(), offline=offline)
        claim = run_locks.latest(log.folder, 0)
        recorded = provenance.record(log.folder.artifacts, argv, identity.experiment_file)
        run = cls(log, recorded | provenance.tags_of_user(tags))
        tags = {**recorded, **tags, "rankzero.study": log.folder.path.name}
        params = rendered_without_secrets(reference)
        log(RunStarted(time.time(), {**params, **(options or {})}, tags, log.attempt))
        try:
            yield run
        except KeyboardInterrupt as stop:
            # KILLED, and not FAILED: the user stopped it, and nothing is wrong.
            resumes = f"; `{again}` resumes it" if again else ""
            run._status, run._reason = "KILLED", f"stopped by {str(stop) or 'Ctrl-C'}{resumes}"
            raise
        except BaseException as error:
            kind = "" if isinstance(error, UserError | RunFailed) else f"{type(error).__name__}: "
            run._status, run._reason = "FAILED", f"{kind}{error}"
            raise
        finally:
            # Another process may have begun an attempt in this folder, and the end is not its own.
            # None: a disk that fails for a moment. This process's claim may still be there.
            if run_locks.latest(log.folder, 0) in (claim, None):
                log(RunEnded(time.time(), run._status, run._reason, None, run._summary))
            log.close(finished=run._status == "FINISHED")

    def log_trials(self, trials: Trials) -> None:
        """Log the trials that ended since the last call. The step is a trial's number.

        A trial that runs holds back those after it: a resumed run has no points at earlier steps.
        """
        ended = min(trials.open, default=len(trials))
        for number in range(self._logged, ended):
            trial, facts = trials[number], trials[number].facts
            # Later trials may have ended already.
            self._best = min(self._best, trial.rank if trial.feasible else math.inf)
            metrics = {
                "search/value": trial.value if trial.feasible else None,
                "search/best_value": self._best if math.isfinite(self._best) else None,
                "search/quality": facts.get("best"),
                "search/samples_per_second": facts.get("samples_per_second"),
            }
            self.log_metrics(number, metrics)
        self._logged = max(self._logged, ended)

    def finish(
        self, reason: str, summary: Mapping[str, float | None], status: Status = "FINISHED"
    ) -> None:
        """Let the run end with this status, `reason`, and what is known of the `summary`."""
        self._status, self._reason, self._summary = status, reason, _known(summary)

    def log_metrics(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log what is known of the metrics into the run's curves."""
        columns = {name: [value] for name, value in _known(metrics).items()}
        self.log(StepsLogged([step], [time.time()], columns))
        # The journal is buffered, and the next child may end minutes later.
        self.log.flush()

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Log a notice if the block fails: a figure must not cost the result."""
        try:
            yield
        except Exception as error:
            self.log.notice(f"the figures could not be drawn: {error!r}")

    def write(self, name: str, text: str) -> None:
        """Write an artifact."""
        self.folder.artifacts.mkdir(exist_ok=True)
        write_atomically(self.folder.artifacts / name, _in_utf8(text))

    def write_table(self, name: str, columns: Sequence[str], rows: Sequence[list[Any]]) -> None:
        """Write a table in the form that MLflow's artifact viewer shows as one."""
        # JSON has no NaN, and MLflow's viewer would show no table.
        data = [
            [None if isinstance(one, float) and not math.isfinite(one) else one for one in row]
            for row in rows
        ]
        self.write(name, json.dumps({"columns": columns, "data": data}))
        tables = sorted(self.folder.artifacts.glob("*.json"))
        listed = json.dumps([{"path": one.name, "type": "table"} for one in tables])
        self.log(TagsSet(time.time(), {limits.TABLES_TAG: listed}))

    def write_description(self, markdown: str) -> None:
        """Set the run's description in MLflow, in the place of the usual report."""
        write_atomically(self.folder.description, _in_utf8(markdown))

    def write_trials(self, trials: Sequence[Trial]) -> None:
        """Write the trials as tables: for MLflow's artifact viewer, and for spreadsheets."""
        own = own_settings(trials)
        rows = [[*_row_of(trial).values(), *map(trial.own.get, own)] for trial in trials]
        self.write_table("trials.json", [*_COLUMNS, *own.values()], rows)
        table = io.StringIO()
        csv.writer(table).writerows([[*_COLUMNS, *own.values()], *rows])
        self.write("trials.csv", table.getvalue())

    def write_sweet_spot(self, experiment: Experiment, verdict: str, command: str) -> None:
        """Write what the command trains, without secrets, or remove it without a command."""
        # An earlier session may have found one, with other challengers.
        (self.folder.artifacts / "sweet_spot.yaml").unlink(missing_ok=True)
        if command:
            settings = config.to_yaml(experiment, instead=blotted(experiment))
            self.write("sweet_spot.yaml", f"# {verdict}\n# Use it: {command}\n{settings}")

    def write_probe(self, measured: Sequence[ProbeResult], effects: Sequence[Effect]) -> None:
        """Write the probe map as a table, and the effects of knobs if there are any."""
        cells = [{**dataclasses.asdict(one), "bound": one.bound} for one in measured]
        knobs = [{"value": one.name, **dataclasses.asdict(one)} for one in effects]
        for name, rows in (("probe_map.json", cells), ("knobs.json", knobs)):
            if rows:
                self.write_table(name, list(rows[0]), [list(row.values()) for row in rows])


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}


def _row_of(trial: Trial) -> dict[str, Any]:
    """Return a trial's row of the table of trials, by column."""
    # The sampler's value of a miss has a penalty, and is no measurement.
    value, state = trial.value if trial.feasible else None, state_text(trial)
    known = {"trial": trial.number, "state": state, "value": value, **trial.facts}
    return {column: known.get(column) for column in _COLUMNS}


def own_settings(trials: Sequence[Trial]) -> dict[str, str]:
    """Return all settings in the trials' `own`, by name: the heads of further columns."""
    names = (name for trial in trials for name in trial.own)
    # As in the terminal, which has short heads.
    taken = (*_COLUMNS, "batch")
    return {name: f"setting {name}" if name in taken else name for name in names}


def texts_of(trial: Trial, own: Iterable[str] = ()) -> list[str]:
    """Return a trial's values of `SHOWN_COLUMNS`, and of its `own` settings, as text."""
    row = _row_of(trial)
    values = [*(row[column] for column in SHOWN_COLUMNS), *map(trial.own.get, own)]
    texts = [shown(one) if isinstance(one, float) else str(one) for one in values]
    return ["" if one is None else text for one, text in zip(values, texts, strict=True)]


def trials_markdown(trials: Sequence[Trial]) -> str:
    """Return the trials as a Markdown table, the best first. Those that missed the bar follow."""
    own = own_settings(trials)
    head = [name.replace("_per_second", "/s").replace("_", " ") for name in SHOWN_COLUMNS]
    ranked = sorted(
        trials, key=lambda one: (one.value is None, not one.feasible, one.rank, one.number)
    )
    return texts_markdown([*head, *own.values()], [texts_of(one, own) for one in ranked])


def texts_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of texts as a Markdown table, or nothing without rows."""
    cells = [[*map(markdown.inline, row)] for row in rows]
    return f"{markdown.table(columns, cells)}\n\n" if rows else ""


def _in_utf8(text: str) -> str:
    # A reason may name a file whose name is no UTF-8.
    return text.encode(errors="backslashreplace").decode()
