"""The search itself: the user's own configuration first, then what the study draws, then confirmation on new seeds.

    ask -> configuration -> launch -> follow the journal -> report / prune -> tell

What becomes of a trial, in Optuna and in MLflow:

    trained to its end                     COMPLETE   FINISHED
    pruned, or cannot win any more         PRUNED     KILLED
    out of memory, loss not finite         PRUNED     FAILED     an answer about the configuration: infeasible
    crash, hang (killed after a silence)   FAIL       FAILED
    Ctrl-C                                 FAIL       KILLED     tried again when the study goes on
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankzero.config import flatten
from rankzero.events import RunEnded, SystemSampled
from rankzero.experiment import Experiment
from rankzero.search.curve import Curve
from rankzero.search.launcher import Running
from rankzero.search.objective import QUALITY, Objective
from rankzero.search.study import State, Study

MEMORY = "memory"
OUT_OF_MEMORY, DIVERGED = ("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"), ("NotFinite",)
OF_A_TRIAL = {"train.save_every": 0, "train.log_model": False}  # a trial is judged, not kept
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Followed:
    """What became of a trial."""

    state: State
    curve: Curve
    reason: str
    constraints: Mapping[str, float]
    value: float | None


def follow(
    running: Running,
    objective: Objective,
    *,
    report: Callable[[int, float], bool],
    best: float | None,
    rung_seconds: float,
    silence_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Followed:
    """Follow a trial to its end, pruned where it cannot win or `report` says so, killed after a silence.

    `report` gets a rung, the same training time for every trial, and the progress there.
    """
    curve, heard, asked, rung = Curve(objective.goal), clock(), "", 0
    try:
        while not running.over:
            events = running.news()
            for event in events:
                curve(event)
            heard = heard if all(isinstance(event, SystemSampled) for event in events) else clock()
            if asked or not events:
                if clock() - heard > silence_seconds and not asked:
                    asked = f"no sign of life for {silence_seconds:.0f} s"
                    running.kill(asked)
                continue
            asked, rung = _ask_to_stop(curve, objective, report, best, rung, rung_seconds)
            if asked:
                running.prune(asked)
    except KeyboardInterrupt:
        running.stop()
        raise
    finally:
        running.close()
    for event in running.news():
        curve(event)
    return classify(curve, objective, asked)


def _ask_to_stop(
    curve: Curve, objective: Objective, report: Callable[[int, float], bool], best: float | None, rung: int,
    rung_seconds: float,
) -> tuple[str, int]:  # fmt: skip
    """Return why the trial should stop, or an empty text, and the last rung that was reported."""
    if objective.hopeless(curve, best):
        return f"cannot beat the best, {best:.3g} s, any more", rung
    now = int(curve.seconds / rung_seconds) if rung_seconds > 0 else 0
    if now > rung and curve.points:
        return ("worse than others at the same training time" if report(now, objective.progress(curve)) else ""), now
    return "", rung


def classify(curve: Curve, objective: Objective, asked: str) -> Followed:
    """Return what became of a trial whose processes have ended."""
    ended = curve.ended or RunEnded(0.0, "FAILED", "no process of it said anything", None, {})
    reason = asked or ended.reason
    if ended.status == "FINISHED":
        judged = objective.judge(curve)
        return Followed("COMPLETE", curve, ended.reason, {**judged.constraints, MEMORY: 0.0}, judged.value)
    if ended.status == "KILLED" and asked:
        return Followed("PRUNED", curve, reason, {QUALITY: objective.gap(curve), MEMORY: 0.0}, None)
    text = f"{ended.reason} {ended.error or ''}"
    if any(word in text for word in OUT_OF_MEMORY):
        return Followed("PRUNED", curve, ended.reason, {QUALITY: 1.0, MEMORY: 1.0}, None)
    if any(word in text for word in DIVERGED):
        return Followed("PRUNED", curve, ended.reason, {QUALITY: 1.0, MEMORY: 0.0}, None)
    return Followed("FAIL", curve, reason, {}, None)


def facts(found: Followed, experiment: Experiment, label: str) -> dict[str, Any]:
    """Return what the study keeps of a trial."""
    settings, curve = flatten(experiment), found.curve
    known = {
        "run": label,
        "reason": found.reason,
        "batch_size": settings["train.batch_size"],
        "precision": settings["train.precision"],
        "lr": settings["lr"],
        "train_seconds": curve.seconds,
        "best": curve.best,
        "samples_per_second": curve.samples_per_second,
        "memory_megabytes": _peak(curve, "gpu_memory_usage_megabytes"),
        "joules": curve.peaks.get("system/gpu_energy_joules", curve.peaks.get("system/gpu_0_energy_joules")),
        "curve": [[point.step, round(point.seconds, 4), point.value] for point in curve.points],
    }
    return {name: fact for name, fact in known.items() if fact is not None}


def best_value(study: Study) -> float | None:
    """Return the lowest value of a feasible trial."""
    values = [trial.value for trial in study.trials() if trial.feasible and trial.value is not None]
    return min(values, default=None)


def _peak(curve: Curve, name: str) -> float | None:
    stem, _, rest = name.partition("_")
    found = [value for key, value in curve.peaks.items() if f"/{stem}_" in key and key.endswith(rest)]
    return max(found, default=None)
