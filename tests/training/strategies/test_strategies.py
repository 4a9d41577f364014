"""Every strategy on two ranks: losses, checkpoints, refusals."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Train
from rankzero.ranks import Ranks, shards
from rankzero.run_store import checkpoint_files
from rankzero.training.checkpoints import restore
from rankzero.training.distributed import torch_compat
from rankzero.training.distributed.device import gpu_uuids
from rankzero.training.distributed.world import World
from rankzero.training.strategies import build
from rankzero.training.strategies.base import MicroBatchStep, Shard
from rankzero.training.strategies.pipeline import SCHEDULES, Pipeline
from rankzero.training.strategies.replicated import AutocastDataParallel, Replicated, single
from support import two_ranks
from support.two_ranks import Case, attempted_alone

DIVIDED = ("zero1", "fsdp", "tp", "pp")
STRATEGIES = ("ddp", *DIVIDED)
LEFT = (("ddp", 4, 1), ("zero1", 8, 0), ("fsdp", 4, 1), ("tp", 4, 0), ("pp", 4, 0))
"""Strategy, the step whose evaluation is interrupted, and the only rank that gets the signal."""
FP16: dict[str, Any] = {"train__precision": "fp16"}
NORMED: dict[str, Any] = {"train__clip": 0.05, "train__log_gradient_norm": True}
STATIC: dict[str, Any] = {"train__strategy": "ddp", "train__ddp__static_graph": True}
BY_FAR = {"goal__metric": "val/far/loss", "train__eval_every": 2}
RESTED = ("ddp", "zero1", "fsdp", "tp")
RESTS: dict[str, dict[str, Any]] = {
    "even": {"kept": 38, "train__drop_last": False},
    "uneven": {"kept": 35, "train__drop_last": False, "train__micro_batch": 1},
    "none": {"kept": 33, "train__drop_last": False},
}
"""Two batches of 16, and one of 6, 3 or 1: of that, rank 1 has three, one or no sample."""
CENTRED = {"train__strategy": "fsdp", "centred": True, "train__checkpoints__save_every": 1}
CASES = [
    *(Case(name, {"train__strategy": name}) for name in STRATEGIES),
    *(Case(f"{name}-again", {"train__strategy": name}, stop_at=3) for name in DIVIDED),
    Case("fsdp-centred", CENTRED),
    Case("fsdp-centred-again", CENTRED, stop_at=4),
    *(Case(f"{name}-clip", {"train__strategy": name, "train__clip": 0.05}) for name in STRATEGIES),
    *(
        Case(
            f"{name}-blocks",
            {"train__strategy": name, "blocks": True, "cut_at": "blocks.1", "plan": "none"},
        )
        for name in ("ddp", "fsdp", "pp")
    ),
    *(
        Case(
            f"{name}-decayed",
            {"train__strategy": name, "weight_decay": 3.0},
            stop_at=4,
            before={"weight_decay": 0.0},
        )
        for name in STRATEGIES
    ),
    *(
        Case(f"{name}-probe", {"train__strategy": name, "probe": "left out", **NORMED}, stop_at=3)
        for name in STRATEGIES
    ),
    Case("pp-by-layer", {"train__strategy": "pp", "by_layer": True}, stop_at=3),
    Case("tp-dropout", {"train__strategy": "tp", "dropout": 0.3}),
    *(
        Case(
            f"tp-dropout-after-{name}",
            {"train__strategy": "tp", "dropout": 0.3},
            stop_at=3,
            before={"train__strategy": name},
        )
        for name in ("tp", "ddp", "pp")
    ),
    *(
        Case(f"{name}-drawn", {"train__strategy": name, "draws": True, "dropout": 0.3})
        for name in STRATEGIES
    ),
    *(
        Case(
            f"{name}-left",
            {"train__strategy": name, "draws": True, "dropout": 0.3},
            stop_at=stop_at,
            stopped_rank=signalled,
        )
        for name, stop_at, signalled in LEFT
    ),
    *(
        Case(
            f"{name}-recomputed",
            {"train__strategy": name, "draws": True, "dropout": 0.3, "train__recompute": True},
        )
        for name in ("ddp", "fsdp", "tp", "pp")
    ),
    Case(
        "fsdp-recomputed-compiled",
        {
            "train__strategy": "fsdp",
            "train__compile": True,
            "blocks": True,
            "train__recompute": True,
        },
    ),
    Case("dp-recomputed", {"train__strategy": "dp", "train__recompute": True}),
    *(
        Case(f"{name}-normed", {"train__strategy": name, "train__log_gradient_norm": True})
        for name in STRATEGIES
    ),
    *(
        Case(
            f"{name}-channels-last",
            {"train__strategy": name, "images": True, "train__channels_last": True},
            stop_at=3,
            before={"train__channels_last": name == "ddp"},
        )
        for name in ("ddp", "zero1", "fsdp")
    ),
    *(
        Case(f"{name}-joint", {"train__strategy": name, "train__clip": 0.05, "optimizers": 2}, 3)
        for name in STRATEGIES
    ),
    *(
        Case(f"{name}-joint-fp16", FP16 | {"train__strategy": name, "optimizers": 2})
        for name in ("ddp", "zero1", "fsdp")
    ),
    Case("fsdp-scaled", {"train__strategy": "fsdp", "scaled": True}),
    Case("fsdp-accumulated", {"train__strategy": "fsdp", "train__micro_batch": 2}),
    Case("pp-accumulated", {"train__strategy": "pp", "train__micro_batch": 2}),
    Case("pp-gpipe", {"train__strategy": "pp", "train__pp__schedule": "gpipe", "cut_at": "3"}),
    Case(
        "ddp-compressed",
        {
            "train__strategy": "ddp",
            "train__ddp__compression": "bf16",
            "train__ddp__bucket_mb": 1.0,
        },
    ),
    Case("ddp-spare", {"blocks": True, "spare": "trained"}),
    Case("ddp-spare-frozen", {"blocks": True, "spare": "frozen"}),
    Case("ddp-spare-static", {**STATIC, "blocks": True, "spare": "trained"}),
    Case("fsdp-spare", {"train__strategy": "fsdp", "blocks": True, "spare": "trained"}),
    Case("ddp-static", STATIC),
    Case("ddp-static-accumulated", {**STATIC, "train__micro_batch": 2}),
    Case("fsdp-bf16", {"train__strategy": "fsdp", "train__precision": "bf16"}),
    *(
        Case(f"{name}-bf16", {"train__strategy": name, "train__precision": "bf16"})
        for name in ("ddp", "tp", "pp")
    ),
    *(
        Case(f"{name}-fp16", {"train__strategy": name, "train__precision": "fp16"})
        for name in ("ddp", "zero1", "fsdp")
    ),
    Case("ddp-compiled", {"train__strategy": "ddp", "train__compile": True, "blocks": True}),
    Case("fsdp-compiled", {"train__strategy": "fsdp", "train__compile": True, "blocks": True}),
    Case("ddp-slow", {"train__strategy": "ddp", "train__log_every": 1, "slow_rank": 1}),
    Case("ddp-diverged", {"train__strategy": "ddp", "diverge": True}),
    Case("fsdp-tied", {"train__strategy": "fsdp", "tied": True}, stop_at=3),
    Case("pp-tied-in-a-stage", {"train__strategy": "pp", "tied": True, "cut_at": "2"}, stop_at=3),
    Case("pp-tied", {"train__strategy": "pp", "tied": True, "cut_at": "3"}),
    Case(
        "pp-blocks-tied",
        {"train__strategy": "pp", "tied": True, "blocks": True, "cut_at": "blocks.1"},
    ),
    Case("tp-tied", {"train__strategy": "tp", "tied": True}),
    Case(
        "tp-sequence",
        {"train__strategy": "tp", "plan": "sequence", "train__clip": 0.05, "held_out": 32},
    ),
    *(
        Case(
            f"{name}-tested", {"train__strategy": name, "lr": 0.1, "far": 5, "tested": 21, **BY_FAR}
        )
        for name in STRATEGIES
    ),
    *(
        Case(
            f"{name}-lockstep",
            {"train__strategy": name, "held_out": 97, "lockstep": True, "contrast": True},
        )
        for name in ("ddp", "zero1", "fsdp")
    ),
    *(
        Case(
            f"{name}-patient",
            {"train__strategy": name, "train__eval_every": 1, "goal__metric": "val/training"}
            | {"train__patience": 4, "train__schedule": "plateau", "train__plateau__patience": 2},
            stop_at=3,
        )
        for name in ("ddp", "zero1", "fsdp")
    ),
    *(Case(f"{name}-rest", {"train__strategy": name, **RESTS["none"]}) for name in RESTED),
    *(Case(f"{name}-rest-again", {"train__strategy": name, **RESTS["none"]}, 5) for name in RESTED),
    *(Case(f"ddp-{name}", changes) for name, changes in RESTS.items()),
    Case("ddp-rest-lockstep", {"lockstep": True, **RESTS["uneven"]}),
    Case("single", {"train__strategy": "single"}),
    Case("dp", {"train__strategy": "dp"}),
    Case("tp-planless", {"train__strategy": "tp", "plan": "none"}),
    Case("tp-wrong", {"train__strategy": "tp", "plan": "wrong"}),
    Case("tp-fp16", {"train__strategy": "tp", "train__precision": "fp16"}),
    Case("pp-uncut", {"train__strategy": "pp", "blocks": True}),
    Case("pp-cut-wrong", {"train__strategy": "pp", "cut_at": "nowhere"}),
    Case("pp-cut-often", {"train__strategy": "pp", "cut_at": "2,5"}),
    *(Case(f"ddp-odd-{odd}", {"odd": odd}) for odd in ("metric", "loss")),
    *(
        Case(f"{name}-compiled", {"train__strategy": name, "train__compile": True})
        for name in ("dp", "tp")
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one process group, through the real launcher."""
    return two_ranks.launched(tmp_path_factory.mktemp("strategies"), 2, CASES)


