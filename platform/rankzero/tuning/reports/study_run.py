"""The study's own run: the parent of its trials, with the verdict as its description and the evidence as artifacts."""

from __future__ import annotations

import csv
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
from rankzero.tuning.trial import Trial

SWEET_SPOT, TRIALS = "sweet_spot.yaml", "trials"
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


class Record:
    """The study's run, open for the duration of a with block."""

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
        self.folder = self._log.folder
        self.environment = self._where_from(argv)
        self._params = params
        self._status: Status = "FAILED"
        self._reason, self._summary = "ended without a verdict", dict[str, float]()

    def __enter__(self) -> Record:
        tags = {**self.environment, "rankzero.study": self.folder.path.name}
        self._log(RunStarted(time.time(), self._params, tags, self._log.attempt))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._status, self._reason = "KILLED", "stopped by Ctrl-C; the same command goes on"
        elif error is not None:
            self._status, self._reason = "FAILED", f"{type(error).__name__}: {error}"
        self._log(RunEnded(time.time(), self._status, self._reason, None, self._summary))
        self._log.close()

    def trial(self, trial: Trial, best: float | None) -> None:
        """Draw a trial into the study's curves; the step is its number."""
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
        self._log.flush()

    def finished(self, reason: str, summary: Mapping[str, float]) -> None:
        """Say how it ends: with `reason`."""
        self._status, self._reason, self._summary = "FINISHED", reason, dict(summary)

    def notice(self, text: str) -> None:
        """Say something that people should see."""
        self._log.notice(text)

    def write(self, name: str, text: str) -> None:
        """Write an artifact."""
        self.folder.artifacts.mkdir(exist_ok=True)
        write_atomically(self.folder.artifacts / name, text)

    def write_description(self, markdown: str) -> None:
        """Set what the run's page says instead of the usual report."""
        write_atomically(self.folder.description, markdown)

    def write_trials(self, trials: Sequence[Trial]) -> None:
        """Write the trials as a table, for spreadsheets and for MLflow's artifact viewer."""
        rows = [row_of(trial) for trial in trials]
        self.write(f"{TRIALS}.json", json.dumps({"columns": list(COLUMNS), "data": rows}))
        table = io.StringIO()
        csv.writer(table).writerows([COLUMNS, *rows])
        self.write(f"{TRIALS}.csv", table.getvalue())

    def _where_from(self, argv: Sequence[str]) -> dict[str, str]:
        found = provenance.collect(Path.cwd(), argv, os.environ)
        provenance.write_artifacts(found, self.folder.artifacts)
        experiment = os.path.relpath(self.folder.identity.experiment_file or "", Path.cwd())
        return {**provenance.environment(found), "rankzero.experiment_file": experiment}


def row_of(trial: Trial) -> list[Any]:
    known = {"trial": trial.number, "state": trial.state, "value": trial.value, **trial.facts}
    return [known.get(column) for column in COLUMNS]


def sweet_spot_yaml(experiment: Experiment, says: str, command: str) -> str:
    """Return the configuration that a search hands out, less what looks secret, with its evidence as comments."""
    head = [f"# {line}" for line in (says, f"Use it: {command}")]
    return "\n".join(
        [*head, config.to_yaml(experiment, instead=blotted(config.rendered(experiment)))]
    )
