"""How often ranks talk, and how soon a long evaluation is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from rankzero import config, experiment_file
from rankzero.events import CheckpointSaved, Evaluated
from rankzero.experiment import Experiment
from rankzero.training.distributed.world import World
from rankzero.training.stop import (
    LONGEST_WINDOW,
    MOST_BATCHES,
    PATIENT,
    PRUNED,
    REASONS,
    SIGTERM,
    TIME_LIMIT,
    EvaluationInterrupted,
    Stop,
    StopPoll,
    most_urgent,
    next_length,
)
from support.paths import FIXTURES
from support.training import Trainer


def test_windows_grow_to_a_second_and_stay_bounded() -> None:
    lengths = [1]
    for _ in range(12):
        lengths.append(next_length(lengths[-1], 0.01))
    assert lengths[:8] == [1, 2, 4, 8, 16, 32, 64, 100] and lengths[-1] == 100
    assert next_length(4096, 1e-6) == LONGEST_WINDOW
    assert next_length(50, 30.0) == 1
    assert next_length(50, 0.001, 7) == 7 and next_length(50, 0.5, 7) == 2


class Clock:
    """A world of one whose time is the test's."""

    def __init__(self) -> None:
        self.seconds, self.asked = 0.0, 0

    def now(self) -> float:
        return self.seconds

    def gather(self, values: Any) -> Any:
        self.asked += 1
        return values.unsqueeze(0)


def evaluated(
    clock: Clock, interruption: StopPoll, stop: Stop, batches: int, each: float, told: float
) -> bool:
    """Evaluate so many batches of `each` seconds; SIGTERM comes at `told`. Return whether it came to the end."""
    try:
        for _ in range(batches):
            interruption.check()
            clock.seconds += each
            if clock.seconds >= told:
                stop(SIGTERM)
    except EvaluationInterrupted as left:
        assert left.code == SIGTERM
        return False
    return True


@given(each=some.floats(1e-2, 100.0), told=some.floats(0.0, 1000.0))
def test_a_stop_leaves_an_evaluation_within_two_seconds_or_a_batch(
    each: float, told: float
) -> None:
    clock, stop = Clock(), Stop()
    batches = int((told + 4.0) / each) + 4
    assert not evaluated(clock, StopPoll(cast(World, clock), stop), stop, batches, each, told)
    assert clock.seconds <= max(told, 1.0) + 1.0 + 2 * each


@given(fast=some.floats(1e-4, 0.1), slow=some.floats(0.1, 20.0), first=some.integers(0, 2000))
def test_batches_that_get_slower_put_a_stop_off_by_no_more_than_some(
    fast: float, slow: float, first: int
) -> None:
    clock, stop = Clock(), Stop()
    interruption = StopPoll(cast(World, clock), stop)
    assert evaluated(clock, interruption, stop, first, fast, told=1e9)
    began = clock.seconds
    assert not evaluated(clock, interruption, stop, 100, slow, told=began)
    assert clock.seconds - began <= max(1.0, MOST_BATCHES * slow) + 1.0 + 2 * slow


@given(each=some.floats(1e-6, 1.0), batches=some.integers(1, 5000))
def test_ranks_talk_about_once_a_second_or_every_so_many_batches(each: float, batches: int) -> None:
    clock, stop = Clock(), Stop()
    interruption = StopPoll(cast(World, clock), stop)
    assert evaluated(clock, interruption, stop, batches, each, told=1e9)
    assert clock.asked <= MOST_BATCHES.bit_length() + 2 * clock.seconds + batches / MOST_BATCHES


def test_a_short_evaluation_is_never_left() -> None:
    clock, stop = Clock(), Stop()
    talks = []
    for _ in range(5):
        assert evaluated(
            clock, StopPoll(cast(World, clock), stop), stop, batches=8, each=0.1, told=0.0
        )
        talks.append(clock.asked)
        clock.asked = 0
    assert talks == [3] * 5


def test_a_time_limit_asks_for_a_stop_and_who_is_in_a_hurry_counts_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("rankzero.training.stop.time.monotonic", lambda: now)
    stop = Stop()
    stop.limit(2.0)
    assert stop.code == 0
    now += 121
    assert stop.code == TIME_LIMIT and stop.urgent == 0
    stop(SIGTERM)
    assert stop.code == stop.urgent == SIGTERM
    stop(PRUNED)
    assert stop.code == SIGTERM


