"""``rankzero export RUN [--to FOLDER] [--format csv|parquet] [--bundle FILE]``: a run as files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

from rankzero.catalog.summary import read_summary
from rankzero.cli import options
from rankzero.cli.commands import runs
from rankzero.errors import UserError
from rankzero.mlflow_store import named_runs
from rankzero.reporting import learning_curves
from rankzero.reporting.run_facts import fold
from rankzero.reporting.run_report import page
from rankzero.run_store import symlinks
from rankzero.run_store.folder import EVENTS, RunFolder
from rankzero.run_store.location import may_be_foreign


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run(parser)
    target = "the target (default: a folder with the run's name)"
    parser.add_argument("--to", type=Path, metavar="FOLDER", help=target)
    whole = "instead, write the whole run into one file, for `rankzero import`"
    parser.add_argument("--bundle", type=Path, metavar="FILE", help=whole)
    kind = "the tables' format (default: %(default)s)"
    parser.add_argument("--format", choices=("csv", "parquet"), default="csv", help=kind)


def run(arguments: argparse.Namespace) -> int:
    folder = named_runs.require(arguments.dir / "runs", arguments.run_name)
    if arguments.bundle is not None:
        from rankzero.housekeeping import bundle

        print_left_out(folder)
        bundle.write(folder, arguments.bundle)
        print(arguments.bundle)
        return 0
    if arguments.format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError("--format parquet needs pyarrow: pip install pyarrow, or use --format csv")
    target = _folder(arguments.to or Path(folder.path.name), arguments.dir)
    # Printed one per line, so that scripts can read what was written.
    for path in _write_all(folder, target, arguments.format):
        print(path)
    return 0


def _folder(target: Path, root: Path) -> Path:
    # A run has a run.json, too, and without it no command would know the run.
    if may_be_foreign(target, root) or (target / EVENTS).exists():
        raise UserError(f"{target} is among the runs: choose another folder with --to")
    try:
        (target / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot write to {target}: {error.strerror}"
        raise UserError(f"{why}; choose another folder with --to") from error
    return target


def print_left_out(folder: RunFolder) -> None:
    """Say which children a bundle lacks, because somebody deleted them alone."""
    from rankzero.housekeeping import bundle

    if gone := bundle.left_out(folder):
        listed = ", ".join(one.path.name for one in gone)
        # The other output is for scripts.
        print(f"left out, because they are deleted: {listed}", file=sys.stderr)


def _write_all(folder: RunFolder, target: Path, kind: str) -> list[Path]:
    """Write all files; return their paths."""
    from rankzero.reporting import metric_table

    metrics, facts = metric_table.metrics(folder), fold(folder.all_events())
    files = [target / f"metrics.{kind}", target / f"system.{kind}"]
    for table, path in zip((metrics, metric_table.system(folder)), files, strict=True):
        if kind == "csv":
            table.to_csv(path, index=False)
        else:
            table.to_parquet(path, index=False)
    steps = [{"step": step, "best": best} for step, best in sorted(facts.checkpoints.items())]
    fields = runs.as_json(read_summary(folder))
    # Only a list looks up the names in MLflow.
    del fields["mlflow_name"], fields["parent_mlflow_name"]
    described = {**fields, "environment": dict(facts.environment), "checkpoints": steps}
    texts = {
        target / "run.json": json.dumps(described, indent=2) + "\n",
        target / "report.md": page(folder),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    files += texts
    picture = target / "figures" / "learning_curves.png"
    if learning_curves.write(picture, metrics, facts.goal.metric):
        files.append(picture)
    for path in sorted(folder.artifacts.rglob("*.png")):
        if not path.is_file() or symlinks.leads_out(path, folder.artifacts):
            continue
        # Two folders may have a picture of one name.
        copied = target / "figures" / path.relative_to(folder.artifacts)
        copied.parent.mkdir(parents=True, exist_ok=True)
        files.append(Path(shutil.copy2(path, copied)))
    return files
