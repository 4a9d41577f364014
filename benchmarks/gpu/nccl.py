"""Train through a process group of one rank: NCCL on a GPU, gloo on a CPU.

    nccl.py OUT.json

A GPU takes one rank of NCCL at most, and a world of one rank has no process group in RankZero. Here
it has: `World.is_distributed` says yes. So each collective of the loop and of the strategies is
called for real, and its result must be that of a run without.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import ResNet18
from torch import Tensor, nn, optim

from rankzero import config, experiment_file
from rankzero.experiment import Experiment
from rankzero.launch import rendezvous
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.distributed import device
from rankzero.training.distributed.world import World, join
from rankzero.training.metrics.stateful import StatefulMetrics
from rankzero.training.step import train_step

STEPS = 12
DECAY = 0.9
ADVERSARIAL = Path(__file__).parents[2] / "tests" / "fixtures" / "adversarial.py"


class ResNet(ResNet18):
    """With an optimizer that fsdp knows: PyTorch's fused SGD does not take sharded tensors."""

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr, momentum=0.9)


class Half(ResNet):
    """Its weights are in bf16."""

    def model(self) -> nn.Module:
        return super().model().bfloat16()

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return super().measure(model, (batch[0].bfloat16(), batch[1]))


class Mean:
    """A metric that keeps what it gets, as those of `Experiment.metrics()` may."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.values).mean()


class Odd(nn.Module):
    """A buffer with gaps, which NCCL refuses, and one that nothing can write into."""

    turned: Tensor
    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("wide", torch.ones(1).expand(4))


GROUP = mock.patch.object(World, "is_distributed", True)


def resnet(strategy: str, precision: str) -> Experiment:
    """Return an experiment with two micro-batches."""
    settings = {
        "train.steps": STEPS,
        "train.strategy": strategy,
        "train.precision": precision,
        "train.micro_batch": max(1, ResNet().train.batch_size // 2),
        "train.clip": 1.0,
        "train.deterministic": True,
    }
    return config.override(ResNet(), settings)


def adversarial(strategy: str) -> Experiment:
    """Return an experiment with two optimizers, one of which never gets a gradient."""
    settings = {
        "train.steps": STEPS,
        "train.strategy": strategy,
        "train.log_gradient_norm": True,
        "still": "generator",
    }
    return config.override(experiment_file.load(str(ADVERSARIAL))(), settings)


def train(given: Experiment, world: World) -> tuple[list[float], list[int]]:
    """Return the losses of some steps, and the sizes of the state."""
    job, state = build(given, world)
    batches = job.train_loader.train_batches(
        job.batch_order, job.strategy.shard.rank, 0, job.total_steps
    )
    losses = []
    for _ in range(STEPS):
        metrics = train_step(job, state, batches)
        state.step += 1
        # Several optimizers have a loss each.
        losses.append(sum(float(one) for name, one in metrics.items() if name.endswith("loss")))
        # The recorder's row has values of one device.
        assert {one.device for one in metrics.values()} == {world.device}, metrics
    job.strategy.sync_buffers()
    kept = job.strategy.state()
    job.strategy.load(kept)
    return losses, [len(kept["model"]), len(kept["optimizer"])]


def averages(strategy: str, world: World) -> dict[str, float]:
    """Average weights in bf16. Return how far the averages are off, and what saving them takes."""
    settings = {"train.steps": STEPS, "train.strategy": strategy, "train.ema": DECAY}
    job, state = build(config.override(Half(), settings), world)
    names = {name for name, _ in Half().model().named_parameters()}

    def weights() -> dict[str, Tensor]:
        found = job.strategy.model_state()
        return {name: found[name].float().clone() for name in names}

    wanted, average = weights(), state.average
    assert average is not None
    batches = job.train_loader.train_batches(job.batch_order, 0, 0, STEPS)
    for step in range(1, STEPS + 1):
        train_step(job, state, batches)
        state.step += 1
        decay = min(DECAY, (1 + step) / (10 + step))
        wanted = {name: one.lerp(weights()[name], 1 - decay) for name, one in wanted.items()}
    on_gpu = world.device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    saved = average.state()
    most = torch.cuda.max_memory_allocated() if on_gpu else 0
    average.load(saved["ema"], saved["ema_rests"])
    again = average.state()
    for one, other in zip(
        (saved["ema"], *saved["ema_rests"]), (again["ema"], *again["ema_rests"]), strict=True
    ):
        assert all(torch.equal(one[name], other[name]) for name in names & one.keys())
    apart = max(float((saved["ema"][name] - one).abs().max()) for name, one in wanted.items())
    size = sum(one.nbytes for one in saved["ema"].values())
    return {"apart": apart, "MB to save them": (most - before) / 1e6, "MB of averages": size / 1e6}


def collectives(world: World) -> dict[str, Any]:
    """Call each collective of `World`, and check what it returns."""
    assert world.sum(torch.ones(3, device=world.device)).tolist() == [1.0] * 3
    assert world.gather(torch.tensor([1.5, 2.5], dtype=torch.float64)).tolist() == [[1.5, 2.5]]
    assert world.all(True) and not world.all(False)
    assert world.ranks_that_differ(torch.ones(2, device=world.device)) == []
    assert world.share({"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
    assert world.broadcast(bytes(range(256)) * 999, piece_bytes=1000) == bytes(range(256)) * 999
    world.extend_timeouts()
    odd = Odd().to(world.device)
    world.broadcast_buffers(odd)
    assert odd.turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] and odd.wide.sum() == 4
    # As if the samples were divided among several ranks.
    metric = StatefulMetrics({"mean": Mean()}, world, parts=2)
    metric.update({"mean": (torch.tensor([1.0, 2.0, 6.0], device=world.device),)}, 3)
    assert metric.compute([3], 0) == {"mean": 3.0}
    return {"backend": dist.get_backend(), "store": type(dist.group.WORLD).__name__}


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranks, found = Ranks(), dict[str, Any]()
    place = device.choose(ranks)
    single = World(ranks, place)
    alone = {how: train(resnet("single", how), single) for how in ("fp32", "bf16")}
    turns = train(adversarial("single"), single)
    with tempfile.TemporaryDirectory() as folder, GROUP:
        rendezvous.use_folder(folder)
        with join(ranks, lambda _: place) as world:
            found["world"] = collectives(world)
            for strategy in ("ddp", "zero1", "fsdp"):
                given = {how: resnet(strategy, how) for how in alone}
                for how, experiment in {**given, "turns": adversarial(strategy)}.items():
                    losses, sizes = train(experiment, world)
                    wanted, _ = alone.get(how, turns)
                    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
                    # Later losses multiply what rounding made of the first ones.
                    found[f"{strategy} {how}"] = {
                        "first": max(apart[:4]),
                        "all": max(apart),
                        "state": sizes,
                    }
                found[f"{strategy} averages of bf16"] = averages(strategy, world)
    Path(sys.argv[1]).write_text(json.dumps(found))
    # bf16 rounds an average below 2 by up to 2**-8.
    limits = {"first": 0.01, "apart": 1.01 * 2.0**-8}
    far = {
        key: one
        for key, one in found.items()
        if any(one.get(name, 0.0) > limit for name, limit in limits.items())
    }
    assert not far, found


if __name__ == "__main__":
    main()
