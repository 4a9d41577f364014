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
from torch import nn, optim

from rankzero import config
from rankzero.launch import rendezvous
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.distributed import device
from rankzero.training.distributed.world import World, join
from rankzero.training.step import train_step

STEPS = 12


class ResNet(ResNet18):
    """With an optimizer that fsdp knows: PyTorch's fused SGD does not take sharded tensors."""

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), self.lr, momentum=0.9)


GROUP = mock.patch.object(World, "is_distributed", True)


def train(strategy: str, precision: str, world: World) -> tuple[list[float], list[int]]:
    """Return the losses of some steps with two micro-batches, and the sizes of the state."""
    given = config.override(
        ResNet(),
        {
            "train.steps": STEPS,
            "train.strategy": strategy,
            "train.precision": precision,
            "train.micro_batch": max(1, ResNet().train.batch_size // 2),
            "train.clip": 1.0,
            "train.deterministic": True,
        },
    )
    job, state = build(given, world)
    batches = job.train_loader.train_batches(
        job.batch_order, job.strategy.shard.rank, 0, job.total_steps
    )
    losses = []
    for _ in range(STEPS):
        metrics, _ = train_step(job, state, batches)
        state.step += 1
        losses.append(float(metrics["loss"]))
    job.strategy.sync_buffers()
    kept = job.strategy.state()
    job.strategy.load(kept)
    return losses, [len(kept["model"]), len(kept["optimizer"])]


def collectives(world: World) -> dict[str, Any]:
    """Call each collective of `World`, and check what it returns."""
    assert world.sum(torch.ones(3, device=world.device)).tolist() == [1.0] * 3
    assert world.gather(torch.tensor([1.5, 2.5], dtype=torch.float64)).tolist() == [[1.5, 2.5]]
    assert world.all(True) and not world.all(False)
    assert world.ranks_that_differ(torch.ones(2, device=world.device)) == []
    assert world.share({"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
    assert world.broadcast(bytes(range(256)) * 999, piece_bytes=1000) == bytes(range(256)) * 999
    world.extend_timeouts()
    return {"backend": dist.get_backend(), "store": type(dist.group.WORLD).__name__}


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    ranks, found = Ranks(), dict[str, Any]()
    place = device.choose(ranks)
    alone = {
        precision: train("single", precision, World(ranks, place)) for precision in ("fp32", "bf16")
    }
    with tempfile.TemporaryDirectory() as folder, GROUP:
        rendezvous.use_folder(folder)
        with join(ranks, place) as world:
            found["world"] = collectives(world)
            for strategy in ("ddp", "zero1", "fsdp"):
                for precision, (wanted, _) in alone.items():
                    losses, sizes = train(strategy, precision, world)
                    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
                    # Later losses multiply what rounding made of the first ones.
                    found[f"{strategy} {precision}"] = {
                        "first": max(apart[:4]),
                        "all": max(apart),
                        "state": sizes,
                    }
    Path(sys.argv[1]).write_text(json.dumps(found))
    far = {key: one for key, one in found.items() if one.get("first", 0.0) > 0.01}
    assert not far, found


if __name__ == "__main__":
    main()
