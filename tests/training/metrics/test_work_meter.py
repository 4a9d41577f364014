"""Tokens and FLOPs of a training, and the peaks of GPUs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankzero.events import Event
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.loop import fit
from rankzero.training.metrics.peak_flops import peak_flops
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.metrics.work_meter import WorkMeter, of
from rankzero.training.stop import StopCode, StopRequest
from rankzero.training_position import Progress
from support import two_ranks
from support.paths import FIXTURES
from support.training import Trained, Trainer
from support.two_ranks import Case, launched, seen

COUNTED = FIXTURES / "counted.py"


def mean(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    # Drawn outside PyTorch, where tensors without content draw nothing.
    return {"loss": model(batch).mean() * (1 + np.random.rand())}


def samples(batch: Any) -> int:
    return len(batch[0]) if isinstance(batch, list | tuple) else len(batch)


def watched(meter: WorkMeter, *batches: Tensor) -> list[str]:
    notices: list[str] = []
    assert len(list(meter.watch(iter(batches), notices.append))) == len(batches)
    return notices


def test_flops_of_a_forward_and_backward_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 2))
    drawn = np.random.get_state(legacy=True)[2], random.getstate()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    meter = WorkMeter(samples, 1.0, 1e6, model, [mean])
    assert not watched(meter, torch.ones(16, 8), torch.ones(4, 8))
    # Two products per weight in the forward, two for weights and two for inputs in the backward,
    # except for the inputs of the model.
    per_sample = 2 * (2 * 8 * 32 + 3 * 32 * 2)
    assert meter.rates(100, 2.0)["mfu"] == pytest.approx(per_sample * 50 / 1e6)
    assert torch.equal(torch.get_rng_state(), before), "counting drew random numbers"
    assert (np.random.get_state(legacy=True)[2], random.getstate()) == drawn
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flops_are_those_of_the_parameters_that_are_trained() -> None:
    # What `optimizer()` leaves out is frozen once the copy exists, and `frozen` changes it later.
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 2))
    meter = WorkMeter(samples, 1.0, 1.0, model, [mean])
    found = []
    for trained in (("0.weight", "1.weight"), ("1.weight",), ()):
        meter.train_only(trained)
        assert not watched(meter, torch.ones(4, 8))
        found.append(meter.rates(1, 1.0)["mfu"])
    forward = 2 * (8 * 32 + 32 * 2)  # alone, in a turn that trains nothing
    assert found == [2 * (2 * 8 * 32 + 3 * 32 * 2), forward + 2 * 32 * 2, forward]


def test_flops_are_those_of_a_token_if_tokens_are_counted() -> None:
    meter = WorkMeter(lambda batch: int(batch.numel()), 0.5, 1e6, nn.Linear(8, 1), [mean])
    watched(meter, torch.ones(4, 8), torch.ones(2, 8))
    assert meter.read() == 0.5 * 48 and meter.read() == 0
    # A sample has 8 tokens, and 8 weights with two products each, in the forward and for weights.
    assert meter.rates(100, 2.0) == {"tokens_per_second": 50, "mfu": 50 * 4 / 1e6}


def test_a_model_without_meta_kernels_has_a_notice_and_no_utilisation() -> None:
    def reads(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": model(batch).mean() * (2 if batch.sum().item() else 1)}

    meter = WorkMeter(samples, 1.0, 1e6, nn.Linear(8, 1), [reads])
    (notice,) = watched(meter, torch.ones(4, 8), torch.ones(4, 8))
    assert notice.startswith("throughput/mfu is unknown: ") and "mfu" not in meter.rates(1, 1.0)


def test_a_lazy_model_has_no_utilisation() -> None:
    meter = WorkMeter(samples, 1.0, 1e6, nn.LazyLinear(1), [mean])
    assert not watched(meter, torch.ones(4, 8)) and "mfu" not in meter.rates(1, 1.0)


def test_nothing_is_wrapped_if_nothing_is_counted() -> None:
    batches: Iterator[Any] = iter(())
    assert WorkMeter().watch(batches, print) is batches


def test_who_counts_no_tokens_or_has_helpers_gets_no_copy_of_the_model() -> None:
    world = World(Ranks(), torch.device("cuda"))
    model = nn.Linear(8, 1)
    plain, counted = two_ranks.layered(), two_ranks.layered(COUNTED)
    start = Progress(0, 1, 0, True)
    for experiment, at in ((plain, start), (counted, replace(start, helpers={"t": model}))):
        assert of(experiment, experiment.measure, model, world, at)._model is None


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("Some Accelerator", "bf16", None),
    ],
)
def test_peaks_of_gpus(name: str, precision: str, teraflops: float | None) -> None:
    assert peak_flops(name, precision) == (None if teraflops is None else teraflops * 1e12)


@pytest.mark.parametrize(
    ("strategy", "ranks", "gpus", "precision"), [("dp", 1, 2, "bf16"), ("ddp", 4, 4, "fp32")]
)
def test_peak_is_that_of_all_gpus_and_of_a_model_in_bf16(
    monkeypatch: pytest.MonkeyPatch, strategy: str, ranks: int, gpus: int, precision: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    experiment = two_ranks.layered(COUNTED, train__strategy=strategy, train__precision=precision)
    world = World(Ranks(0, ranks), torch.device("cuda"))
    start = Progress(0, 1, 0, True)
    model = nn.Linear(8, 1).bfloat16()
    meter = of(experiment, experiment.measure, model, world, start)
    assert meter._peak == gpus * 121e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")  # no bf16
    meter = of(experiment, experiment.measure, model.half(), world, start)
    assert meter._peak == gpus * 65e12


def test_tokens_of_all_ranks_are_reported(tmp_path: Path) -> None:
    changes = {"train__log_every": 2}
    cases = [
        Case(name, {"train__strategy": name, **changes}, file=COUNTED) for name in ("ddp", "tp")
    ]
    folder = launched(tmp_path, 2, cases)
    for case in cases:
        logged = seen(folder, case.name)["speeds"]
        for found in logged:
            (tokens,) = found["throughput/tokens_per_second"]
            (samples,) = found["throughput/samples_per_second"]
            assert tokens == pytest.approx(8 * samples), case.name
        assert len(logged) == 4 and "throughput/mfu" not in logged[0]


def test_tokens_per_second_of_a_run_is_in_its_summary(train: Trainer) -> None:
    experiment: Any = two_ranks.layered(COUNTED, train__log_every=1)
    found = train(experiment).totals.summary()
    assert found["tokens_per_second"] == pytest.approx(8 * found["samples_per_second"])


def test_counting_flops_changes_no_bit_of_a_training(train: Trainer) -> None:
    experiment = two_ranks.layered(dropout=0.3)
    straight = train(experiment)
    meter = WorkMeter(samples, 1.0, 1e9, experiment.model(), [experiment.measure])
    job, state = build(experiment, World(Ranks(), torch.device("cpu")))
    events: list[Event] = []
    job = replace(job, work_meter=meter)
    fit(job, state, events.append, StopRequest(), None, RunTotals())
    counted = Trained(job, state, events, RunTotals(), StopCode.NONE)
    assert counted.series("train/loss") == straight.series("train/loss")
    shares = counted.series("throughput/mfu")
    assert list(shares) == list(range(1, 9)) and min(shares.values()) > 0
    assert not straight.series("throughput/mfu"), "a CPU has no known peak"