def test_of_several_ranks_wishes_the_one_in_a_hurry_counts() -> None:
    assert most_urgent([0, 0]) == 0 and most_urgent([0, TIME_LIMIT]) == TIME_LIMIT
    assert most_urgent([TIME_LIMIT, SIGTERM, PRUNED, 0]) == SIGTERM


def slow_to_evaluate(**changes: Any) -> Experiment:
    """Return an experiment of 13 validation batches, one a quarter of a second."""
    found = {
        "train__batch_size": 4,
        "train__steps": 10,
        "train__eval_every": 5,
        "evaluation_seconds": 0.25,
    } | changes
    settings = {key.replace("__", "."): value for key, value in found.items()}
    return config.override(experiment_file.load(str(FIXTURES / "clocked.py"))(), settings)


def test_a_stop_amid_an_evaluation_leaves_a_checkpoint_that_owes_it(
    train: Trainer, tmp_path: Path
) -> None:
    experiment = slow_to_evaluate()
    straight = train(slow_to_evaluate(evaluation_seconds=0.0), tmp_path / "straight")
    stopped = train(experiment, tmp_path / "stopped", stop_at=5)
    assert (
        stopped.reason == "stopped by SIGTERM"
        and stopped.state.step == 5
        and stopped.state.evaluation_pending
    )
    (saved,) = [event for event in stopped.events if isinstance(event, CheckpointSaved)]
    assert saved.step == 5 and not saved.metrics and stopped.state.best is None
    assert not [event for event in stopped.events if isinstance(event, Evaluated)]
    on = train(slow_to_evaluate(evaluation_seconds=0.0), tmp_path / "stopped")
    assert (
        evaluations(on.events) == evaluations(straight.events) and len(evaluations(on.events)) == 2
    )
    assert on.state.best == straight.state.best and not on.state.evaluation_pending
    again = [event for event in on.events if isinstance(event, CheckpointSaved)]
    assert [(event.step, event.metrics) for event in again] == list(
        evaluations(straight.events).items()
    )


@pytest.mark.parametrize("code", PATIENT)
def test_who_is_in_no_hurry_waits_for_an_evaluation(
    train: Trainer, tmp_path: Path, code: int
) -> None:
    limited = train(slow_to_evaluate(), tmp_path, stop_at=5, code=code)
    assert limited.reason == REASONS[code] and not limited.state.evaluation_pending
    assert list(evaluations(limited.events)) == [5]


def test_an_evaluation_that_is_made_anew_sees_what_the_step_before_left(
    train: Trainer, tmp_path: Path
) -> None:
    """A LightningModule, for one, learns from `schedule` which step it is."""
    seen: list[int] = []

    class Counting(type(slow_to_evaluate())):  # type: ignore[misc]
        def schedule(self, step: int, total_steps: int) -> float:
            seen.append(step)
            return float(super().schedule(step, total_steps))

        def measure(self, model: Any, batch: Any) -> Any:
            return {**super().measure(model, batch), "last": torch.tensor(float(seen[-1]))}

    slow, quick = (
        Counting(**{**vars(slow_to_evaluate()), "evaluation_seconds": seconds})
        for seconds in (0.25, 0.0)
    )
    train(slow, tmp_path, stop_at=5)
    seen.append(-1)
    assert [found["val/last"] for found in evaluations(train(quick, tmp_path).events).values()] == [
        4.0,
        9.0,
    ]


def test_a_step_after_an_evaluation_that_was_made_anew_is_compiled_as_if_it_came_first(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs for any size of a batch compute other bits than those for one size."""
    compiled: list[bool] = []
    plain = torch.nn.Module.compile

    def note(module: Any, inputs: list[Any]) -> Any:
        if torch.is_grad_enabled():
            compiled.append(any(isinstance(one, torch.SymInt) for one in inputs))
        return module

    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: plain(module, backend=note))
    train(slow_to_evaluate(train__compile=True), tmp_path, stop_at=5)
    torch.compiler.reset()
    train(slow_to_evaluate(train__compile=True, evaluation_seconds=0.0), tmp_path)
    assert compiled == [False, False]


def evaluations(events: list[Any]) -> dict[int, dict[str, float]]:
    return {event.step: dict(event.metrics) for event in events if isinstance(event, Evaluated)}
