"""Each process has some of the layers, and micro-batches flow through them: pipeline parallel.

`measure(model, batch)` is the user's, and a pipeline calls the model in pieces. So on the first rank `measure` is asked
what it would give the model, by one that takes its input and leaves; on the last rank, what it makes of the pipeline's
output, by one that has it already.

    rank 0        input ─▶ layers ─╮
    rank 1                         ╰▶ layers ─╮
    the last                                  ╰▶ layers ─▶ output ─▶ measure ─▶ loss, metrics
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from rankzero.experiment import Train
from rankzero.training.data.batch import rows_of, samples_in
from rankzero.training.distributed.world import TRAINING_TIMEOUT, World
from rankzero.training.metrics.window import check_metrics
from rankzero.training.strategies import parameter_names
from rankzero.training.strategies.base import (
    Metrics,
    MicroBatchStep,
    Shard,
    Strategy,
    total_norm_factor,
)
from rankzero.training.strategies.stages import StageOutput, given_to

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
MICRO_BATCHES_PER_STAGE = (
    2  # unless the user says: the more, the less of the time stages wait for each other
)


class Pipeline:
    """One stage of a model, and the schedule that all stages follow. All ranks see the same samples."""

    lockstep = True
    shard = Shard(0, 1)

    def __init__(
        self,
        stage: Any,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        train: Train,
        world: World,
    ) -> None:
        """Follow a schedule.

        `stage`: a PipelineStage; `names`: of all the model's parameters, in its own optimizer's order.
        """
        self.model: nn.Module = stage.submod
        self.optimizer = optimizer
        self._stage, self._names, self._world, self._samples = stage, names, world, train.batch_size
        self._micro_batches = micro_batches(train, world.size)
        # NCCL would gather a checkpoint in one GPU's memory.
        self._hosts: Any = dist.new_group(backend="gloo", timeout=TRAINING_TIMEOUT)
        self._schedule = SCHEDULES[train.pp.schedule](
            stage, self._micro_batches, loss_fn=self._loss
        )
        self._how: MicroBatchStep | None = None
        self._batch: Any = None
        self._measured: list[Metrics] = []
        self._metric_names: list[str] = []

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        self._send(how, batch, self._schedule.step)
        return self._shared_by_all()

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any] | None:
        """Return the last stage's metrics. A smaller batch is filled up on its way, and cut again at its end."""
        samples = samples_in(batch)
        filled = torch.arange(self._samples, device=self._world.device) % samples
        output = self._send(
            how, batch if samples == self._samples else rows_of(batch, filled), self._schedule.eval
        )
        if not self._stage.is_last:
            return None
        with how.autocast:
            return how.measure(StageOutput(output[:samples], self.model.training), batch)

    def sync_buffers(self) -> None:
        """Do nothing: no two ranks have the same buffers."""

    def clip(self, norm: float) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        factor = total_norm_factor(norm, self._world, parts=gradients, whole=[])
        for gradient in gradients:
            gradient.mul_(factor)

    def checksum(self) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)  # there are no replicas

    def state(self) -> dict[str, Any]:
        mine = (
            get_model_state_dict(self.model),
            get_optimizer_state_dict(self.model, self.optimizer),
        )
        found: list[Any] | None = [None] * self._world.size if self._world.ranks.first else None
        dist.gather_object(parameter_names.on_host(mine), found, group=self._hosts)
        if found is None:
            return {}
        weights = {name: value for model, _ in found for name, value in model.items()}
        return {
            "model": weights,
            "optimizer": parameter_names.joined([optimizer for _, optimizer in found]),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict({name: saved["model"][name] for name in self.model.state_dict()})
        mine = [name for name, _ in self.model.named_parameters()]
        named = parameter_names.part_of(
            parameter_names.by_name(saved["optimizer"], self._names), mine
        )
        set_optimizer_state_dict(self.model, self.optimizer, named)

    def without_communication(self) -> Strategy | None:
        return None

    def _send(self, how: MicroBatchStep, batch: Any, go: Any) -> Any:
        """Send a batch through the stages; return the output, on the last rank."""
        self._how, self._batch, self._measured = how, batch, []
        with how.autocast:
            if self._stage.is_first:
                return go(given_to(how.measure, batch, self.model.training))
            if self._stage.is_last:
                return go(target=torch.arange(self._samples, device=self._world.device))
            return go()

    def _loss(self, output: Tensor, rows: Tensor) -> Tensor:
        """Measure a micro-batch on the last rank: those rows of the batch."""
        assert self._how is not None
        values = self._how.measure(
            StageOutput(output, self.model.training), rows_of(self._batch, rows)
        )
        if not self._metric_names:
            check_metrics(values)
        loss: Tensor = values["loss"]
        self._measured.append({name: value.detach() for name, value in values.items()})
        return loss

    def _shared_by_all(self) -> Metrics:
        """Return the step's metrics so that their mean over all ranks is the last rank's."""
        if not self._metric_names:
            names = json.dumps(list(self._measured[-1]) if self._measured else []).encode()
            self._metric_names = json.loads(
                self._world.broadcast(names, source=self._world.size - 1)
            )
        if not self._stage.is_last:
            return {name: torch.zeros((), device=self._world.device) for name in self._metric_names}
        step = self._measured[
            -self._micro_batches :
        ]  # the first step begins with one that only finds out shapes
        return {
            name: torch.stack([one[name] for one in step]).mean() * self._world.size
            for name in self._metric_names
        }


def micro_batches(train: Train, stages: int) -> int:
    """Return how many micro-batches a batch is sent in."""
    if train.micro_batch is not None:
        return train.batch_size // train.micro_batch
    wanted = MICRO_BATCHES_PER_STAGE * stages
    return max(count for count in range(1, wanted + 1) if train.batch_size % count == 0)
