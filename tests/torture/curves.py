"""A run's metrics as its journal, MLflow and an undisturbed training have them. Each check raises `Broken`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankzero.events import Evaluated, Event, RunStarted, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.items import MetricPoint
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from torture.ground import Broken

Curves = Mapping[str, Mapping[int, float]]
"""Values by metric and step."""
WHOLE = ("train/", "val/")
"""Metrics of each step: the others are of windows, which an attempt that goes on may cut anew, and those behind the
last one that was told before are told then."""
EXACT = (*WHOLE, "lr")
"""Metrics that are the same, bit for bit, in every training with the same seed."""
ORIGIN = "train/loss"


def latest(run: RunFolder) -> Curves:
    """Return what the journal says; a later attempt's values replace an earlier one's."""
    found: dict[str, dict[int, float]] = {}
    for name, step, value in _journaled(run):
        found.setdefault(name, {})[step] = value
    return found


def first(run: RunFolder) -> Curves:
    """Return what the journal says, the first attempt's that came so far: what MLflow keeps."""
    found: dict[str, dict[int, float]] = {}
    told: dict[str, int] = {}
    for event in read_all(run.events):
        if isinstance(event, RunStarted):
            told = {
                name: max(values) for name, values in found.items() if not name.startswith(WHOLE)
            }
        for name, step, value in _points_of(event):
            if step > told.get(name, step - 1):
                found.setdefault(name, {}).setdefault(step, value)
    return found


def in_mlflow(run: RunFolder, run_id: str, names: Iterable[str]) -> dict[str, list[MetricPoint]]:
    """Return the points that MLflow has, by metric."""
    tracker = MlflowRuns(run.identity.tracking_uri)
    return {name: tracker.history(run_id, name) for name in names}


def have_arrived(journaled: Curves, points: Mapping[str, Sequence[MetricPoint]]) -> None:
    """MLflow has each journaled step once, with the value that was journaled first."""
    for name, wanted in journaled.items():
        told = {point.step: point.value for point in points[name]}
        if len(told) != len(points[name]):
            raise Broken(
                f"wrong: MLflow has {len(points[name])} points of {name} for {len(told)} steps"
            )
        if missing := sorted(set(wanted) - set(told)):
            raise Broken(
                f"lost: {len(missing)} points of {name} are not in MLflow, the first of step {missing[0]}"
            )
        _require_same("MLflow", name, told, wanted)


def have_no_gap(journaled: Curves, steps: int | None) -> None:
    """The journal has all steps from the first on, `steps` of them; None: as far as it goes."""
    mine = journaled.get(ORIGIN, {})
    if sorted(mine) != list(range(1, (steps or len(mine)) + 1)):
        raise Broken(
            f"lost: the journal has {len(mine)} steps up to {max(mine, default=0)}, wanted {steps or 'no gap'}"
        )


def are_undisturbed(journaled: Curves, reference: Curves, spoiled: int | None = None) -> None:
    """Exact metrics have an undisturbed training's values, before the step that the scenario has spoiled, if any."""
    for name, told in journaled.items():
        wanted = reference.get(name, {})
        if name.startswith(WHOLE):
            _require_same("the journal", name, _before(told, spoiled), wanted)
        elif name.startswith(EXACT):
            shared = {step: value for step, value in told.items() if step in wanted}
            _require_same("the journal", name, _before(shared, spoiled), wanted)


def have_all(journaled: Curves, reference: Curves) -> None:
    """A training that got to its end has what an undisturbed one has, evaluations included."""
    for name in (name for name in reference if name.startswith(WHOLE)):
        missing = sorted(set(reference[name]) - set(journaled.get(name, {})))
        if missing:
            raise Broken(
                f"lost: {len(missing)} points of {name} are not in the journal, the first of step {missing[0]}"
            )


def _journaled(run: RunFolder) -> Iterator[tuple[str, int, float]]:
    for event in read_all(run.events):
        yield from _points_of(event)


def _points_of(event: Event) -> Iterator[tuple[str, int, float]]:
    if isinstance(event, StepsLogged):
        for name, values in event.metrics.items():
            yield from (
                (name, step, value) for step, value in zip(event.steps, values, strict=True)
            )
    elif isinstance(event, Evaluated):
        yield from ((name, event.step, value) for name, value in event.metrics.items())


def _before(told: Mapping[int, float], spoiled: int | None) -> Mapping[int, float]:
    return {step: value for step, value in told.items() if spoiled is None or step < spoiled}


def _require_same(
    whose: str, name: str, told: Mapping[int, float], wanted: Mapping[int, float]
) -> None:
    """Raise Broken where a value is another than the one wanted; steps that are not wanted are foreign."""
    for step, value in sorted(told.items()):
        if step not in wanted:
            raise Broken(f"wrong: {whose} has {name} of step {step}, which nobody told of")
        if not _same(value, wanted[step]):
            raise Broken(
                f"wrong: in {whose} {name} of step {step} is {value}, wanted {wanted[step]}"
            )


def _same(value: float, wanted: float) -> bool:
    return value == wanted or (math.isnan(value) and math.isnan(wanted))
