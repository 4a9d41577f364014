"""Which functions take a Progress, decided by their signature."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from rankzero import Experiment, Progress, UserError
from rankzero.training_position import measure_at, takes_progress

AT = Progress(step=3, total_steps=10, epoch=1, training=True)


class Plain(Experiment):
    def measure(self, model: Any, batch: Any) -> Any:
        return "plain"


class Informed(Plain):
    def measure(self, model: Any, batch: Any, at: Progress) -> Any:
        return model, batch, at


class Optional(Plain):
    def measure(self, model: Any, batch: Any, at: Progress | None = None) -> Any:
        return at


class Smoothed(Plain):
    def measure(self, model: Any, batch: Any, smoothing: float = 0.1) -> Any:
        return smoothing


class Passing(Plain):
    def measure(self, *args: Any) -> Any:
        return super().measure(*args)


class Wrapped(Plain):
    @functools.wraps(Informed.measure)
    def measure(self, *args: Any) -> Any:
        return args


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Plain, False),
        (Informed, True),
        (Optional, True),
        (Smoothed, False),
        (Passing, False),
        (Wrapped, True),
    ],
)
def test_a_third_parameter_asks_for_progress(kind: type[Experiment], expected: bool) -> None:
    assert takes_progress(kind().measure) == expected


def test_measure_gets_progress_only_if_it_asks() -> None:
    assert measure_at(Informed().measure, AT)(1, 2) == (1, 2, AT)
    plain = Plain()
    assert measure_at(plain.measure, AT) == plain.measure, "nothing is wrapped"


@pytest.mark.parametrize(
    "measure", [lambda model: 0, lambda model, batch, at, more: 0, lambda model, batch, *, at: 0]
)
def test_another_number_of_parameters_is_refused(measure: Any) -> None:
    with pytest.raises(UserError, match=r"measure\(self, model, batch, at\), but its parameters"):
        takes_progress(measure)


def test_a_schedule_is_refused_by_its_own_name() -> None:
    with pytest.raises(UserError, match=r"^schedule must be schedule\(step, total\) or schedule\("):
        takes_progress(lambda step: 0, "schedule(step, total)")
