"""Means, ratios, windows, throughput."""

import contextlib
import dataclasses
import math
import pickle
import re

import pytest
import scipy.stats
import torch
from torch import nn

from rankzero.errors import UserError
from rankzero.events import Noticed, StepsLogged
from rankzero.metric_names import STEP_SECONDS
from rankzero.ranks import Ranks
from rankzero.ratio import Ratio
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.metrics.evaluation_metrics import EvaluationMetrics
from rankzero.training.metrics.reporter import Reporter
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.metrics.window import WindowStats, check_metrics, reduce_window
from rankzero.training.stop import StopCode
from rankzero.training.strategies.base import MicroBatchStep
from support.training import tiny

ALONE = World(Ranks(), torch.device("cpu"))


def test_means_over_ragged_batches_are_means_over_samples() -> None:
    batches = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0]), torch.tensor([4.0, 6.0])]
    totals = EvaluationMetrics(ALONE, 1, tiny())
    for batch in batches:
        totals.add({"loss": batch.mean()}, len(batch))
    totals.add({"loss": torch.tensor(math.nan)}, 0)
    assert totals.reduce()["loss"] == pytest.approx(torch.cat(batches).mean().item())


def test_an_evaluation_without_samples_is_refused() -> None:
    with pytest.raises(UserError, match=r"got no samples: let __iter__ .* begin again"):
        EvaluationMetrics(ALONE, 1, tiny()).reduce()


def test_a_window_reports_each_steps_values() -> None:
    columns = {
        "loss": [torch.tensor(float(step)) for step in range(3)],
        "accuracy": [torch.tensor(step / 10) for step in range(3)],
    }
    report = reduce_window(ALONE, columns, stop_code=0, seconds=1.5, data_wait_seconds=0.3)
    assert report.values["loss"] == [0.0, 1.0, 2.0]
    assert report.values["accuracy"] == pytest.approx([0.0, 0.1, 0.2])
    assert (report.steps, report.step_seconds, report.data_wait_seconds, report.stop_code) == (
        3,
        0.5,
        0.3,
        0,
    )


def test_ratios_of_a_window_are_divided_once() -> None:
    columns = {
        "loss": [Ratio(torch.tensor(float(step)), 4).detach() for step in (1, 2)],
        "iou": [
            Ratio(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2.0, 0.0, 2.0])).detach(),
            Ratio(torch.tensor([1, 0, 0]), torch.tensor([0, 0, 0])).detach(),
        ],
        "accuracy": [torch.tensor(0.5), torch.tensor(0.25)],
    }
    window = reduce_window(ALONE, columns, 0, 1.0, 0.0)
    assert window.values["loss"] == [0.25, 0.5] and window.values["accuracy"] == [0.5, 0.25]
    assert window.values["iou"] == pytest.approx([0.75, math.nan], nan_ok=True)
    assert window.quotients["iou"][0].tolist() == pytest.approx([0.5, math.nan, 1.0], nan_ok=True)


