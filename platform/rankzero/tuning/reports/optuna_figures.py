"""A search's figures, drawn by Optuna: interactive ones for the page, and PNGs.

The study's own parameters are an index and a factor (see space.py). People read batch sizes and
learning rates. So Optuna draws copies of the study, in memory, that have these instead.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from rankzero.experiment import Goal
from rankzero.reporting.html_page import WIDE
from rankzero.reporting.image_grids import plain_words
from rankzero.tuning.reports import png_files
from rankzero.tuning.space import BATCH_INDEX, FACTOR, PRECISION, SPEED
from rankzero.tuning.trial import Trial

_BATCH, _LR, _LR_FACTOR = "batch size", "learning rate", "learning rate / scaled"
_FACTS = {_BATCH: "batch_size", "precision": "precision", _LR: "lr"}
_ON_LOG_SCALE = (_BATCH, _LR, _LR_FACTOR)
_VALUE = "value (less is better)"
_BLUE, _GREEN, _GREY = "#1f77b4", "#2ca02c", "#999999"
# Optuna's groups. The first one may have missed the target.
_GROUPS = {"Best Trial": ("none is better in both", "#d62728"), "Trial": ("others", _BLUE)}
_INCHES = {"history": (10.0, 5.0), "importance": (8.0, 3.5), "parallel": (11.0, 5.0)}


def interactive(trials: Sequence[Trial], goal: Goal, region: Sequence[int]) -> list[Any]:
    """Return plotly figures: speed and quality, history, importance, configurations.

    `region`: the trials of the sweet region. They get a star.
    """
    figures = []
    with _quiet():
        for name, title, figure in _drawn_by(optuna.visualization, trials, goal):
            figure.update_layout(title=title)
            if name == "pareto":
                # Optuna shades the points by trial number: the first ones are all but white.
                for trace in figure.data:
                    group = trace.marker.colorbar.title.text
                    label, colour = _GROUPS.get(group, (group, _BLUE))
                    marker = {"color": colour, "size": 9, "showscale": False}
                    trace.update(name=label, showlegend=True, marker=marker)
                x, y = _speeds_and_qualities(trials, region)
                star = {"symbol": "star", "color": _GREEN, "size": 16}
                figure.add_scatter(x=x, y=y, mode="markers", name="sweet region", marker=star)
            if name == "parallel":
                _recolour(figure)
            if name == "importance":
                figure.update_yaxes(title=None)
            figures.append(figure)
    return figures


def _recolour(figure: Any) -> None:
    """Draw the best lines green and the worst grey: Optuna's blues vanish on a dark page."""
    from plotly.colors import sample_colorscale

    for trace in figure.data:
        if trace.mode == "lines" and trace.y and trace.y[0] is not None:
            # The first axis has the objective, from 0 to 1.
            [colour] = sample_colorscale([[0, _GREEN], [1, _GREY]], [trace.y[0]])
            trace.update(line={"color": colour, "width": 2}, opacity=1)
        elif trace.marker is not None:
            trace.update(marker={"showscale": False})
    figure.update_layout(meta=WIDE)


def write_pngs(folder: Path, trials: Sequence[Trial], goal: Goal, region: Sequence[int]) -> None:
    """Write the same figures as PNGs: ``pareto.png``, ``history.png`` and so on."""
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter
    from optuna.visualization import matplotlib as library

    pyplot.switch_backend("agg")  # another one may look for a screen
    # Optuna sets a style for the whole process: `plain_words` brings back what was before.
    with _quiet(), plain_words():
        for name, title, axes in _drawn_by(library, trials, goal):
            axes.set_title("")
            axes.set_title(title, loc="left")
            if name == "pareto":
                x, y = _speeds_and_qualities(trials, region)
                axes.scatter(x, y, marker="*", s=260, color=_GREEN, label="sweet region")
                points, names = axes.get_legend_handles_labels()
                axes.legend(points, [_GROUPS.get(one, (one,))[0] for one in names])
            for one in axes.figure.axes:
                if one.get_yscale() == "log":  # its numbers are formulas by default
                    one.yaxis.set_major_formatter(LogFormatter())
                    one.yaxis.set_minor_formatter(LogFormatter())
            axes.figure.set_size_inches(_INCHES.get(name, (7.0, 5.0)))
            png_files.save(axes.figure, folder / f"{name}.png", bbox_inches="tight")
            pyplot.close(axes.figure)