# Some cases end with an error, which their tests expect.
seen = functools.partial(two_ranks.seen, fails=True)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    def run(**changes: Any) -> dict[str, Any]:
        return attempted_alone(Case("alone", changes), tmp_path)

    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_have_the_losses_of_one(folder: Path, alone: Any, name: str) -> None:
    one, two = alone(), seen(folder, name)
    assert "error" not in two and len(two["losses"]) == 8
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    for step, metrics in one["evaluated"].items():
        assert two["evaluated"][step] == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_are_clipped_by_the_norm_of_the_whole(
    folder: Path, alone: Any, name: str
) -> None:
    one = alone(train__clip=0.05)
    assert seen(folder, f"{name}-clip")["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"] != alone()["losses"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_the_optimizer_leaves_out_has_no_part_in_the_norm(
    folder: Path, alone: Any, name: str
) -> None:
    one, two = alone(probe="frozen", **NORMED), seen(folder, f"{name}-probe")
    assert "error" not in two and two["begun"] == [0, 4]
    for metric in ("train/loss", "train/gradient_norm"):
        assert two["logged"][metric] == pytest.approx(one["logged"][metric], rel=1e-4)


def test_a_stage_trains_its_part_of_the_groups_of_the_whole_model(folder: Path, alone: Any) -> None:
    one, two = alone(by_layer=True), seen(folder, "pp-by-layer")
    assert "error" not in two and two["begun"] == [0, 4]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)


