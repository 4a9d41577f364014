"""Recover what a crash left, with the package's own code. Check that nothing is lost or doubled.

The rest of the training is simulated: it logs the values of the undisturbed run, with new times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from crash_points import session
from rankzero.catalog.summary import read_summary
from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)
from rankzero.experiment import Goal
from rankzero.run_store import checkpoint_files, run_locks
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import Journal, read_all
from rankzero.telemetry.sampling_thread import _next_sample
from rankzero.tracking import delivery_status, sync
from rankzero.training.checkpoints.writer import unlogged
from support.memory_store import MemoryStore, deliverer_to

Curves = dict[str, dict[int, float]]


class Violation(Exception):
    """A promise that does not hold. The message begins with its kind: lost, doubled, …"""


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The undisturbed run."""

    curves: Curves
    """Metric -> step -> value, of the metrics that are functions of the step."""
    params: Mapping[str, str]
    goal: Goal
    total_steps: int
    checkpoints: frozenset[str] | None = None
    """The checksum of every checkpoint's state that was written, if known."""

    @classmethod
    def of(
        cls, undisturbed: RunFolder, goal: Goal, checkpoints: frozenset[str] | None = None
    ) -> Oracle:
        events = list(read_all(undisturbed.events))
        (started,) = (event for event in events if isinstance(event, RunStarted))
        assert started.total_steps is not None
        return cls(curves_of(events), started.params, goal, started.total_steps, checkpoints)

    def best(self, until: int) -> float | None:
        """Return the best goal value up to a step."""
        values = [v for step, v in self.curves[self.goal.metric].items() if step <= until]
        choose = max if self.goal.mode == "max" else min
        return choose(values, default=None)


def curves_of(events: list[Event]) -> Curves:
    """Return the values of the metrics that are functions of the step."""
    curves: Curves = {}
    for event in events:
        if isinstance(event, StepsLogged):
            for key, column in event.metrics.items():
                if key.startswith("train/"):
                    curves.setdefault(key, {}).update(zip(event.steps, column, strict=True))
        elif isinstance(event, Evaluated):
            for key, value in event.metrics.items():
                curves.setdefault(key, {})[event.step] = value
    return curves


def check(root: Path, store: MemoryStore, oracle: Oracle) -> str:
    """Recover the run below `root` and finish it; return how. Raises Violation."""
    folder = RunFolder(root / "runs" / session.RUN)
    before = list(read_all(folder.events))
    began = any(isinstance(event, RunStarted) for event in before)
    if not (folder.path / "run.json").exists() and (began or store.uuid is not None):
        raise Violation("lost: run.json, and with it the run")
    if not began and not store.tags:
        return "never began"
    read_summary(folder)
    finished = _status(before) == "FINISHED"
    newest = _newest(folder, before, oracle)
    sync.close_if_dead(folder, 0.0)
    resumes = newest is not None and not finished
    if newest is not None and not finished:
        _train_on(folder, newest, oracle)
    _deliver(folder, store)
    _require_no_doubles(store)
    if not (resumes or finished):
        _require_journaled(folder, store)
        return "ended"
    _require_all(folder, store, oracle)
    _require_checkpoints(folder, store, oracle)
    return "finished" if finished else "resumed"


def _deliver(folder: RunFolder, store: MemoryStore) -> None:
    """Deliver everything, as `rankzero sync` does. Raises Violation if that does not end."""
    for path in (folder.events, folder.system(0)):
        # The journal's last line may be torn.
        if path.exists():
            Journal(path).close()
    try:
        session.deliver(deliverer_to(store, folder))
    except AssertionError as error:
        raise Violation(f"stuck: {error}") from error
    if not delivery_status.status(folder).done:
        raise Violation("stuck: delivery.json is not done")


def _newest(folder: RunFolder, events: list[Event], oracle: Oracle) -> int | None:
    """Return the step of the newest intact checkpoint, or None if there is none."""
    path, _ = checkpoint_files.newest_intact(folder.checkpoints)
    step = None
    if path is not None:
        step = checkpoint_files.read_manifest(path).step
        written = oracle.checkpoints
        if written and checksum((path / checkpoint_files.STATE).read_bytes()) not in written:
            raise Violation(f"corrupt: the checkpoint of step {step} was never written so")
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    if saved and (step is None or step < max(saved)):
        raise Violation(f"lost: checkpoint {max(saved)} is announced, the newest is {step}")
    return step


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _status(events: list[Event]) -> str | None:
    """Return the status of the newest attempt, or None if it has no end."""
    ends = [event for event in events if isinstance(event, (RunStarted, RunEnded))]
    return ends[-1].status if ends and isinstance(ends[-1], RunEnded) else None


def _train_on(folder: RunFolder, newest: int, oracle: Oracle) -> None:
    """Write what an attempt writes that continues from the checkpoint of step `newest`."""
    attempt = 1 + sum(isinstance(event, RunStarted) for event in read_all(folder.events))
    run_locks.claim(folder, 0)
    journal = Journal(folder.events)
    journal(RunStarted(time.time(), oracle.params, {}, attempt, newest, oracle.total_steps))
    checkpoint_files.remove_leftovers(folder.checkpoints)
    keep = session.experiment().train.checkpoints.keep
    for missed in unlogged(folder.path, read_all(folder.events), keep, oracle.goal):
        journal(missed)
    for event in _events_after(folder, newest, oracle):
        journal(event)
    best = {"best": oracle.best(oracle.total_steps) or 0.0}
    journal(RunEnded(time.time(), "FINISHED", "trained", None, best))
    journal.close()
    system = Journal(folder.system(0))
    system.flush()
    sample = _next_sample(folder.system(0))
    system(SystemSampled(time.time(), sample, {"system/load": 1.0}))
    system.close()