def _drawn_by(library: Any, trials: Sequence[Trial], goal: Goal) -> Iterator[tuple[str, str, Any]]:
    """Yield name and title of each figure that has something to show, and the figure or its axes.

    `library`: Optuna has the same functions for plotly and for matplotlib.
    """
    study, front = _copies(trials, goal)
    searched = sorted({name for trial in study.trials for name in trial.params})
    names = ["samples/s", goal.metric]
    yield "pareto", "Throughput and quality", library.plot_pareto_front(front, target_names=names)
    history = library.plot_optimization_history(study, target_name=_VALUE)
    yield "history", "Objective by trial (grey: missed)", history
    # The learning rate depends on the batch size and its factor does not: so the factor's share.
    params = [name for name in searched if name != _LR]
    with contextlib.suppress(Exception):  # too few trials, or all alike
        if optuna.importance.get_param_importances(study, params=params):
            importance = library.plot_param_importances(study, params=params)
            yield "importance", "Importance of what was searched", importance
    axes = _axes(study)
    if axes and any(trial.state is TrialState.COMPLETE for trial in study.trials):
        parallel = library.plot_parallel_coordinate(study, axes, target_name=_VALUE)
        yield "parallel", "Configurations", parallel


def _axes(study: optuna.Study) -> list[str]:
    """Return the parameters with several values: the label of another one would hide the lines."""
    known = {(name, str(value)) for trial in study.trials for name, value in trial.params.items()}
    counts = Counter(name for name, _ in known if name != _LR_FACTOR)
    return sorted(name for name in counts if counts[name] > 1)


def _copies(trials: Sequence[Trial], goal: Goal) -> tuple[optuna.Study, optuna.Study]:
    """Return copies of the study: by its objective, and by samples/s and the goal's metric."""
    mode = StudyDirection.MAXIMIZE if goal.mode == "max" else StudyDirection.MINIMIZE
    by_objective = optuna.create_study(direction="minimize")
    by_both = optuna.create_study(directions=[StudyDirection.MAXIMIZE, mode])
    rows = [_configuration(trial) for trial in trials]
    # The reference lacks them. Without a value, figures would leave out it or the parameter.
    if any(SPEED in row for row in rows):
        rows = [{SPEED: "your own", **row} for row in rows]
    distributions = {name: _distribution(name, rows) for row in rows for name in row}
    for trial, row in zip(trials, rows, strict=True):
        ranges = {name: distributions[name] for name in row}
        given: dict[str, Any] = {"params": row, "distributions": ranges}
        # A trial without values is added all the same: figures show the trials' numbers.
        failed = create_trial(state=TrialState.FAIL, **given)
        complete = trial.state == "COMPLETE" and trial.value is not None
        pair = _speed_and_quality(trial)
        by_objective.add_trial(
            create_trial(value=trial.value, constraints=dict(trial.constraints), **given)
            if complete
            else failed
        )
        by_both.add_trial(create_trial(values=pair, **given) if complete and pair else failed)
    return by_objective, by_both


def _speed_and_quality(trial: Trial) -> tuple[float, float] | None:
    speed, quality = trial.facts.get("samples_per_second"), trial.facts.get("best")
    return None if speed is None or quality is None else (float(speed), float(quality))


def _speeds_and_qualities(
    trials: Sequence[Trial], numbers: Sequence[int]
) -> tuple[list[float], list[float]]:
    found = [_speed_and_quality(trial) for trial in trials if trial.number in numbers]
    known = [pair for pair in found if pair]
    return [speed for speed, _ in known], [quality for _, quality in known]


def _configuration(trial: Trial) -> dict[str, Any]:
    found = {name: trial.facts[fact] for name, fact in _FACTS.items() if fact in trial.facts}
    for name, value in trial.parameters.items():
        if name not in (BATCH_INDEX, PRECISION):
            # A choice among tuples is stored as lists, which no distribution may have.
            plain = str(value) if isinstance(value, list | tuple) else value
            found[_LR_FACTOR if name == FACTOR else name] = plain
    return found


def _distribution(name: str, rows: Sequence[Mapping[str, Any]]) -> BaseDistribution:
    """Return a distribution that contains the values of all trials."""
    values = [row[name] for row in rows if name in row]
    kinds = {type(value) for value in values}
    if not kinds <= {int, float}:
        return CategoricalDistribution(sorted(set(values), key=repr))
    log = name in _ON_LOG_SCALE and min(values) > 0
    if kinds == {int}:
        return IntDistribution(min(values), max(values), log=log)
    return FloatDistribution(min(values), max(values), log=log)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the functions for matplotlib are marked experimental
        yield
