"""How often ranks exchange requests to stop, and how soon one interrupts an evaluation."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
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
    EvaluationInterrupted,
    StopCode,
    StopPoll,
    StopRequest,
    handle_signals,
    most_urgent,
    next_interval,
)
from rankzero.training_position import Progress
from support.paths import FIXTURES
from support.training import Trainer


def test_windows_grow_to_a_second_and_stay_bounded() -> None:
    lengths = [1]
    for _ in range(12):
        lengths.append(next_interval(lengths[-1], 0.01))
    assert lengths[:8] == [1, 2, 4, 8, 16, 32, 64, 100] and lengths[-1] == 100
    assert next_interval(4096, 1e-6) == LONGEST_WINDOW
    assert next_interval(50, 30.0) == 1
    assert next_interval(50, 0.001, 7) == 7 and next_interval(50, 0.5, 7) == 2


class Clock:
    """A world of one rank with the test's clock."""

    def __init__(self) -> None:
        self.seconds, self.asked = 0.0, 0

    def now(self) -> float:
        return self.seconds

    def gather(self, values: Any) -> Any:
        self.asked += 1
        return values.unsqueeze(0)


def evaluated(
    clock: Clock, poll: StopPoll, stop: StopRequest, batches: int, each: float, signalled_at: float
) -> bool:
    """Evaluate batches of `each` seconds, with SIGTERM at `signalled_at`. Return if it finished."""
    try:
        for _ in range(batches):
            poll.check()
            clock.seconds += each
            if clock.seconds >= signalled_at:
                stop.request(StopCode.SIGTERM)
    except EvaluationInterrupted as interrupted:
        assert interrupted.code == StopCode.SIGTERM
        return False
    return True


@given(each=some.floats(1e-2, 100.0), signalled_at=some.floats(0.0, 1000.0))
def test_a_stop_interrupts_an_evaluation_within_two_seconds_or_a_batch(
    each: float, signalled_at: float
) -> None:
    clock, stop = Clock(), StopRequest()
    batches = int((signalled_at + 4.0) / each) + 4
    assert not evaluated(
        clock, StopPoll(cast(World, clock), stop), stop, batches, each, signalled_at
    )
    assert clock.seconds <= max(signalled_at, 1.0) + 1.0 + 2 * each


@given(fast=some.floats(1e-4, 0.1), slow=some.floats(0.1, 20.0), first=some.integers(0, 2000))
def test_batches_that_get_slower_delay_a_stop_by_a_bounded_number(
    fast: float, slow: float, first: int
) -> None:
    clock, stop = Clock(), StopRequest()
    poll = StopPoll(cast(World, clock), stop)
    assert evaluated(clock, poll, stop, first, fast, signalled_at=1e9)
    began = clock.seconds
    assert not evaluated(clock, poll, stop, 100, slow, signalled_at=began)
    assert clock.seconds - began <= max(1.0, MOST_BATCHES * slow) + 1.0 + 2 * slow


@given(each=some.floats(1e-6, 1.0), batches=some.integers(1, 5000))
def test_ranks_poll_about_once_a_second_or_every_32_batches(each: float, batches: int) -> None:
    clock, stop = Clock(), StopRequest()
    poll = StopPoll(cast(World, clock), stop)
    assert evaluated(clock, poll, stop, batches, each, signalled_at=1e9)
    assert clock.asked <= MOST_BATCHES.bit_length() + 2 * clock.seconds + batches / MOST_BATCHES


def test_a_short_evaluation_is_never_interrupted() -> None:
    clock, stop = Clock(), StopRequest()
    talks = []
    for _ in range(5):
        assert evaluated(
            clock, StopPoll(cast(World, clock), stop), stop, batches=8, each=0.1, signalled_at=0.0
        )
        talks.append(clock.asked)
        clock.asked = 0
    assert talks == [3] * 5


def test_an_urgent_request_replaces_the_time_limits() -> None:
    now = 100.0
    stop = StopRequest(clock=lambda: now)
    stop.limit_minutes(2.0)
    assert stop.code == StopCode.NONE
    now += 121
    assert stop.code == StopCode.TIME_LIMIT and stop.urgent_code == StopCode.NONE
    stop.request(StopCode.SIGTERM)
    assert stop.code == stop.urgent_code == StopCode.SIGTERM
    stop.request(StopCode.PRUNED)
    assert stop.code == StopCode.SIGTERM