def _events_after(folder: RunFolder, newest: int, oracle: Oracle) -> Iterator[Event]:
    every = session.EVALUATE_EVERY
    train = {key: curve for key, curve in oracle.curves.items() if key.startswith("train/")}
    for last in range(newest // every * every + every, oracle.total_steps + 1, every):
        steps = list(range(max(newest, last - every) + 1, last + 1))
        columns = {key: [curve[step] for step in steps] for key, curve in train.items()}
        yield StepsLogged(steps, [time.time()] * len(steps), columns)
        values = {key: curve[last] for key, curve in oracle.curves.items() if last in curve}
        metrics = {key: value for key, value in values.items() if key not in train}
        is_best = oracle.goal.better(metrics[oracle.goal.metric], oracle.best(last - 1))
        yield Evaluated(time.time(), last, metrics, is_best)
        yield from _save(folder, last, metrics, is_best, oracle.goal)


def _save(
    folder: RunFolder, step: int, metrics: Mapping[str, float], is_best: bool, goal: Goal
) -> Iterator[Event]:
    """Write a checkpoint and delete others, as `training/checkpoints/writer.py` does."""
    target = checkpoint_files.folder_of(folder.checkpoints, step)
    checkpoint_files.write(
        target, lambda path: _write(path, b"simulated"), step, metrics, is_best, 1
    )
    place = str(target.relative_to(folder.path))
    yield CheckpointSaved(time.time(), step, place, is_best, metrics)
    manifests = checkpoint_files.known(folder.checkpoints)
    keep = session.experiment().train.checkpoints.keep
    for path in checkpoint_files.superseded(manifests, keep, goal, target):
        checkpoint_files.delete(path)
        place = str(path.relative_to(folder.path))
        yield CheckpointDeleted(time.time(), manifests[path].step, place)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _require_all(folder: RunFolder, store: MemoryStore, oracle: Oracle) -> None:
    """Raise Violation unless MLflow and the journal have all steps of the undisturbed run."""
    journaled = curves_of(list(read_all(folder.events)))
    for key, curve in oracle.curves.items():
        _require_curve(f"{key} in the journal", curve, journaled.get(key, {}))
        delivered = {step: min(seen)[1] for step, seen in store.points.get(key, {}).items()}
        _require_curve(f"{key} in MLflow", curve, delivered)
    summary, best = read_summary(folder), oracle.best(oracle.total_steps)
    if (summary.status, store.status) != ("FINISHED", "FINISHED"):
        raise Violation(f"status: {summary.status} on the disk, {store.status} in MLflow")
    if summary.best != best or store.tags.get("rankzero.best") != repr(best):
        raise Violation(
            f"best: {summary.best} on the disk, {store.tags.get('rankzero.best')} in MLflow, "
            f"and {best} was reached"
        )


def _require_checkpoints(folder: RunFolder, store: MemoryStore, oracle: Oracle) -> None:
    """Raise Violation unless MLflow has the checkpoints that the disk has, and knows the best."""
    kept = {manifest.step for manifest in checkpoint_files.known(folder.checkpoints).values()}
    if missing := kept - store.checkpoints.keys():
        raise Violation(f"unannounced: MLflow has no checkpoint of step {sorted(missing)}")
    if left := store.checkpoints.keys() - kept:
        raise Violation(f"left: MLflow has deleted checkpoints, of step {sorted(left)}")
    goal = oracle.curves[oracle.goal.metric]
    best = min(step for step, value in goal.items() if value == oracle.best(oracle.total_steps))
    if (marked := [step for step, (_, is_best) in store.checkpoints.items() if is_best]) != [best]:
        raise Violation(f"best: MLflow has {marked} as the best checkpoint, and it is {best}")


def _require_curve(what: str, expected: Mapping[int, float], found: Mapping[int, float]) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise Violation(f"lost: {what}: steps {missing[0]} to {missing[-1]} ({len(missing)})")
    if wrong := [step for step in found if found[step] != expected.get(step)]:
        raise Violation(f"wrong: {what}: steps {wrong}")


def _require_journaled(folder: RunFolder, store: MemoryStore) -> None:
    """Raise Violation unless MLflow has what the journal has, and the run has an end."""
    events = list(read_all(folder.events))
    for key, curve in curves_of(events).items():
        if missing := sorted(curve.keys() - store.points.get(key, {}).keys()):
            raise Violation(f"lost: {key}: steps {missing} of the journal are not in MLflow")
    if store.status not in ("FAILED", "KILLED") or store.status != _status(events):
        raise Violation(f"status: {_status(events)} on the disk, {store.status} in MLflow")


def _require_no_doubles(store: MemoryStore) -> None:
    for key, steps in store.points.items():
        if doubled := [step for step, seen in steps.items() if len(seen) > 1]:
            raise Violation(f"doubled: {key}: steps {doubled[0]} to {doubled[-1]} ({len(doubled)})")
