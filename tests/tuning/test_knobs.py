"""The knobs that `--knobs` chooses, and those that are varied without it."""

from __future__ import annotations

import dataclasses

import pytest

from rankzero import Choice, Experiment, Train
from rankzero.errors import UserError
from rankzero.search_ranges import LogUniform
from rankzero.tuning import knobs
from rankzero.tuning.space import make_space
from rankzero.tuning.trials.describe import ExperimentDescription

CPU = ExperimentDescription("Mine", (), {}, 0.5, 2, 1000, True, ("fp32",), "cpu", "")
GPU = dataclasses.replace(CPU, device="NVIDIA H100", gpus=2, loads=True, images=True)


class Mine(Experiment):
    train: Train = Train(batch_size=32)
    width: int = 8
    search = {"width": Choice(8, 16), "train.workers": Choice(0, 2)}


SPACE = make_space(Mine(train=Train(batch_size=32, workers=0)), 2, 0.5, ("fp32", "bf16"), 1000)


def test_only_the_knobs_that_are_named_are_turned() -> None:
    space = knobs.turned(SPACE, knobs.parse(" compile,lr"))
    assert space.batch_sizes == (32,) and space.precisions == ("fp32",)
    assert space.factors == SPACE.factors and space.knobs == ("compile",)
    assert not {"lr_factor"} & set(knobs.turned(SPACE, knobs.parse("batch")).parameters())


def test_the_experiments_own_ranges_are_always_varied() -> None:
    class Named(Mine):
        search = {
            "lr": LogUniform(1e-4, 1e-2),
            "train.batch_size": Choice(16, 32),
            "train.precision": Choice("fp32", "bf16"),
        }

    space = make_space(Named(), 1, 0.5, samples=1000)
    assert knobs.turned(space, knobs.parse("compile")).parameters() == space.parameters()


def test_a_knob_that_the_experiment_searches_is_trained() -> None:
    space = knobs.turned(SPACE, knobs.parse("workers,compile"))
    assert space.knobs == ("compile",) and "train.workers" in space.parameters()


def test_compression_is_trained() -> None:
    space = knobs.turned(SPACE, knobs.parse("ddp.compression"))
    assert space.parameters()["train.ddp.compression"] == Choice("none", "bf16")
    assert space.reference_parameters()["train.ddp.compression"] == "none"
    with pytest.raises(UserError, match="needs processes with"):
        knobs.turned(dataclasses.replace(SPACE, devices=(1,)), knobs.parse("ddp.compression"))


def test_an_unknown_knob_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no knob is called 'colour': use batch, .*micro_batch"):
        knobs.parse("batch,colour")


def test_the_default_depends_on_the_machine_and_the_data() -> None:
    trained = ("batch", "lr", "precision")
    assert knobs.defaults(CPU, SPACE) == trained
    assert knobs.defaults(dataclasses.replace(CPU, loads=True), SPACE) == (*trained, "workers")
    assert knobs.defaults(GPU, SPACE) == (*trained, "workers", "compile", "channels_last")
    piped = make_space(Mine(train=Train(strategy="pp", workers=0)), 2, 0.5)
    assert knobs.defaults(GPU, piped) == (*trained, "workers")
