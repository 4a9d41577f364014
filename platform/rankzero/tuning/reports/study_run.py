"""The study's own run, the parent of its trials. The verdict is its description in MLflow."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rankzero import config
from rankzero.events import RunEnded, RunStarted, Status, StepsLogged
from rankzero.experiment import Experiment
from rankzero.ranks import Ranks
from rankzero.redaction.text import blotted
from rankzero.run_store import provenance
from rankzero.run_store.folder import Identity, write_atomically
from rankzero.tracking.run_log import RunLog
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.trial import Trial

COLUMNS = (
    "trial",
    "state",
    "value",
    "best",
    "samples_per_second",
    "batch_size",
    "precision",
    "lr",
    "train_seconds",
    "memory_megabytes",
    "joules",
    "run",
    "reason",
)
_SHOWN_COLUMNS = 8  # in the run's description


class StudyRun:
    """The study's run, open during a with block.

    `offline`: record it only; `rankzero sync` delivers it later.
    """

    def __init__(
        self,
        runs: Path,
        identity: Identity,
        params: Mapping[str, str],
        argv: Sequence[str],
        *,
        offline: bool = False,
    ) -> None:
        self._log = RunLog.open(runs, identity, Ranks(), gpu_uuids=(), offline=offline)
        self.folder, self._params = self._log.folder, params
        found = provenance.collect(Path.cwd(), argv, os.environ)
        provenance.write_artifacts(found, self.folder.artifacts)
        file = os.path.relpath(identity.experiment_file or "", Path.cwd())
        self.environment = {**provenance.environment(found), "rankzero.experiment_file": file}
        """The tags of this run, and of its children."""
        self._status: Status = "FAILED"
        self._reason, self._summary = "ended without a verdict", dict[str, float]()

    def __enter__(self) -> StudyRun:
        tags = {**self.environment, "rankzero.study": self.folder.path.name}
        self._log(RunStarted(time.time(), self._params, tags, self._log.attempt))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # KILLED, and not FAILED: the user stopped it, and nothing is wrong.
        if isinstance(error, KeyboardInterrupt):
            self._status, self._reason = "KILLED", "stopped by Ctrl-C; the same command resumes it"
        elif error is not None:
            self._status, self._reason = "FAILED", f"{type(error).__name__}: {error}"
        self._log(RunEnded(time.time(), self._status, self._reason, None, self._summary))
        self._log.close()

    def log_trial(self, trial: Trial, best: float | None) -> None:
        """Log a trial into the study's curves. The step is the trial's number."""
        known = {
            "value": trial.value,
            "best_value": best,
            "quality": trial.facts.get("best"),
            "samples_per_second": trial.facts.get("samples_per_second"),
        }
        metrics = {
            f"search/{name}": [float(value)] for name, value in known.items() if value is not None
        }
        self._log(StepsLogged([trial.number], [time.time()], metrics))
        # The journal is buffered, and the next trial may end minutes later.
        self._log.flush()

    def finish(self, reason: str, summary: Mapping[str, float]) -> None:
        """Let the run end as FINISHED, with `reason`."""
        self._status, self._reason, self._summary = "FINISHED", reason, dict(summary)

    def notice(self, text: str) -> None:
        """Log a message for people."""
        self._log.notice(text)

    def write(self, name: str, text: str) -> None:
        """Write an artifact."""
        self.folder.artifacts.mkdir(exist_ok=True)
        write_atomically(self.folder.artifacts / name, text)

    def write_description(self, markdown: str) -> None:
        """Set the run's description in MLflow, in the place of the usual report."""
        write_atomically(self.folder.description, markdown)

    def write_trials(self, trials: Sequence[Trial]) -> None:
        """Write the trials as tables: for MLflow's artifact viewer, and for spreadsheets."""
        rows = [row_of(trial) for trial in trials]
        self.write("trials.json", json.dumps({"columns": list(COLUMNS), "data": rows}))
        table = io.StringIO()
        csv.writer(table).writerows([COLUMNS, *rows])
        self.write("trials.csv", table.getvalue())

    def write_probe_map(self, measured: Sequence[ProbeResult]) -> None:
        """Write the probe map as a table for MLflow's artifact viewer."""
        rows = [{**dataclasses.asdict(one), "bound": one.bound} for one in measured]
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self.write("probe_map.json", json.dumps(table))

    def write_sweet_spot(self, experiment: Experiment, verdict: str, command: str) -> None:
        """Write ``sweet_spot.yaml``, for ``rankzero train --from``."""
        self.write("sweet_spot.yaml", sweet_spot_yaml(experiment, verdict, command))


def row_of(trial: Trial) -> list[Any]:
    """Return a trial's row of a table with `COLUMNS`."""
    known = {"trial": trial.number, "state": trial.state, "value": trial.value, **trial.facts}
    return [known.get(column) for column in COLUMNS]


def trials_markdown(trials: Sequence[Trial]) -> str:
    """Return the trials as a Markdown table, the best first."""
    head = [
        f"{name.replace('_per_second', '/s').replace('_', ' ')}&emsp;"
        for name in COLUMNS[:_SHOWN_COLUMNS]
    ]
    ranked = sorted(trials, key=lambda trial: (trial.value is None, trial.rank, trial.number))
    rows = [[_cell(value) for value in row_of(trial)[:_SHOWN_COLUMNS]] for trial in ranked]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sweet_spot_yaml(experiment: Experiment, verdict: str, command: str) -> str:
    """Return a configuration as YAML, without secrets, with its evidence as comments."""
    settings = config.to_yaml(experiment, instead=blotted(config.rendered(experiment)))
    return f"# {verdict}\n# Use it: {command}\n{settings}"


def _cell(value: Any) -> str:
    """Return a value as text. MLflow sets a table's columns without a gap, so add one."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}&emsp;" if abs(value) >= 1000 else f"{value:.4g}&emsp;"
    return f"{value}&emsp;"
