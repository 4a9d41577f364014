"""One run, or several and their differences, as a page of HTML that can be mailed."""

from __future__ import annotations

import base64
import dataclasses
import html
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero.catalog.lookup import mlflow_id
from rankzero.catalog.summary import read_summary
from rankzero.errors import UserError
from rankzero.events import PicturesTaken
from rankzero.redaction.text import line_without_secrets
from rankzero.reporting import comparison, html_page, learning_curves, metric_table, run_report
from rankzero.reporting.comparison import RunSide
from rankzero.run_store import symlinks
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all

if TYPE_CHECKING:
    from pandas import DataFrame

_MOST_PICTURES = 12
# Points of a curve. Each bucket of steps keeps its least and its greatest value.
_BUCKETS = 500


def write(path: Path, folders: Sequence[RunFolder]) -> list[str]:
    """Write the page of these runs, and return what it lacks. Raises UserError."""
    sides = comparison.sides_of(folders)
    several, missing = len(sides) > 1, list[str]()
    parts: list[Any] = []
    if several:
        parts += ["<h2>Differences</h2>", differences(sides), *_patches(sides)]
    else:
        end = sides[0].facts.end
        parts.append(f"<p><b>{sides[0].status}</b>: {html.escape(end.reason if end else '')}</p>")
    searches = [_charts_of_search(folder) for folder in folders]
    if not all(searches) and (charts := list(_curves(*_trained(folders, sides)))):
        parts += ["<h2>Curves</h2>", '<div class="grid">', *charts, "</div>"]
    for folder, side, search in zip(folders, sides, searches, strict=True):
        name = html.escape(side.name)
        parts += [f"<h2>{name}</h2>"] if several else []
        # The curves and the PNGs of a study only repeat its charts.
        known = ['<div class="grid">', *search, "</div>"] if search else []
        parts += known or _pictures(folder, missing)
        report = html_page.from_markdown(run_report.page(folder))
        way = "<details><summary>Report</summary>{}</details>" if several else "<h2>Report</h2>{}"
        parts.append(way.format(report))
        settings = html_page.table(("Setting", "Value"), [*side.facts.params.items()])
        parts.append(f"<details><summary>All settings</summary>{settings}</details>")
    title = ", ".join(side.name for side in sides)
    try:
        path.write_text(html_page.page(title, parts), "utf-8", "backslashreplace")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file") from error
    return missing


def differences(sides: Sequence[RunSide]) -> str:
    """Return what differs between runs as one table, so that the columns are aligned."""
    rows: list[tuple[str, ...]] = []
    for title, found in comparison.sections(sides).items():
        rows += [(title,), *((row.key, *row.values, row.change) for row in found)]
    return html_page.table(("", *(side.name for side in sides), ""), rows)


def _patches(sides: Sequence[RunSide]) -> Iterator[str]:
    first = sides[0]
    for other in sides[1:]:
        if lines := "\n".join(comparison.patches(first.patch, other.patch)):
            title = html.escape(f"Uncommitted changes: - {first.name}, + {other.name}")
            yield f"<details><summary>{title}</summary><pre>{html.escape(lines)}</pre></details>"


def _charts_of_search(folder: RunFolder) -> list[Any]:
    """Return the charts of a study's own page, or nothing for another run."""
    page = folder.artifacts / "search.html"
    # A user may have logged a file of this name.
    if "search.sampler" not in read_summary(folder).params or not page.is_file():
        return []
    if symlinks.leads_out(page, folder.artifacts):
        return []
    return list(html_page.figures(page.read_text(encoding="utf-8", errors="replace")))


def _trained(
    folders: Sequence[RunFolder], sides: Sequence[RunSide]
) -> tuple[Sequence[RunFolder], Sequence[RunSide]]:
    """Return the runs, and in the place of a single repeat its own: it only counts them."""
    if len(sides) > 1 or "repeat.seeds" not in sides[0].facts.params:
        return folders, sides
    children = [child for child in folders[0].children if child.events.exists()] or [*folders]
    # A chart's legend has no room for the repeat's name on each line.
    name, found = f"{sides[0].name}-", comparison.sides_of(children)
    return children, [dataclasses.replace(one, name=one.name.removeprefix(name)) for one in found]