def test_partial_gradients_are_clipped_by_their_sum(folder: Path, alone: Any) -> None:
    """Under SequenceParallel, each rank has a summand of a norm's gradient."""
    two = seen(folder, "tp-sequence")
    assert "error" not in two
    assert two["losses"] == pytest.approx(alone(train__clip=0.05)["losses"], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pp"])
def test_models_that_are_not_sequential(folder: Path, alone: Any, name: str) -> None:
    two = seen(folder, f"{name}-blocks")
    assert "error" not in two
    assert two["losses"] == pytest.approx(alone(blocks=True)["losses"], rel=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_several_validation_sets_and_the_best_checkpoint_on_the_test_set(
    folder: Path, alone: Any, name: str
) -> None:
    one, two = alone(lr=0.1, far=5, tested=21, **BY_FAR), seen(folder, f"{name}-tested")
    assert "error" not in two
    for step, metrics in one["evaluated"].items():
        assert two["evaluated"][step] == pytest.approx(metrics, rel=1e-3)
    best = min(one["evaluated"], key=lambda step: one["evaluated"][step]["val/far/loss"])
    assert int(best) < 8, "the last weights are the best, so nothing would be loaded"
    assert two["tested"][0] == one["tested"][0] == int(best)
    assert two["tested"][1] == pytest.approx(one["tested"][1], rel=1e-3)
    assert set(one["tested"][1]) == {f"test/{m}" for m in ("loss", "accuracy", "training", "bits")}


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp"])
def test_lockstep_gives_all_ranks_equal_batches_of_97_samples(folder: Path, name: str) -> None:
    """A `measure` with a collective fails on the 49th sample of rank 0."""
    two = seen(folder, f"{name}-lockstep")
    assert "error" not in two
    assert [metrics["val/rows"] for metrics in two["evaluated"].values()] == [16.0, 16.0]


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp"])
def test_patience_and_plateau_count_on_over_a_resume(folder: Path, alone: Any, name: str) -> None:
    settings = {"train__eval_every": 1, "goal__metric": "val/training"}
    plateau = {"train__schedule": "plateau", "train__plateau__patience": 2}
    one, two = alone(train__patience=4, **settings, **plateau), seen(folder, f"{name}-patient")
    assert one["ends"] == [[None, 5, False]] and two["ends"][-1] == one["ends"][-1]
    assert two["trained"] == [1, 2, 3, 4, 5]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert two["losses"] != pytest.approx(alone()["losses"], rel=1e-4)


@pytest.mark.parametrize("name", RESTED)
def test_smaller_last_batch_is_trained(folder: Path, alone: Any, name: str) -> None:
    one, two = alone(**RESTS["none"]), seen(folder, f"{name}-rest")
    assert "error" not in two and two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    for step, metrics in one["evaluated"].items():
        assert two["evaluated"][step] == pytest.approx(metrics, rel=1e-4)
    again = seen(folder, f"{name}-rest-again")
    assert again["losses"] == two["losses"] and again["begun"] == [0, 6]


@pytest.mark.parametrize("name", RESTS)
def test_smaller_last_batch_is_divided_fairly(folder: Path, alone: Any, name: str) -> None:
    one, two = alone(**RESTS[name]), seen(folder, f"ddp-{name}")
    for metric in ("loss", "accuracy"):
        expected = pytest.approx(one["logged"][f"train/{metric}"], rel=1e-4)
        assert two["logged"][f"train/{metric}"] == expected


def test_ranks_that_talk_need_equal_shares_of_the_rest(folder: Path) -> None:
    assert "leaves a batch of 3 samples" in seen(folder, "ddp-rest-lockstep")["error"]


def test_parameter_that_fsdp_gathers_may_be_a_metric(folder: Path, alone: Any) -> None:
    one, two = alone(scaled=True), seen(folder, "fsdp-scaled")
    assert "error" not in two, two["error"]
    assert one["logged"]["train/scale"][0] == 1 and len(set(one["logged"]["train/scale"])) == 8
    assert two["logged"]["train/scale"] == pytest.approx(one["logged"]["train/scale"], rel=1e-4)


def test_slow_rank_is_named(folder: Path) -> None:
    found = seen(folder, "ddp-slow")["straggler"]
    assert found["straggler_rank"] == 1 and found["straggler_forward_ratio"] > 2


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_compiled_models_train_the_same(folder: Path, name: str) -> None:
    compiled, plain = seen(folder, f"{name}-compiled"), seen(folder, f"{name}-blocks")
    assert "error" not in compiled and compiled["losses"] == pytest.approx(
        plain["losses"], rel=1e-4
    )
    assert compiled["losses"] != plain["losses"], "the very same bits: nothing was compiled"


def test_compiled_units_are_sharded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded: list[nn.Module] = []
    for name, replaced in (
        ("fully_shard", lambda unit, mesh: sharded.append(unit)),
        ("init_device_mesh", lambda *_: None),
    ):
        monkeypatch.setattr(f"rankzero.training.strategies.sharded.{name}", replaced)
    experiment = two_ranks.layered(train__strategy="fsdp", train__compile=True, blocks=True)
    model: Any = experiment.model()
    build(
        experiment, model, World(Ranks(0, 2), torch.device("cpu")), experiment.measure, lambda: None
    )
    assert sharded == [*model.blocks, model]


@pytest.mark.parametrize(
    "name",
    [
        "fsdp-accumulated",
        "pp-accumulated",
        "pp-gpipe",
        "ddp-static",
        "ddp-static-accumulated",
    ],
)
def test_variants_have_the_losses_of_one_process(folder: Path, alone: Any, name: str) -> None:
    assert seen(folder, name)["losses"] == pytest.approx(alone()["losses"], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp-spare-frozen", "ddp-spare-static", "fsdp-spare"])
def test_parameter_without_a_gradient_trains_as_the_error_advises(
    folder: Path, alone: Any, name: str
) -> None:
    found = seen(folder, name)
    assert "error" not in found, found["error"]
    assert found["losses"] == pytest.approx(alone(blocks=True)["losses"], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_recomputed_activations_change_no_bit(folder: Path, name: str) -> None:
    found = seen(folder, f"{name}-recomputed")
    assert "error" not in found and found["losses"] == seen(folder, f"{name}-drawn")["losses"]


def test_compiled_units_are_recomputed(folder: Path) -> None:
    found = seen(folder, "fsdp-recomputed-compiled")
    assert "error" not in found
    assert found["losses"] == pytest.approx(seen(folder, "fsdp-compiled")["losses"], rel=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_norm_of_the_whole_gradient_is_logged(folder: Path, alone: Any, name: str) -> None:
    one, two = alone(train__log_gradient_norm=True), seen(folder, f"{name}-normed")
    norms = [found["logged"]["train/gradient_norm"] for found in (one, two)]
    assert len(norms[0]) == 8 and norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert two["losses"] == seen(folder, name)["losses"], "logging the norm changed the training"


def test_norm_is_that_before_clipping(folder: Path, alone: Any) -> None:
    clipped = alone(train__log_gradient_norm=True, train__clip=0.05)["logged"]
    other, name = seen(folder, "ddp-normed")["logged"], "train/gradient_norm"
    assert 0.05 < clipped[name][0] == pytest.approx(other[name][0], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_channels_last(folder: Path, alone: Any, name: str) -> None:
    two = seen(folder, f"{name}-channels-last")
    assert "error" not in two and two["begun"][1] >= 3
    assert two["losses"] == pytest.approx(alone(images=True)["losses"], rel=1e-4)


def test_channels_last_is_the_layout_of_weights_and_inputs() -> None:
    layouts = []
    model = nn.Conv2d(2, 4, 2)
    model.other = nn.Conv3d(1, 1, 2)  # a 5-d weight has no such layout
    experiment = two_ranks.layered(train__strategy="single", train__channels_last=True)
    world = World(Ranks(), torch.device("cpu"))
    strategy = build(experiment, model, world, experiment.measure, lambda: None)
    model.register_forward_pre_hook(lambda _, args: layouts.append(args[0].stride()))
    strategy.model(torch.ones(1, 2, 3, 3))
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert layouts == [(18, 1, 6, 2)]


@pytest.mark.parametrize("name", ["ddp", "zero1", "fsdp", "tp"])
def test_two_optimizers_resume_and_have_the_losses_of_one_process(
    folder: Path, tmp_path: Path, name: str
) -> None:
    settings = {"train__clip": 0.05, "optimizers": 2}
    one = attempted_alone(Case("one", settings), tmp_path / "one")["losses"]
    two = seen(folder, f"{name}-joint")
    assert "error" not in two and two["begun"][1] >= 3
    assert two["losses"] == pytest.approx(one, rel=2e-3)
    again = attempted_alone(Case("again", settings, stop_at=3), tmp_path / "again")
    assert again["losses"] == one and again["begun"][1] >= 3, "not bit for bit"


def test_two_optimizers_with_a_loss_scaler(folder: Path) -> None:
    ddp, *others = (seen(folder, f"{name}-joint-fp16") for name in ("ddp", "zero1", "fsdp"))
    for found in others:
        assert found["losses"] == pytest.approx(ddp["losses"], rel=2e-3)
        assert found["scales"] == ddp["scales"]


@pytest.mark.parametrize("name", ["fsdp-tied", "pp-tied-in-a-stage"])
def test_shared_weight_stays_one(folder: Path, alone: Any, name: str) -> None:
    two = seen(folder, name)
    assert "error" not in two and two["losses"] == pytest.approx(
        alone(tied=True)["losses"], rel=1e-4
    )
    path, _ = checkpoint_files.newest_intact(folder / name / "checkpoints")
    assert path is not None
    weights = restore.load(path)["model"]
    assert torch.equal(weights["2.weight"], weights["6.weight"])


@pytest.mark.parametrize("name", ["ddp-compressed", "fsdp-bf16", "pp-bf16"])
def test_bf16_changes_losses_little(folder: Path, alone: Any, name: str) -> None:
    found = seen(folder, name)["losses"]
    assert (
        found == pytest.approx(alone()["losses"], rel=0.05)
        and found != seen(folder, "ddp")["losses"]
    )


def test_ranks_agree_on_the_steps_that_overflow(folder: Path, alone: Any) -> None:
    """Too large a loss scale skips the same steps under each strategy."""
    ddp, zero1, fsdp = (
        list(seen(folder, f"{name}-fp16")["losses"].values()) for name in ("ddp", "zero1", "fsdp")
    )
    assert ddp == pytest.approx(zero1, rel=1e-3) and ddp == pytest.approx(fsdp, rel=0.05)
    first, *_ = alone()["losses"].values()
    assert ddp[0] == pytest.approx(first, rel=0.01) and min(ddp) < first
    scales = [
        scale
        for name in ("ddp", "zero1", "fsdp")
        for scale in seen(folder, f"{name}-fp16")["scales"]
    ]
    assert len(scales) == 6 and len(set(scales)) == 1 and scales[0] < 2.0**16


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "pp"])
def test_evaluation_uses_the_training_precision_in_eval_mode(folder: Path, name: str) -> None:
    for case, bits in ((name, 32), (f"{name}-bf16", 16)):
        evaluated = seen(folder, case)["evaluated"].values()
        assert [(found["val/bits"], found["val/training"]) for found in evaluated] == [
            (bits, 0),
            (bits, 0),
        ]


@pytest.mark.parametrize("name", DIVIDED)
def test_resumed_training_is_bit_identical(folder: Path, name: str) -> None:
    again = seen(folder, f"{name}-again")
    assert again["losses"] == seen(folder, name)["losses"], "not bit for bit"
    assert again["begun"] == [0, again["ends"][0][1]] and again["begun"][1] >= 3, (
        "not from where it was stopped"
    )
    assert again["trained"] == list(range(1, 9)), "a step was trained twice"
    assert again["evaluated"] == seen(folder, name)["evaluated"]


def test_a_buffer_that_differs_by_rank_resumes_bit_for_bit(folder: Path) -> None:
    """All ranks get the buffers of rank 0 when they are saved, as after a resume."""
    again = seen(folder, "fsdp-centred-again")
    assert again["losses"] == seen(folder, "fsdp-centred")["losses"]
    assert again["begun"] == [0, 5], "no evaluation came just before"
    assert again["losses"] != seen(folder, "fsdp")["losses"]


@pytest.mark.parametrize(("name", "step", "signalled"), LEFT)
def test_interrupted_evaluation_is_repeated_after_resume(
    folder: Path, name: str, step: int, signalled: int
) -> None:
    """All ranks leave the evaluation, and repeat it with the same random numbers."""
    straight, left = seen(folder, f"{name}-drawn"), seen(folder, f"{name}-left")
    first, end = left["ends"]
    assert first == ["stopped by SIGTERM", step, True]
    assert end == [None, 8, False] and straight["ends"] == [end]
    assert left["losses"] == straight["losses"], "not bit for bit"
    assert left["evaluated"] == straight["evaluated"] and len(left["evaluated"]) == 2
    assert all("val/luck" in metrics for metrics in left["evaluated"].values())
    saved = checkpoint_files.newest_intact(folder / f"{name}-left" / "checkpoints")[0]
    assert (
        saved is not None
        and checkpoint_files.read_manifest(saved).metrics == left["evaluated"]["8"]
    )


@pytest.mark.parametrize("name", ["tp", "ddp", "pp"])
def test_ranks_with_the_same_samples_use_the_same_dropout(folder: Path, name: str) -> None:
    """Otherwise, weights that all ranks have whole would differ, which evaluation checks."""
    again = seen(folder, f"tp-dropout-after-{name}")
    assert "error" not in again and list(again["losses"]) == [str(step) for step in range(1, 9)]
    assert (again["losses"] == seen(folder, "tp-dropout")["losses"]) == (name == "tp")


@pytest.mark.parametrize("name", STRATEGIES)
def test_resumed_run_uses_changed_optimizer_options(
    folder: Path, tmp_path: Path, name: str
) -> None:
    case = Case("alone", {"weight_decay": 3.0}, stop_at=4, before={"weight_decay": 0.0})
    one, two = attempted_alone(case, tmp_path), seen(folder, f"{name}-decayed")
    assert "error" not in two and two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert one["losses"]["8"] != pytest.approx(seen(folder, name)["losses"]["8"], rel=1e-2)


@pytest.mark.parametrize("name", STRATEGIES)
def test_checkpoint_is_complete_and_fits_a_plain_model(folder: Path, alone: Any, name: str) -> None:
    path, problems = checkpoint_files.newest_intact(folder / name / "checkpoints")
    assert path is not None and not problems
    state = restore.load(path)
    two_ranks.layered().model().load_state_dict(state["model"])
    reference, _ = checkpoint_files.newest_intact(folder / "ddp" / "checkpoints")
    assert reference is not None
    for key, value in restore.load(reference)["model"].items():
        torch.testing.assert_close(state["model"][key], value, rtol=1e-3, atol=1e-5)
    assert list(state["model"]) == list(restore.load(reference)["model"])


@pytest.mark.parametrize("under", ["ddp", "fsdp", "tp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_process_resumes_a_checkpoint_of_two(
    folder: Path, tmp_path: Path, alone: Any, name: str, under: str
) -> None:
    """Also under another strategy."""
    shutil_copy(folder / name / "checkpoints", tmp_path / "checkpoints")
    on = alone(train__steps=10, train__strategy=under)
    assert "error" not in on and list(on["losses"]) == ["9", "10"]
    straight = attempted_alone(Case("straight", {"train__steps": 10}), tmp_path / "s")
    assert on["losses"] == pytest.approx(
        {step: straight["losses"][step] for step in ("9", "10")}, rel=1e-3
    )


def shutil_copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("single", "single is one process, not 2: give --nproc 1"),
        ("dp", "dp divides a batch among GPUs, and there is none: use ddp"),
        ("tp-planless", "def parallelize(self)"),
        ("tp-wrong", "parallelize() names '9', which the model does not have"),
        ("tp-fp16", "do not go together: set train.precision=bf16"),
        ("pp-uncut", "def split_points(self)"),
        ("pp-cut-wrong", "split_points() names 'nowhere'"),
        ("pp-cut-often", "names 2 places, but 2 processes need 1"),
        ("pp-tied", "in several places ('2.weight', '6.weight')"),
        ("pp-blocks-tied", "in several places ('blocks.0.1.weight', 'blocks.1.1.weight')"),
        ("tp-tied", "in several places ('2.weight', '6.weight')"),
        ("pp-joint", "pp takes one optimizer, and optimizer() returned 2: return one"),
        ("dp-recomputed", "train.recompute=true and train.strategy=dp do not go together"),
        ("pp-recomputed", "train.recompute=true and train.strategy=pp do not go together"),
        ("fsdp-channels-last", "do not go together: set train.channels_last=false"),
        ("dp-compiled", "do not go together"),
        ("tp-compiled", "do not go together"),
        ("ddp-odd-metric", "measure()['text'] must be a 0-d tensor"),
        ("ddp-odd-loss", "measure()['loss'] must be a 0-d tensor"),
        ("ddp-spare", "no gradient in the last step (spare.weight, spare.bias), and DDP waits"),
        ("ddp-diverged", "the parameters of rank 1 differ from rank 0's after step 4"),
    ],
)
def test_impossible_settings_are_refused_with_a_remedy(folder: Path, name: str, says: str) -> None:
    error = seen(folder, name)["error"]
    assert error.startswith("UserError: ") and says in error


@pytest.mark.parametrize("is_static", [False, True])
def test_parameters_without_gradient_have_the_names_of_the_wrap(is_static: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters())
    replica = SimpleNamespace(static_graph=is_static)
    world = World(Ranks(), torch.device("cpu"))
    strategy = Replicated(model, cast(nn.Module, replica), optimizer, Shard(0, 1), world)
    model[0].requires_grad_(False)
    text = (
        "Expected to have finished reduction in the prior iteration. Parameters which did not "
        "receive grad for rank 1: 1.bias\nParameter indices which did not receive grad for rank 1: "
        "2 4 5"
    )

    def fail(*_: object) -> None:
        raise RuntimeError(text)

    how = cast(MicroBatchStep, SimpleNamespace(forward_backward=fail))
    with pytest.raises(UserError, match=r"last step \(1.bias, 2.bias\)") as caught:
        strategy.forward_backward(how, None)
    assert ("static_graph" in str(caught.value)) == (not is_static)
    # FSDP hangs if only some ranks use the parameter.
    assert "add 0 * p.sum() to the loss" in str(caught.value) and "fsdp" not in str(caught.value)


def last_rank(measure: Any) -> Pipeline:
    """Return the last rank of a pipeline, which can only compute a loss."""
    last = Pipeline.__new__(Pipeline)
    last._shapes, last._measured, last._batch = {}, [], (torch.ones(4, 8), torch.ones(4))
    last._how = MicroBatchStep(measure, contextlib.nullcontext(), None, 1)
    last.model = nn.Linear(1, 1)
    return last


@pytest.mark.parametrize("odd", ["metric", "loss"])
def test_last_pipeline_rank_reports_bad_measure_values(odd: str) -> None:
    with pytest.raises(UserError, match="must be a 0-d tensor"):
        last_rank(two_ranks.layered(odd=odd).measure)._loss(torch.ones(2, 2), torch.arange(2))


def test_last_pipeline_rank_keeps_the_values_of_each_micro_batch() -> None:
    place = torch.zeros(())  # as a CUDA graph returns each output
    last = last_rank(lambda model, batch: {"loss": place.add_(1)})
    for _ in range(2):
        last._loss(torch.ones(2, 2), torch.arange(2))
    assert [float(one["loss"]) for one in last._measured] == [1.0, 2.0]


def test_a_smaller_batch_cuts_each_output_of_a_pipeline() -> None:
    last: Any = last_rank(lambda model, batch: {"rows": [len(one) for one in model(batch[0])]})
    last._stage, last._schedule = SimpleNamespace(is_last=True), SimpleNamespace(eval=None)
    last._samples, last._world = 8, World(Ranks(), torch.device("cpu"))
    last._run = lambda how, filled, _: (filled[0], filled[1])
    assert last.forward_metrics(last._how, last._batch) == {"rows": [4, 4]}


def test_measure_of_a_pipeline_may_exchange_any_objects() -> None:
    used = []

    def measure(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        used.append(dist.distributed_c10d._unpickler)
        return {"loss": torch.zeros(())}

    with torch_compat.no_foreign_objects():
        last_rank(measure)._loss(torch.ones(2, 2), torch.arange(2))
    assert used == [pickle.Unpickler]


def test_pipeline_checkpoint_is_gathered_on_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would gather the whole model on one GPU."""
    sent = []
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: backend)
    monkeypatch.setattr(
        dist, "send", lambda tensor, to, group: sent.append((tensor.device.type, to, group))
    )
    model = nn.Linear(2, 1)
    stage = SimpleNamespace(submod=model, is_last=True, has_backward=True)
    monkeypatch.setitem(SCHEDULES, "1f1b", lambda *words, **named: None)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=numpy.float64(0.01))

    def pipeline(ranks: Ranks) -> Pipeline:
        world = World(ranks, torch.device("cpu"))
        return Pipeline(stage, optimizer, ["weight", "bias"], Train(), world)

    state = pipeline(Ranks()).state()
    assert set(state["model"]) == {"weight", "bias"}
    # Another rank would refuse a number of NumPy.
    assert type(state["optimizer"]["param_groups"][0]["weight_decay"]) is float
    pipeline(Ranks(rank=1, world_size=2)).state()
    assert sent == [("cpu", 0, "gloo")] * 4, "the length, then the content, of two"


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "pp"])
def test_divided_model_is_moved_in_parts(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    model, divided = two_ranks.layered().model(), []

    def divide(part: nn.Module, *_: Any, **__: Any) -> Any:
        divided.append({parameter.device.type for parameter in model.parameters()})
        return SimpleNamespace(submod=part)

    for name in (
        "sharded.fully_shard",
        "sharded.parallelize_module",
        "sharded.init_device_mesh",
        "stages.PipelineStage",
    ):
        monkeypatch.setattr(
            f"rankzero.training.strategies.{name}",
            divide if "mesh" not in name else lambda *_: None,
        )
    monkeypatch.setattr(
        "rankzero.training.strategies.pipeline.Pipeline", lambda stage, *_: stage.submod
    )
    experiment = two_ranks.layered(train__strategy=strategy)
    made = build(
        experiment,
        model,
        World(Ranks(0, 2), torch.device("meta")),
        experiment.measure,
        lambda: None,
    )
    assert divided[0] == ({"cpu", "meta"} if strategy == "pp" else {"cpu"})
    mine = made if isinstance(made, nn.Module) else made.model
    assert {parameter.device.type for parameter in mine.parameters()} == {"meta"}


@pytest.mark.parametrize(("strategy", "expected"), [("ddp", 1), ("dp", 3)])
def test_gpus_of_a_run_are_those_that_it_uses(
    monkeypatch: pytest.MonkeyPatch, strategy: str, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index)
    )
    assert gpu_uuids(Ranks(), strategy) == [f"GPU-{index}" for index in range(expected)]


def test_data_parallel_threads_use_the_callers_autocast_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DataParallel computes in other threads, which would use PyTorch's default dtype."""
    model = nn.Linear(2, 2)

    def in_a_thread(self: Any, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        with ThreadPoolExecutor(1) as thread:
            return [
                thread.submit(replica, *inputs[0], **kwargs[0]).result() for replica in replicas
            ]

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", in_a_thread)
    divided = AutocastDataParallel(model)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            [output] = divided.parallel_apply([model], [(torch.ones(1, 2),)], [{}])
            [plain] = in_a_thread(None, [model], [(torch.ones(1, 2),)], [{}])
        assert output.dtype is dtype and plain.dtype is torch.float32
    assert divided.module is model


@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_norm_of_no_gradients_is_on_the_device(norm: float) -> None:
    elsewhere = World(Ranks(), torch.device("meta"))
    strategy = single(Experiment(), nn.Linear(2, 2, device="meta"), elsewhere)
    assert strategy.clip(norm).device.type == "meta"


def test_number_of_shards() -> None:
    assert [shards(name, 8) for name in ("ddp", "zero1", "fsdp", "tp", "pp")] == [8, 8, 8, 1, 1]
