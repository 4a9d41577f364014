"""How often ranks talk, and how soon a long evaluation is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rankzero import config, experiment_file
from rankzero.events import CheckpointSaved, Evaluated
from rankzero.experiment import Experiment
from rankzero.train.pace import LONGEST_WINDOW, Interruption, Left, next_length
from rankzero.train.stop import PRUNED, SIGTERM, TIME_LIMIT, Stop
from rankzero.train.world import World
from train.conftest import FIXTURES, Trainer


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


def evaluated(clock: Clock, interruption: Interruption, stop: Stop, batches: int, each: float, told: float) -> bool:
    """Evaluate so many batches of `each` seconds; SIGTERM comes at `told`. Return whether it came to the end."""
    interruption.begin()
    try:
        for _ in range(batches):
            interruption.check()
            clock.seconds += each
            if clock.seconds >= told:
                stop(SIGTERM)
    except Left as left:
        assert left.code == SIGTERM
        return False
    return True


@given(each=some.floats(1e-3, 100.0), told=some.floats(0.0, 1000.0))
def test_a_stop_leaves_an_evaluation_within_two_seconds_or_a_batch(each: float, told: float) -> None:
    clock, stop = Clock(), Stop()
    batches = int((told + 4.0) / each) + 4
    assert not evaluated(clock, Interruption(cast(World, clock), stop), stop, batches, each, told)
    assert clock.seconds <= max(told, 1.0) + 1.0 + 2 * each


@given(each=some.floats(1e-6, 1.0), batches=some.integers(1, 5000))
def test_ranks_talk_about_once_a_second(each: float, batches: int) -> None:
    clock, stop = Clock(), Stop()
    interruption = Interruption(cast(World, clock), stop)
    assert evaluated(clock, interruption, stop, batches, each, told=1e9)
    doublings = LONGEST_WINDOW.bit_length()
    assert clock.asked <= doublings + 2 * clock.seconds + batches / LONGEST_WINDOW
    clock.asked, began = 0, clock.seconds
    assert evaluated(clock, interruption, stop, batches, each, told=1e9)
    assert clock.asked <= doublings + 2 * (clock.seconds - began) + batches / LONGEST_WINDOW


def test_a_short_evaluation_is_never_left_and_soon_not_even_talked_about() -> None:
    clock, stop = Clock(), Stop()
    interruption, talks = Interruption(cast(World, clock), stop), []
    for _ in range(5):
        assert evaluated(clock, interruption, stop, batches=8, each=0.1, told=0.0)
        talks.append(clock.asked)
        clock.asked = 0
    assert talks == [3, 0, 0, 0, 0]


def test_a_time_limit_asks_for_a_stop_and_any_other_wish_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("rankzero.train.stop.time.monotonic", lambda: now)
    stop = Stop()
    stop.limit(2.0)
    assert stop.code == 0
    now += 121
    assert stop.code == TIME_LIMIT and stop.urgent == 0
    stop(SIGTERM)
    assert stop.code == stop.urgent == SIGTERM
    stop(PRUNED)
    assert stop.code == SIGTERM


def slow_to_evaluate(**changes: Any) -> Experiment:
    """Return an experiment of 13 validation batches, one a quarter of a second."""
    found = {"train__batch_size": 4, "train__steps": 10, "train__eval_every": 5, "evaluation_seconds": 0.25} | changes
    settings = {key.replace("__", "."): value for key, value in found.items()}
    return config.override(experiment_file.load(str(FIXTURES / "clocked.py"))(), settings)


def test_a_stop_amid_an_evaluation_leaves_a_checkpoint_that_owes_it(train: Trainer, tmp_path: Path) -> None:
    experiment = slow_to_evaluate()
    straight = train(slow_to_evaluate(evaluation_seconds=0.0), tmp_path / "straight")
    stopped = train(experiment, tmp_path / "stopped", stop_at=5)
    assert stopped.reason == "stopped by SIGTERM" and stopped.state.step == 5 and stopped.state.owed
    (saved,) = [event for event in stopped.events if isinstance(event, CheckpointSaved)]
    assert saved.step == 5 and not saved.metrics and stopped.state.best is None
    assert not [event for event in stopped.events if isinstance(event, Evaluated)]
    on = train(slow_to_evaluate(evaluation_seconds=0.0), tmp_path / "stopped")
    assert evaluations(on.events) == evaluations(straight.events) and len(evaluations(on.events)) == 2
    assert on.state.best == straight.state.best and not on.state.owed
    again = [event for event in on.events if isinstance(event, CheckpointSaved)]
    assert [(event.step, event.metrics) for event in again] == list(evaluations(straight.events).items())


def test_the_runs_own_limit_of_time_waits_for_an_evaluation(train: Trainer, tmp_path: Path) -> None:
    limited = train(slow_to_evaluate(evaluation_seconds=0.1), tmp_path, stop_at=5, code=TIME_LIMIT)
    assert limited.reason == "reached train.max_minutes" and not limited.state.owed
    assert list(evaluations(limited.events)) == [5]


def evaluations(events: list[Any]) -> dict[int, dict[str, float]]:
    return {event.step: dict(event.metrics) for event in events if isinstance(event, Evaluated)}
