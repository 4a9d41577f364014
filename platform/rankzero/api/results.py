"""``rankzero.runs()``, ``run(name)`` and ``comparison(a, b)``: the runs on this disk."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rankzero.catalog import filters as selection
from rankzero.catalog import lookup
from rankzero.catalog.summary import Summary, read_summary
from rankzero.mlflow_store import named_runs
from rankzero.reporting import html_page, html_report, metric_table, run_facts, run_report
from rankzero.reporting.comparison import RunSide, sections, sides_of
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.location import root_of
from rankzero.scalars import numbers, shown

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

    from rankzero.experiment import Experiment

# Params and metrics have a column each, and the folder is for programs.
_COLUMNS = [name for name in Summary._fields if name not in ("path", "details")]

_WORDS = {"true": True, "false": False, "none": None}
_NUMBER = re.compile(r"-?(\d+(\.\d*)?(e[-+]?\d+)?|inf|nan)")


def runs(
    *filters: str, sort: str | None = None, all: bool = False, dir: str | Path | None = None
) -> DataFrame:
    """Return the runs, one row each, newest first.

    Columns of params are called ``params.lr``, of metrics ``metrics.val/loss``, of tags
    ``tags.team``. `filters`, `sort`
    and `all` are as in ``rankzero runs``: ``runs("val/accuracy>0.9", sort="-samples/s")``.
    Raises UserError for a key that no run has.
    """
    import pandas

    conditions = [selection.parse(text) for text in filters]
    listed = lookup.listed(root_of(dir) / "runs")
    among = selection.candidates(listed, conditions, everything=all)
    found = selection.select(among, conditions, sort)
    rows = [
        {name: getattr(run, name) for name in _COLUMNS}
        | {f"params.{key}": value for key, value in run.params.items()}
        | {f"metrics.{key}": value for key, value in run.metrics.items()}
        | {f"tags.{key}": value for key, value in run.tags.items()}
        for run in found
    ]
    # Without runs, a table with columns: a notebook's next lines need them.
    table = pandas.DataFrame.from_records(rows, columns=None if found else _COLUMNS)
    # Params are text in the journal. Plots and filters need numbers, where all of it is numbers.
    for name in table.columns:
        if name.startswith("params."):
            with contextlib.suppress(ValueError, TypeError):
                table[name] = pandas.to_numeric(table[name])
    table["started"] = pandas.to_datetime(table["started"], unit="s", utc=True)
    return table


def run(name: str, *, dir: str | Path | None = None) -> Run:
    """Return the run with this name or MLflow run id.

    Raises UserError, naming the newest runs, if there is none.
    """
    return Run(named_runs.require(root_of(dir) / "runs", name))


def comparison(*names: str, dir: str | Path | None = None) -> Comparison:
    """Return what differs between the runs with these names or MLflow run ids.

    Raises UserError if there is no such run.
    """
    runs = root_of(dir) / "runs"
    return Comparison(sides_of([named_runs.require(runs, name) for name in names]))


def _value(text: str) -> str | float | bool | None:
    if text in _WORDS or not _NUMBER.fullmatch(text):
        return _WORDS.get(text, text)
    return int(text) if text.lstrip("-").isdecimal() else float(text)


class Checkpoint(NamedTuple):
    """A checkpoint on this disk."""

    step: int
    best: bool
    path: Path


class Run:
    """A run as its folder was when this object was made: settings, metrics, the end."""

    def __init__(self, folder: RunFolder, *, is_own: bool = False) -> None:
        """`is_own`: this program began it, with the code that it has in memory."""
        self._is_own = is_own
        # A notebook may change its folder.
        folder = RunFolder(folder.path.absolute())
        self.folder = folder.path
        self._folder, self._facts = folder, run_facts.facts_of(folder)

    @property
    def name(self) -> str:
        return self._folder.identity.name

    @property
    def status(self) -> str:
        """FINISHED, FAILED, KILLED, RUNNING, or DIED if its end was not recorded."""
        # Read again: a run that trained when this object was made may have ended.
        return read_summary(self._folder).status

    @property
    def reason(self) -> str:
        """Why it ended; empty while it runs."""
        return self._facts.end.reason if self._facts.end else ""

    @property
    def params(self) -> Mapping[str, str | float | bool | None]:
        """The settings. A value is a number, true, false or none if it reads as one, else text."""
        return {key: _value(text) for key, text in self._facts.params.items()}

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest value of each metric."""
        return dict(self._facts.metrics)

    @property
    def summary(self) -> Mapping[str, float]:
        """The figures of the whole run; empty before its end.

        A training has ``samples_per_second`` and others. A search has ``gain``, ``gain_low`` and
        ``gain_high``: the speed-up and the ends of its 95 % interval.
        """
        end = self._facts.end
        figures = numbers(end.metrics if end else {}).items()
        return {name: value for name, value in figures if "/" not in name}

    @property
    def best(self) -> float | None:
        """The best value of the goal's metric; of a repeat, its mean."""
        return self._facts.result

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that are on this disk now, by step."""
        found = checkpoint_files.known(self._folder.checkpoints)
        best = next(iter(checkpoint_files.best_first(found, self._facts.goal)), None)
        return [Checkpoint(saved.step, path == best, path) for path, saved in found.items()]

    @property
    def report(self) -> str:
        """The report, in Markdown."""
        return run_report.page(self._folder)

    def history(self, *names: str) -> DataFrame:
        """Return the metrics by step; with `names`, only these, and no rows without a value."""
        return metric_table.metrics(self._folder, names)

    def system(self) -> DataFrame:
        """Return the samples of GPUs and host, by time."""
        return metric_table.system(self._folder)

    def experiment(self) -> Experiment:
        """Return the experiment with the run's settings, from its file.

        If this program has imported the file, its class is as at that time. Raises UserError if the
        file was edited since. The run that `rankzero.train` returned is of the code before an edit.
        """
        # Imported here, because it imports PyTorch. The tables above need none.
        from rankzero.training.checkpoints.best_model import experiment_of

        return experiment_of(self._folder, is_own=self._is_own)

    def model(self) -> nn.Module:
        """Return the model with the best checkpoint's weights, on the CPU, in evaluation mode.

        Raises UserError if there is no checkpoint, or none that fits the model any more.
        """
        from rankzero.training.checkpoints.best_model import load_best

        return load_best(self._folder, is_own=self._is_own)

    def load_checkpoint(self, step: int | None = None) -> dict[str, Any]:
        """Return the state in the best checkpoint, or in that of `step`, on the CPU.

        ``["model"]`` are the weights; in a run of `rankzero.track`, the state is what was saved.
        Raises UserError if there is no such checkpoint, or a damaged one.
        """
        from rankzero.training.checkpoints.best_model import load_state

        return load_state(self._folder, self._facts.goal, step)

    def __repr__(self) -> str:
        best = "" if self.best is None else f", {self._facts.goal.metric} {shown(self.best)}"
        return f"<run {self.name}: {self.status}{best}>"

    def _repr_html_(self) -> str:
        return html_page.from_markdown(self.report)


class Comparison:
    """The differences between runs: results, speed, settings, code, packages, machine."""

    def __init__(self, sides: Sequence[RunSide]) -> None:
        self._sides = sides

    @property
    def table(self) -> DataFrame:
        """The differences, one row each, with the values as ``rankzero report`` prints them."""
        import pandas

        found = sections(self._sides).items()
        rows = [(kind, row.key, *row.values) for kind, rows in found for row in rows]
        names = (side.name for side in self._sides)
        return pandas.DataFrame.from_records(rows, columns=["kind", "key", *names])

    def __repr__(self) -> str:
        return f"<comparison of {', '.join(side.name for side in self._sides)}>"

    def _repr_html_(self) -> str:
        return html_report.differences(self._sides)
