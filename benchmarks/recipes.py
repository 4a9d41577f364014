"""PyTorch's own recipes for one training step of each strategy, as its tutorials write them.

Sources: "Getting Started with Distributed Data Parallel", "Shard Optimizer States with
ZeroRedundancyOptimizer", "Getting Started with Fully Sharded Data Parallel (FSDP2)" and
"Introduction to Distributed Pipeline Parallelism".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import workloads
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[Any], Tensor]
MICRO_BATCHES = 4


def step_of(experiment: workloads.Workload) -> Step:
    """Return what trains a batch, and returns its loss on this rank."""
    recipes = {"ddp": ddp, "zero1": zero1, "fsdp": fsdp, "pp": pipeline}
    return recipes[experiment.train.strategy](experiment)


def ddp(experiment: workloads.Workload) -> Step:
    model = DistributedDataParallel(experiment.model(), gradient_as_bucket_view=True)
    return _step(experiment, model, experiment.optimizer(model))


def zero1(experiment: workloads.Workload) -> Step:
    model = DistributedDataParallel(experiment.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optim.AdamW, lr=experiment.lr, fused=True
    )
    return _step(experiment, model, optimizer)


def fsdp(experiment: workloads.Workload) -> Step:
    model: Any = experiment.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model.layers.layers, model]:
        fully_shard(layer, mesh=mesh)
    return _step(experiment, model, experiment.optimizer(model))


def pipeline(experiment: workloads.Workload) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    # As `split_points` of the workload says.
    layers = list(experiment.model().children())
    part = nn.Sequential(*(layers[:3] if rank == 0 else layers[3:]))
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)
    optimizer = experiment.optimizer(part)

    def step(batch: Any) -> Tensor:
        x, labels = batch
        losses = list[Tensor]()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The caller takes the mean over ranks.
        return torch.stack(losses).mean() * size if losses else torch.zeros(())

    return step


def _step(experiment: workloads.Workload, model: nn.Module, optimizer: optim.Optimizer) -> Step:
    def step(batch: Any) -> Tensor:
        loss = experiment.measure(model, batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step