def test_a_nan_loss_in_the_last_step_is_not_finite() -> None:
    def is_finite(*losses: float) -> bool:
        columns = {"loss": [torch.tensor(loss) for loss in losses]}
        return reduce_window(ALONE, columns, 0, 1.0, 0.0).is_finite

    assert is_finite(float("inf"), 1.0), "fp16's loss scaler skips such a step"
    assert not is_finite(1.0, float("nan"))
    turns = {f"{turn}/loss": [torch.tensor(loss)] for turn, loss in (("a", 1.0), ("b", math.nan))}
    assert not reduce_window(ALONE, turns, 0, 1.0, 0.0).is_finite
    assert reduce_window(ALONE, {**turns, "b/loss": turns["a/loss"]}, 0, 1.0, 0.0).is_finite


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"accuracy": torch.tensor(1.0)}, "add the key 'loss'"),
        ({"loss": torch.ones(3)}, "0-d tensor"),
        ({"loss": torch.ones(1)}, "0-d tensor"),
        (
            {"loss": torch.tensor(1.0), "far": torch.tensor(1.0, device="meta")},
            "is on meta, the loss on cpu",
        ),
        ({"loss": torch.tensor(1.0), "text": "x"}, "0-d tensor"),
        ({"loss": torch.tensor(1.0), "auroc": (1, 2)}, "got tuple, and metrics() has no object"),
        (torch.tensor(1.0), "must return a mapping"),
        ({"loss": Ratio(torch.ones(2), 3)}, "the numerator must be a 0-d tensor, got shape (2,)"),
        ({"loss": Ratio(2.0, 3)}, "the numerator must be a 0-d tensor, got 2.0"),
        ({"loss": Ratio(torch.tensor(1.0), "x")}, "the denominator must be a tensor or a number"),
        (
            {"loss": torch.tensor(1.0), "iou": Ratio(torch.ones(2), torch.ones(3))},
            "have the shapes (2,) and (3,): make them equal",
        ),
        (
            {"loss": torch.tensor(1.0), "far": Ratio(torch.ones(2, device="meta"), 1)},
            "is on meta, the loss on cpu",
        ),
        (
            {"loss": Ratio(torch.tensor(1.0), torch.ones((), requires_grad=True) * 2)},
            "its denominator depends on the model: use denominator.detach()",
        ),
    ],
)
def test_a_wrong_result_of_measure_is_refused_with_advice(metrics: object, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        check_metrics(metrics)  # type: ignore[arg-type]


def test_measure_must_return_the_same_metrics_in_all_windows() -> None:
    job, state = build(tiny(), ALONE)
    reporter = Reporter(job, state, RunTotals(), float)
    for step in range(2):
        reporter.start_window()
        reporter.add({"loss": torch.tensor(float(step)), "extra": torch.tensor(1.0)})
        window, _ = reporter.report(StopCode.NONE, actions_due=False)
        assert window.values["loss"] == [step], "a window starts empty"
    values = {name: torch.tensor(1.0) for name in ("loss", "extra", "late")}
    with pytest.raises(UserError, match=r"did not return 'extra'.*LightningModule must log"):
        reporter.add({"loss": values["loss"]})
    with pytest.raises(UserError, match="returned 'late', which it did not return before: return"):
        reporter.add(values)


def test_window_keeps_no_memory_of_a_model() -> None:
    logits = torch.rand(200, 200, requires_grad=True)
    values = {"loss": logits.sum(), "part": logits[3, 4], "ratio": Ratio(logits[0].sum(), 2)}
    step = MicroBatchStep(lambda model, batch: values, contextlib.nullcontext(), None, 1)
    kept = step.forward_backward(nn.Identity(), None)
    assert kept["part"].item() == logits[3, 4].item()
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in kept.values())
    assert not any(value.requires_grad for value in kept.values())


def test_measure_must_return_the_same_metrics_in_a_whole_evaluation() -> None:
    totals, one = EvaluationMetrics(ALONE, 1, tiny()), torch.tensor(1.0)
    totals.add({"loss": one, "extra": one}, 2)
    with pytest.raises(UserError, match="did not return 'extra', which it returned before: return"):
        totals.add({"loss": one}, 2)
    with pytest.raises(UserError, match="returned 'late', which it did not return before: return"):
        totals.add({"loss": one, "extra": one, "late": one}, 2)


def figures(*windows: float) -> dict[str, float]:
    """Return the summary of windows of 100 samples that took these seconds."""
    totals = RunTotals()
    for seconds in windows:
        totals.add(WindowStats({}, StopCode.NONE, seconds, [0.0], [0.0], 1), samples=100)
    return totals.summary()


def test_throughput_skips_the_warm_up_and_has_an_interval() -> None:
    found = figures(9.0, 5.0, 1.0, 1.0, 2.0)
    assert found["samples_per_second"] == pytest.approx(300 / 4)
    residuals = [100 - 75, 100 - 75, 100 - 150]
    expected = scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(residuals) / (4 / 3)
    assert found["samples_per_second_half_width"] == pytest.approx(expected)
    short = figures(1.0, 1.0, 1.0, 1.1, 0.001, 1.0, 0.9)
    assert short["samples_per_second_half_width"] < 100 < short["samples_per_second"]


def test_throughput_is_missing_before_the_first_window_after_the_warm_up() -> None:
    assert not {"samples_per_second", "samples_per_second_half_width"} & figures(1.0, 1.0).keys()
    assert figures(1.0, 1.0, 2.0)["samples_per_second"] == 50.0
    assert "samples_per_second_half_width" not in figures(1.0, 1.0, 2.0)


