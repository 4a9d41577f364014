"""Pipeline parallel (pp): each process has some of the layers, and micro-batches flow through them.

It uses the schedules of torch.distributed.pipelining. A schedule calls the model in pieces, while
`measure(model, batch)` calls all of it. So the first rank runs `measure` with a module that takes
its input and leaves. The last rank runs it with a module that returns the pipeline's output.

    rank 0        input ─▶ layers ─╮
    rank 1                         ╰▶ layers ─╮
    the last                                  ╰▶ layers ─▶ output ─▶ measure ─▶ loss, metrics
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from rankzero.errors import UserError
from rankzero.experiment import Experiment, Train
from rankzero.ratio import Ratio
from rankzero.training.checkpoints.host_copy import plain
from rankzero.training.data.batch import map_tensors, rows_of, samples_in
from rankzero.training.distributed import torch_compat
from rankzero.training.distributed.world import TRAINING_TIMEOUT, World
from rankzero.training.metrics.window import check_metrics, check_names
from rankzero.training.optimization import optimizers
from rankzero.training.optimization.joint_optimizer import JointOptimizer
from rankzero.training.strategies import parameter_names, replicated
from rankzero.training.strategies.base import (
    Measure,
    Metrics,
    MicroBatchStep,
    Shard,
    Strategy,
    clip,
    with_versions,
)
from rankzero.training.strategies.stages import StageOutput, input_of, make_stage

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Pipeline:
    """One stage of a model, and the schedule that all stages follow. A Strategy.

    `stage`: a PipelineStage. `names`: of all the model's parameters, in its optimizer's order.
    """

    lockstep = True
    shard = Shard(0, 1)

    def __init__(
        self, stage: Any, optimizer: Optimizer, names: list[str], train: Train, world: World
    ) -> None:
        self.model: nn.Module = stage.submod
        self.optimizer = optimizer
        self._stage, self._names, self._world, self._samples = stage, names, world, train.batch_size
        self._micro_batches = _micro_batch_count(train, world.size)
        # NCCL would gather a checkpoint in one GPU's memory.
        self._host_group: Any = dist.new_group(backend="gloo", timeout=TRAINING_TIMEOUT)
        schedule = SCHEDULES[train.pp.schedule]
        self._schedule = schedule(stage, self._micro_batches, loss_fn=self._loss)
        self._how: MicroBatchStep | None = None
        self._batch: Any = None
        self._measured: list[Metrics] = []
        # The shape of each metric, by name: () of a mean, [2] or [2, n] of a Ratio.
        self._shapes: dict[str, list[int]] = {}

    def train_only(self, names: Collection[str]) -> None:  # noqa: ARG002
        # The stages agree once which of their outputs have gradients.
        raise UserError("train.strategy=pp cannot freeze parts of a model: use ddp or fsdp")

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def forward_backward(self, how: MicroBatchStep, batch: Any) -> Metrics:
        """Return metrics whose mean over all ranks is the last rank's."""
        self._run(how, batch, self._schedule.step)
        # Only the last rank measures, so it sends names and shapes to all others, once.
        if not self._shapes:
            measured = self._measured[-1] if self._measured else {}
            shapes = {name: list(value.shape) for name, value in measured.items()}
            self._shapes = self._world.share(shapes, source=self._world.size - 1)
        # The window takes the mean over ranks. So the last rank multiplies, and the others add 0.
        if not self._stage.is_last:
            device = self._world.device
            return {name: torch.zeros(shape, device=device) for name, shape in self._shapes.items()}
        # The first step calls `_loss` once more, to find out shapes.
        latest = self._measured[-self._micro_batches :]
        for metrics in latest:
            check_names(metrics.keys(), self._shapes.keys())
        return {
            name: torch.stack([metrics[name] for metrics in latest]).mean(0) * self._world.size
            for name in self._shapes
        }

    def forward_metrics(self, how: MicroBatchStep, batch: Any) -> Mapping[str, Any] | None:
        # A schedule takes batches of one size. A smaller one is filled up, and its output cut.
        samples = samples_in(batch)
        rows = torch.arange(self._samples, device=self._world.device) % samples
        filled = batch if samples == self._samples else rows_of(batch, rows)
        output = self._run(how, filled, self._schedule.eval)
        if not self._stage.is_last:
            return None
        cut = map_tensors(output, lambda one: one[:samples])
        return how.forward(StageOutput(cut, self.model.training), batch)

    def sync_buffers(self) -> None:
        """Do nothing: no two ranks have the same buffers."""

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Do nothing: each rank has gradients of its own, and a pipeline takes no turns."""

    def clip(self, norm: float) -> Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return clip(self._world, norm, parts=gradients, whole=())

    def checksum(self) -> Tensor:
        """Return a constant: there are no replicas."""
        return torch.zeros(1, dtype=torch.int64)

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def model_state(self) -> dict[str, Any]:
        found = self._gathered(get_model_state_dict(self.model))
        return {name: value for model in found for name, value in model.items()}

    def load_model(self, saved: Mapping[str, Any]) -> None:
        mine = with_versions(saved, self.model)
        # The others are those of other stages.
        for name in saved.keys() - self.model.state_dict().keys():
            del mine[name]
        self.model.load_state_dict(mine)

    def state(self) -> dict[str, Any]:
        mine = parameter_names.order(self.model, self.optimizer)
        parts = self._gathered(parameter_names.by_name(self.optimizer.state_dict(), mine))
        return {"model": self.model_state(), "optimizer": parameter_names.joined(parts)}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.load_model(saved["model"])
        # The whole optimizer's order turns a plain model's numbers into names.
        named = parameter_names.by_name(saved["optimizer"], self._names)
        mine = parameter_names.order(self.model, self.optimizer)
        part = parameter_names.part_of(named, mine)
        self.optimizer.load_state_dict(parameter_names.by_number(part, mine))

    def _gathered(self, mine: Any) -> list[Any]:
        """Return every rank's content on rank 0, and nothing on the others. Collective.

        Unlike `dist.gather_object`, it unpickles only tensors and plain values. The parts of
        the other ranks are on the host.
        """
        if not self._world.ranks.first:
            content = io.BytesIO()
            torch.save(tree_map(plain, mine), content)
            sent = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
            dist.send(torch.tensor([len(sent)]), 0, group=self._host_group)
            dist.send(sent, 0, group=self._host_group)
            return []
        found = [tree_map(plain, mine)]
        for rank in range(1, self._world.size):
            length = torch.zeros(1, dtype=torch.int64)
            dist.recv(length, rank, group=self._host_group)
            received = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(received, rank, group=self._host_group)
            content = io.BytesIO(received.numpy().tobytes())
            found.append(torch.load(content, map_location="cpu", weights_only=True))
        return found

    def _run(self, how: MicroBatchStep, batch: Any, schedule: Any) -> Any:
        """Send a batch through the stages, and return the output on the last rank."""
        self._how, self._batch, self._measured = how, batch, []
        with how.autocast:
            inputs: list[Any] = []
            if self._stage.is_first:
                inputs = [input_of(how.measure, batch, self.model.training)]
            targets: dict[str, Tensor] = {}
            if self._stage.is_last and not self._stage.is_first:
                targets["target"] = torch.arange(self._samples, device=self._world.device)
            # In the first step, the stages send each other the shapes of their outputs, as objects.
            with torch_compat.no_foreign_objects():
                return schedule(*inputs, **targets)

    def _loss(self, output: Tensor, rows: Tensor) -> Tensor:
        """Measure these rows of the batch. The schedule calls it on the last rank."""
        assert self._how is not None
        batch = rows_of(self._batch, rows)
        # The user's code may exchange objects of its own.
        with torch_compat.any_objects():
            values = self._how.measure(StageOutput(output, self.model.training), batch)
        # In an evaluation, `forward_metrics` measures the whole batch.
        if self.model.training:
            if not self._shapes:
                check_metrics(values)
            self._measured.append({name: value.detach().clone() for name, value in values.items()})
        found = values["loss"]
        # The loop divides a Ratio's gradients.
        loss: Tensor = found
        if isinstance(found, Ratio):
            loss = found.numerator / self._how.samples
        return loss


def build(
    experiment: Experiment,
    model: nn.Module,
    world: World,
    measure: Measure,
    example: Callable[[], Any],
) -> Strategy:
    """Return this rank's stage of `model`. Raises UserError, see `strategies.build`. Collective."""
    train = experiment.train
    if train.eval_batch is not None and train.eval_batch > train.batch_size:
        raise UserError(
            f"train.eval_batch={train.eval_batch}: train.strategy=pp evaluates batches of at most "
            f"train.batch_size={train.batch_size} samples, so set it to that or less"
        )
    if not world.is_distributed:
        return replicated.single(experiment, model.to(world.device), world)
    whole = optimizers.of(experiment, model, fuse=False)
    if isinstance(whole, JointOptimizer):
        raise UserError(
            f"train.strategy=pp takes one optimizer, and optimizer() returned {len(whole.parts)}: "
            "return one, or use ddp or fsdp"
        )
    names = parameter_names.order(model, whole)
    size = train.batch_size // _micro_batch_count(train, world.size)

    def micro_batch() -> Tensor:
        return input_of(measure, example())[:size]

    stage = make_stage(
        model, experiment.split_points(), world.ranks.rank, world.size, world.device, micro_batch
    )
    return Pipeline(stage, _of_stage(whole, stage.submod), names, train, world)


def _of_stage(whole: Optimizer, stage: nn.Module) -> Optimizer:
    """Return the optimizer with a stage's parameters alone. It keeps all groups, some empty."""
    own = set(stage.parameters())
    for group in whole.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in own]
    for other in whole.state.keys() - own:
        del whole.state[other]
    # Some optimizers make their state at once, where the parameters were then.
    whole.load_state_dict(whole.state_dict())
    return optimizers.fused(whole, stage)


def _micro_batch_count(train: Train, stages: int) -> int:
    """Return the number of micro-batches of a batch."""
    if train.micro_batch is not None:
        return train.batch_size // train.micro_batch
    # More of them make stages wait less for each other, but each becomes smaller.
    most = 2 * stages
    return max(count for count in range(1, most + 1) if train.batch_size % count == 0)
