"""Compare a run's metrics in its journal, in MLflow and in an undisturbed training.

Each check raises `Broken` if it fails.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from rankzero.events import Evaluated, Event, StepsLogged
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.items import MetricPoint
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from torture.ground import Broken

# Values by metric and step.
Curves = Mapping[str, Mapping[int, float]]
# Metrics of each step. The others are of windows. A resumed attempt may divide its steps into other
# windows, and MLflow has those of both.
WHOLE = ("train/", "val/")
# Metrics that are the same, bit for bit, in every training with the same seed.
EXACT = (*WHOLE, "lr")
ORIGIN = "train/loss"
GOAL = "val/accuracy"


def latest(run: RunFolder) -> Curves:
    """Return the journal's values. Those of a later attempt replace those of an earlier one."""
    found: dict[str, dict[int, float]] = {}
    for name, step, value in _journaled(run):
        found.setdefault(name, {})[step] = value
    return found


def first(run: RunFolder) -> Curves:
    """Return the values that MLflow keeps: the first one of each step."""
    found: dict[str, dict[int, float]] = {}
    for name, step, value in _journaled(run):
        found.setdefault(name, {}).setdefault(step, value)
    return found


def in_mlflow(run: RunFolder, run_id: str, names: Iterable[str]) -> dict[str, list[MetricPoint]]:
    """Return the points that MLflow has, by metric."""
    tracker = MlflowRuns(run.identity.tracking_uri)
    return {name: tracker.history(run_id, name) for name in names}


def have_arrived(journaled: Curves, points: Mapping[str, Sequence[MetricPoint]]) -> None:
    """Check that MLflow has each journaled step once, with the value that was journaled first."""
    for name, wanted in journaled.items():
        found = {point.step: point.value for point in points[name]}
        if len(found) != len(points[name]):
            raise _doubled(name, points[name])
        if missing := sorted(set(wanted) - set(found)):
            raise Broken(
                f"lost: {len(missing)} points of {name} are not in MLflow, "
                f"the first of step {missing[0]}"
            )
        _require_same("MLflow", name, found, wanted)


def have_no_gap(journaled: Curves, steps: int | None) -> None:
    """Check that the journal has all steps from 1 to `steps`, or to its last one if None."""
    mine = journaled.get(ORIGIN, {})
    if sorted(mine) != list(range(1, (steps or len(mine)) + 1)):
        raise Broken(
            f"lost: the journal has {len(mine)} steps up to {max(mine, default=0)}, "
            f"wanted {steps or 'no gap'}"
        )


def are_undisturbed(journaled: Curves, reference: Curves, spoiled: int | None = None) -> None:
    """Check exact metrics against an undisturbed training, only before step `spoiled` if given."""
    for name, found in journaled.items():
        wanted = reference.get(name, {})
        if name.startswith(WHOLE):
            _require_same("the journal", name, _before(found, spoiled), wanted)
        elif name.startswith(EXACT):
            shared = {step: value for step, value in found.items() if step in wanted}
            _require_same("the journal", name, _before(shared, spoiled), wanted)


def have_all(journaled: Curves, reference: Curves) -> None:
    """Check that a finished training has all steps and evaluations of an undisturbed one."""
    for name in (name for name in reference if name.startswith(WHOLE)):
        missing = sorted(set(reference[name]) - set(journaled.get(name, {})))
        if missing:
            raise Broken(
                f"lost: {len(missing)} points of {name} are not in the journal, "
                f"the first of step {missing[0]}"
            )


def match_oracle(
    points: Mapping[str, Sequence[MetricPoint]],
    journaled: Curves,
    oracle: Curves,
    steps: int | None,
    spoiled: Container[int] = (),
) -> None:
    """Check MLflow's points against an undisturbed training, whatever the journal has.

    No step may be in neither journal nor MLflow, or in MLflow twice. `steps`: MLflow must have
    exactly this many. None accepts any number without a gap. In `spoiled` steps, only the values
    may differ.
    """
    for name, mine in points.items():
        if len({point.step for point in mine}) != len(mine):
            raise _doubled(name, mine)
    for name in (name for name in oracle if name.startswith(WHOLE)):
        found = {point.step: point.value for point in points.get(name, ())}
        reached = steps or max((*found, *journaled.get(ORIGIN, ())), default=0)
        there = found if steps else {**found, **journaled.get(name, {})}
        missing = [step for step in sorted(oracle[name]) if step <= reached and step not in there]
        # The training may have been killed after a step and before the evaluation that follows it.
        if steps is None and not name.startswith("train/") and missing[-1:] == [reached]:
            missing.pop()
        if missing:
            where = "not in MLflow" if steps else "in neither journal nor MLflow"
            raise Broken(
                f"lost: {len(missing)} points of {name} are {where}, the first of step {missing[0]}"
            )
        whole = {step: value for step, value in found.items() if step not in spoiled}
        _require_same("MLflow", name, whole, oracle[name])


def best_is(found: float | None, oracle: Curves) -> None:
    """Check that the best value of a finished run is that of an undisturbed training."""
    if GOAL in oracle and found != max(oracle[GOAL].values()):
        raise Broken(f"wrong: MLflow's best {GOAL} is {found}, wanted {max(oracle[GOAL].values())}")


def _doubled(name: str, points: Sequence[MetricPoint]) -> Broken:
    steps = len({point.step for point in points})
    return Broken(f"doubled: MLflow has {len(points)} points of {name} for {steps} steps")


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


def _before(values: Mapping[int, float], spoiled: int | None) -> Mapping[int, float]:
    return {step: value for step, value in values.items() if spoiled is None or step < spoiled}


def _require_same(
    source: str, name: str, found: Mapping[int, float], wanted: Mapping[int, float]
) -> None:
    """Raise Broken if a value differs from the wanted one, or if its step is not wanted."""
    for step, value in sorted(found.items()):
        if step not in wanted:
            raise Broken(f"wrong: {source} has {name} of step {step}, which was never logged")
        if not _same(value, wanted[step]):
            raise Broken(
                f"wrong: in {source} {name} of step {step} is {value}, wanted {wanted[step]}"
            )


def _same(value: float, wanted: float) -> bool:
    return value == wanted or (math.isnan(value) and math.isnan(wanted))
