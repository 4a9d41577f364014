"""``rankzero export RUN [--to FOLDER] [--format csv|parquet]``: a run as files that other programs read."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero.catalog import lookup
from rankzero.catalog.summary import read_summary
from rankzero.cli.commands import runs
from rankzero.errors import UserError
from rankzero.reporting import run_figures
from rankzero.reporting.run_facts import fold
from rankzero.reporting.run_page import page
from rankzero.reporting.run_report import for_terminal
from rankzero.run_store.folder import RunFolder

if TYPE_CHECKING:
    from pandas import DataFrame

FORMATS = ("csv", "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_name", metavar="RUN", help="the run's name or its MLflow run id")
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="where to (default: a folder called as the run)"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="csv", help="of the tables (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    folder = lookup.require(arguments.dir / "runs", arguments.run_name)
    check_format(arguments.format)
    target = arguments.to or Path(folder.path.name)
    try:
        (target / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to {target}: {error.strerror}; choose another folder with --to"
        ) from error
    for path in written(folder, target, arguments.format):
        print(path)
    return 0


def check_format(kind: str) -> None:
    """Raise UserError where the tables cannot be written in this format."""
    if kind == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("--format parquet needs pyarrow: pip install pyarrow, or take --format csv")


def written(folder: RunFolder, target: Path, kind: str) -> list[Path]:
    """Write everything; return the files."""
    from rankzero.reporting import metric_table

    metrics, facts = metric_table.metrics(folder), fold(folder.all_events())
    files = [
        _write(metrics, target / f"metrics.{kind}"),
        _write(metric_table.system(folder), target / f"system.{kind}"),
    ]
    files.append(target / "run.json")
    files[-1].write_text(json.dumps(described(folder), indent=2) + "\n", encoding="utf-8")
    files.append(target / "report.md")
    files[-1].write_text(for_terminal(page(folder)), encoding="utf-8")
    picture = target / "figures" / "learning_curves.png"
    if run_figures.write(picture, metrics, facts.goal.metric):
        files.append(picture)
    drawn = sorted(folder.artifacts.rglob("*.png"))
    return [*files, *(Path(shutil.copy2(path, target / "figures")) for path in drawn)]


def described(folder: RunFolder) -> dict[str, Any]:
    """Return the run's settings and results, as `rankzero runs --json` has them, and where it comes from."""
    one, facts = read_summary(folder), fold(folder.all_events())
    steps = [{"step": step, "best": best} for step, best in sorted(facts.checkpoints.items())]
    return {**runs.record(one), "environment": dict(facts.environment), "checkpoints": steps}


def _write(table: DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, index=False)
    return path