def test_the_most_urgent_ranks_request_counts() -> None:
    time_limit, sigterm, pruned = StopCode.TIME_LIMIT, StopCode.SIGTERM, StopCode.PRUNED
    assert most_urgent([0, 0]) == StopCode.NONE and most_urgent([0, time_limit]) == time_limit
    assert most_urgent([time_limit, sigterm, pruned, 0]) == sigterm


def test_every_stop_code_but_none_has_a_reason() -> None:
    assert [bool(code.reason) for code in StopCode] == [False, *[True] * 7]


def slow_to_evaluate(**changes: Any) -> Experiment:
    """Return an experiment with 13 validation batches of a quarter of a second each."""
    found = {
        "train__batch_size": 4,
        "train__steps": 10,
        "train__eval_every": 5,
        "evaluation_seconds": 0.25,
    } | changes
    settings = {key.replace("__", "."): value for key, value in found.items()}
    return config.override(experiment_file.load(str(FIXTURES / "clocked.py"))(), settings)


def test_an_interrupted_evaluation_is_repeated_after_a_resume(
    train: Trainer, tmp_path: Path
) -> None:
    experiment = slow_to_evaluate()
    straight = train(slow_to_evaluate(evaluation_seconds=0.0), tmp_path / "straight")
    stopped = train(experiment, tmp_path / "stopped", stop_at=5)
    assert (
        stopped.stopped == StopCode.SIGTERM
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


@pytest.mark.parametrize("code", [StopCode.TIME_LIMIT, StopCode.PRUNED])
def test_a_patient_request_waits_for_an_evaluation(
    train: Trainer, tmp_path: Path, code: StopCode
) -> None:
    limited = train(slow_to_evaluate(), tmp_path, stop_at=5, code=code)
    assert limited.stopped == code and not limited.state.evaluation_pending
    assert list(evaluations(limited.events)) == [5]


def test_a_repeated_evaluation_has_the_progress_of_the_first(
    train: Trainer, tmp_path: Path
) -> None:
    class Counting(type(slow_to_evaluate())):  # type: ignore[misc]
        def measure(self, model: Any, batch: Any, at: Progress) -> Any:
            return {**super().measure(model, batch), "last": torch.tensor(float(at.step))}

    slow, quick = (
        Counting(**{**vars(slow_to_evaluate()), "evaluation_seconds": seconds})
        for seconds in (0.25, 0.0)
    )
    train(slow, tmp_path, stop_at=5)
    found = evaluations(train(quick, tmp_path).events).values()
    assert [metrics["val/last"] for metrics in found] == [5.0, 10.0]


def test_a_step_after_a_repeated_evaluation_is_compiled_for_one_batch_size(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for any batch size computes other bits than one for a single size."""
    compiled: list[bool] = []

    def note(module: Any, inputs: list[Any]) -> Any:
        if torch.is_grad_enabled():
            compiled.append(any(isinstance(one, torch.SymInt) for one in inputs))
        return module

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
    train(slow_to_evaluate(train__compile=True), tmp_path, stop_at=5)
    torch.compiler.reset()
    train(slow_to_evaluate(train__compile=True, evaluation_seconds=0.0), tmp_path)
    assert compiled == [False, False]


def evaluations(events: list[Any]) -> dict[int, dict[str, float]]:
    return {event.step: dict(event.metrics) for event in events if isinstance(event, Evaluated)}


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give this process its signal handlers back at the end."""
    numbers = [
        signal.Signals[f"SIG{name}"] for name in ("TERM", "INT", "HUP", "USR1", "USR2", "QUIT")
    ]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_sigusr2_prunes_only_what_a_search_wants_to_prune(tmp_path: Path) -> None:
    """submitit and Slurm send SIGUSR2 before they take the machine away."""
    plain, trial = StopRequest(), StopRequest()
    handle_signals(plain)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert plain.code == StopCode.SIGUSR2 and plain.code.reason == "stopped by SIGUSR2"
    handle_signals(trial, tmp_path / "pruned.txt")
    os.kill(os.getpid(), signal.SIGUSR2)
    assert trial.code == StopCode.SIGUSR2

    (tmp_path / "pruned.txt").write_text("worse than the others")
    handle_signals(trial := StopRequest(), tmp_path / "pruned.txt")
    os.kill(os.getpid(), signal.SIGUSR2)
    assert trial.code == StopCode.PRUNED