def test_a_suspended_window_is_no_speed_and_one_notice() -> None:
    now, suspended = 0.0, 0.0
    world = World(Ranks(), torch.device("cpu"), lambda: now)
    job, state = build(tiny(train__log_every=2), world)
    job = dataclasses.replace(job, suspended=lambda: suspended)
    totals = RunTotals()
    reporter = Reporter(job, state, totals, float)
    notices, speeds = list[str](), list[float]()
    # An evaluation before a window may be suspended, too. A speed is of two steps here.
    for before, inside in [(0, 0)] * 6 + [(0, 60), (0, 0), (60, 0)] + [(0, 0)] * 3:
        now, suspended = now + before, suspended + before
        reporter.start_window()
        reporter.add({"loss": torch.tensor(1.0)})
        now, suspended = now + 1 + inside, suspended + inside
        state.step += 1
        _, events = reporter.report(StopCode.NONE, actions_due=False)
        notices += [event.text for event in events if isinstance(event, Noticed)]
        logged = [event.metrics for event in events if isinstance(event, StepsLogged)]
        speeds += [one[STEP_SECONDS][0] for one in logged if STEP_SECONDS in one]
    assert notices == ["the job stood still for 60 s or more: its times leave it out"]
    found = totals.summary()
    assert found["samples_per_second"] == 32 and found["samples_per_second_half_width"] == 0
    assert found["train_seconds"] == 12 and speeds == [1.0] * 6


def test_a_rank_that_waits_for_rank_0s_checkpoint_does_not_count_it() -> None:
    now = pause = 0.0

    def meet() -> None:
        nonlocal now, pause
        now, pause = now + pause, 0.0

    class Meeting(World):
        def all(self, answer: bool) -> bool:
            meet()
            return answer

    job, state = build(tiny(), Meeting(Ranks(), torch.device("cpu"), lambda: now))
    reporter = Reporter(job, state, RunTotals(), float)
    pause = 5.0
    reporter.start_window()
    meet()  # in the step's all-reduce
    now += 1
    reporter.add({"loss": torch.tensor(1.0)})
    window, _ = reporter.report(StopCode.NONE, actions_due=False)
    assert window.seconds == 1


def test_all_ranks_leave_out_what_the_slowest_knows_of_its_suspension() -> None:
    window = WindowStats({}, StopCode.NONE, 95.0, [94.0, 0.0], [], 2, suspended_seconds=90.0)
    # It is known to ten seconds at most, so the window before bounds it.
    found = window.without_suspension(1.5)
    assert (found.seconds, found.data_waits) == (3.0, [3.0, 0.0])
    assert window.without_suspension(math.inf).seconds == 5.0, "there is no window before"
    late = dataclasses.replace(window, suspended_seconds=99.0)
    assert late.without_suspension(1.5).seconds == 3.0, "a part of it was in no window"
    assert late.without_suspension(math.inf).seconds == 95.0
    one = reduce_window(ALONE, {"loss": [torch.tensor(1.0)]}, 0, 95.0, 0.0, suspended_seconds=90.0)
    assert one.suspended_seconds == 90.0


def window_of_two(forwards: list[float], data_waits: list[float]) -> WindowStats:
    """Return a window of a second with these times of two ranks."""
    return WindowStats({}, StopCode.NONE, 1.0, forwards=forwards, data_waits=data_waits, steps=1)


def test_a_slow_start_of_a_rank_makes_no_straggler() -> None:
    totals = RunTotals()
    totals.add(window_of_two([0.01, 2.0], [0.0, 0.9]), samples=100)
    for number in range(8):
        assert "straggler_rank" not in totals.summary(), number
        totals.add(window_of_two([0.01, 0.01], [0.0, 0.0]), samples=100)
    assert "straggler_rank" not in totals.summary()
    for _ in range(8):
        totals.add(window_of_two([0.01, 0.01], [0.5, 0.0]), samples=100)
    found = totals.summary()
    assert found["straggler_rank"] == 0
    assert found["straggler_data_wait_fraction"] == pytest.approx(4.0 / 15.0)


def test_the_totals_of_a_long_run_take_no_more_memory() -> None:
    totals, window = RunTotals(), WindowStats({}, StopCode.NONE, 1.0, [0.0], [0.0], 1)

    def size_after(windows: int) -> int:
        for _ in range(windows):
            totals.add(window, 100, {"tokens_per_second": 5.0})
        return len(pickle.dumps(totals))

    before = size_after(3)
    assert size_after(1000) <= before + 20
    assert totals.summary()["tokens_per_second"] == pytest.approx(5.0)