def _curves(folders: Sequence[RunFolder], sides: Sequence[RunSide]) -> Iterator[Any]:
    """Yield a chart for each group of metrics: a colour for each run, or each metric of one run."""
    import pandas
    import plotly.express

    tables = [metric_table.metrics(folder) for folder in folders]
    # The first two columns are the step and its time.
    names = list(dict.fromkeys(str(name) for table in tables for name in table.columns[2:]))
    for title, group in learning_curves.grouped(names, sides[0].facts.goal.metric).items():
        curves = [
            _thinned(table[["step", name]].set_axis(["step", ""], axis=1).dropna()).assign(
                run=side.name, metric=name
            )
            for side, table in zip(sides, tables, strict=True)
            for name in group
            if name in table
        ]
        by = {"color": "run" if len(sides) > 1 else "metric", "title": title, "height": 340}
        by |= {"line_dash": "metric"} if len(sides) > 1 and len(group) > 1 else {}
        figure = plotly.express.line(pandas.concat(curves), "step", "", **by)
        # A line through a single value would be nothing.
        figure.for_each_trace(
            lambda one: one.update(mode="lines+markers"), lambda one: len(one.x) < 50
        )
        yield figure.update_layout(legend_title="", yaxis_exponentformat="e")


def _thinned(curve: DataFrame) -> DataFrame:
    """Return the rows with the least and the greatest value of each bucket of steps, in order."""
    if len(curve) <= 2 * _BUCKETS:
        return curve
    rows = curve.reset_index(drop=True)
    values = rows.iloc[:, 1].groupby(rows.index * _BUCKETS // len(rows))
    return rows.loc[sorted({0, *values.idxmin(), *values.idxmax(), len(rows) - 1})]


def _pictures(folder: RunFolder, missing: list[str]) -> Iterator[str]:
    """Yield a run's newest pictures; add to `missing` why there are none."""
    with tempfile.TemporaryDirectory(prefix="rankzero-") as place:
        try:
            found = _drawn(folder, Path(place))
        except Exception as error:  # MLflow and foreign files fail in many ways
            why = line_without_secrets(f"{type(error).__name__}: {error}")
            missing.append(f"the pictures of {folder.path.name}: {why}")
            yield f"<p>This page lacks {html.escape(missing[-1])}</p>"
            found = {}
        files = (one for one in folder.artifacts.rglob("*.png") if one.is_file())
        pictures = sorted(files, key=lambda one: -one.lstat().st_mtime_ns)
        logged = [one for one in pictures if not symlinks.leads_out(one, folder.artifacts)]
        found |= {str(one.relative_to(folder.artifacts).with_suffix("")): one for one in logged}
        if found:
            yield "<h3>Pictures</h3>"
        yield '<div class="grid">'
        for name, path in list(found.items())[:_MOST_PICTURES]:
            data = base64.b64encode(path.read_bytes()).decode()
            yield f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
        yield "</div>"


def _drawn(folder: RunFolder, place: Path) -> dict[str, Path]:
    """Return the PNGs of the newest pictures by key: drawn now, or those that MLflow has."""
    from rankzero.mlflow_store.client import MlflowRuns
    from rankzero.reporting import image_grids
    from rankzero.run_store import picture_files

    taken = [event for event in read_all(folder.events) if isinstance(event, PicturesTaken)]
    if not taken:
        return {}
    arrays, target = folder.path / taken[-1].path, place / "pictures"
    if arrays.exists() and arrays.resolve().is_relative_to(folder.path.resolve()):
        return image_grids.draw(picture_files.read(arrays), taken[-1].step, place)
    if run_id := mlflow_id(folder):
        MlflowRuns(folder.identity.tracking_uri).download_artifacts(run_id, target, "pictures")
    return {path.stem: path for path in sorted(target.glob("*.png"))}
