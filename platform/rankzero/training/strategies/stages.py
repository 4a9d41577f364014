"""Where a model is cut for a pipeline, and how `measure` is called on either side of a cut."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from rankzero.errors import UserError
from rankzero.training.strategies import shared_weights
from rankzero.training.strategies.base import Measure


class _InputTaken(Exception):
    """What a model was given."""

    def __init__(self, given: Any) -> None:
        self.given = given


class _InputCatcher(nn.Module):
    def forward(self, *given: Any, **named: Any) -> Any:
        if len(given) != 1 or named or not isinstance(given[0], Tensor):
            raise UserError(
                "train.strategy=pp needs measure() to call the model with one tensor, its samples in rows"
            )
        raise _InputTaken(given[0])


class StageOutput(nn.Module):
    """A model that has its output already, in the mode that its stages are in."""

    def __init__(self, output: Any, training: bool) -> None:
        super().__init__()
        self._output, self.training = output, training

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


def given_to(measure: Measure, batch: Any, training: bool = True) -> Tensor:
    """Return what `measure` gives the model. Raises UserError where that is not one tensor, or nothing."""
    try:
        measure(_InputCatcher().train(training), batch)
    except _InputTaken as taken:
        found: Tensor = taken.given
        return found
    raise UserError("train.strategy=pp needs measure() to call the model it is given")


def make_stage(
    model: nn.Module,
    split_points: Sequence[str],
    rank: int,
    size: int,
    device: torch.device,
    example: Callable[[], Tensor],
) -> Any:
    """Cut the model; return this rank's stage. `example`: what a micro-batch gives the model.

    An `nn.Sequential` is cut between its items, at those that `split_points` names, else so that stages have about as
    many weights each. Another model is traced, and cut before the modules named. Raises UserError.
    """
    if split_points and len(split_points) != size - 1:
        raise UserError(
            f"split_points() names {len(split_points)} places, but {size} processes need {size - 1}"
        )
    if isinstance(model, nn.Sequential):
        stages = cut(model, split_points, size)
        shared_weights.check_stages(stages)
        return PipelineStage(stages[rank].to(device), rank, size, device)
    if not split_points:
        raise UserError(
            "train.strategy=pp needs a model that is an nn.Sequential, or the experiment to say where it is cut: "
            "def split_points(self): return ['layers.6'], the modules that the second stage and so on begin with"
        )
    missing = [name for name in split_points if name not in dict(model.named_modules())]
    if missing:
        raise UserError(f"split_points() names {missing[0]!r}, which the model does not have")
    cuts = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    whole = pipeline(
        model.to(device), mb_args=(example(),), split_spec=cuts
    )  # a trace knows the device it was made on
    for uses in (
        whole.replicated_params
    ):  # by stage; a module that is called in two has a number behind its name
        shared_weights.refuse([re.sub(r"@\d+", "", name) for name in uses.values()], "pp")
    return whole.build_stage(rank, device)


def cut(model: nn.Sequential, split_points: Sequence[str], size: int) -> list[nn.Sequential]:
    """Return the stages of a sequential model; each has weights. Raises UserError where that cannot be."""
    items = list(model.named_children())
    names = [name for name, _ in items]
    if split_points:
        unknown = [name for name in split_points if name not in names]
        if unknown:
            raise UserError(
                f"split_points() names {unknown[0]!r}; the model's items are {', '.join(names)}"
            )
        starts = [0, *(names.index(name) for name in split_points)]
    else:
        starts = balanced([sum(p.numel() for p in item.parameters()) for _, item in items], size)
    ends = [*starts[1:], len(items)]
    stages = [
        nn.Sequential(OrderedDict(items[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]
    if not all(any(True for _ in stage.parameters()) for stage in stages):
        raise UserError(
            f"a stage of the pipeline has no weights: use fewer than {size} processes, or name split_points()"
        )
    return stages


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return where each part of a list begins, so that each has something and about as much as the others. Pure."""
    heavy = [number for number, weight in enumerate(weights) if weight]
    if len(heavy) < parts:
        raise UserError(
            f"the model has {len(heavy)} items with weights, too few for {parts} processes"
        )
    total, starts, done = sum(weights), [0], 0
    for number, weight in enumerate(weights):
        left = len([other for other in heavy if other >= number])
        begun = any(starts[-1] <= other < number for other in heavy)
        due = done >= total * len(starts) / parts or left <= parts - len(starts)
        if len(starts) < parts and begun and weight and due:
            starts.append(number)
        done += weight
    return starts
