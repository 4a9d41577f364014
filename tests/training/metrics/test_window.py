"""Means, windows, throughput."""

import pytest
import scipy.stats
import torch

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from rankzero.training.metrics.throughput import Throughput
from rankzero.training.metrics.window import EvaluationMeans, MetricWindow

ALONE = World(Ranks(), torch.device("cpu"))


def test_means_over_ragged_batches_are_means_over_samples() -> None:
    batches = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0]), torch.tensor([4.0, 6.0])]
    means = EvaluationMeans(ALONE)
    for batch in batches:
        means.add({"loss": batch.mean()}, len(batch))
    assert means.reduce()["loss"] == pytest.approx(torch.cat(batches).mean().item())


def test_a_window_reports_each_steps_values_and_then_is_empty() -> None:
    window = MetricWindow(ALONE)
    for step in range(3):
        window.add({"accuracy": torch.tensor(step / 10), "loss": torch.tensor(float(step))})
    report = window.reduce(stop_code=0, seconds=1.5, data_wait_seconds=0.3)
    assert report.values["loss"] == [0.0, 1.0, 2.0]
    assert report.values["accuracy"] == pytest.approx([0.0, 0.1, 0.2])
    assert (report.steps, report.step_seconds, report.data_wait_seconds, report.stop_code) == (
        3,
        0.5,
        0.3,
        0,
    )
    window.add({"accuracy": torch.tensor(0.0), "loss": torch.tensor(7.0)})
    assert window.reduce(0, 1.0, 0.0).values["loss"] == [7.0]


def test_a_nan_loss_in_the_last_step_is_not_finite() -> None:
    window = MetricWindow(ALONE)
    for loss in (float("inf"), 1.0):
        window.add({"loss": torch.tensor(loss)})
    assert window.reduce(0, 1.0, 0.0).is_finite, "fp16's loss scaler skips such a step"
    window.add({"loss": torch.tensor(float("nan"))})
    assert not window.reduce(0, 1.0, 0.0).is_finite


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
        (torch.tensor(1.0), "must return a mapping"),
    ],
)
def test_a_wrong_result_of_measure_is_refused_with_advice(metrics: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        MetricWindow(ALONE).add(metrics)  # type: ignore[arg-type]


def test_measure_must_return_the_same_metrics_every_time() -> None:
    window = MetricWindow(ALONE)
    window.add({"loss": torch.tensor(1.0), "extra": torch.tensor(1.0)})
    with pytest.raises(UserError, match="did not return 'extra'"):
        window.add({"loss": torch.tensor(1.0)})


def test_throughput_skips_the_warm_up_and_has_an_interval() -> None:
    throughput = Throughput(warmup_windows=2)
    for seconds in (9.0, 5.0, 1.0, 1.0, 2.0):
        throughput.add(100, seconds)
    assert throughput.samples_per_second == pytest.approx(300 / 4)
    rates = [100.0, 100.0, 50.0]
    expected = scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem(rates)
    assert throughput.half_width == pytest.approx(expected)


def test_throughput_is_none_before_the_first_window() -> None:
    throughput = Throughput(warmup_windows=1)
    throughput.add(10, 1.0)
    assert throughput.samples_per_second is None and throughput.half_width is None
    throughput.add(10, 2.0)
    assert throughput.samples_per_second == 5.0 and throughput.half_width is None
