"""Cuts a model into pipeline stages, and calls the user's `measure` on both sides of a cut.

It uses torch.distributed.pipelining: `PipelineStage` for an nn.Sequential, `pipeline` for a traced
model.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from rankzero.errors import UserError
from rankzero.launch import failures
from rankzero.training.strategies import shared_weights
from rankzero.training.strategies.base import Measure


class _InputTaken(Exception):
    """Carries the input that `measure` gave the model."""

    def __init__(self, given: Tensor) -> None:
        self.given = given


class _InputCatcher(nn.Module):
    def forward(self, *given: Any, **named: Any) -> Any:
        if len(given) != 1 or named or not isinstance(given[0], Tensor):
            raise UserError(
                "train.strategy=pp needs measure() to call the model with one tensor, its samples "
                "in rows"
            )
        raise _InputTaken(given[0])


class StageOutput(nn.Module):
    """Stands for the model on the last rank: it returns the pipeline's output for any input."""

    def __init__(self, output: Any, training: bool) -> None:
        super().__init__()
        self._output, self.training = output, training

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._output


def input_of(measure: Measure, batch: Any, training: bool = True) -> Tensor:
    """Return the tensor that `measure` gives the model. Raises UserError if it is not one."""
    try:
        measure(_InputCatcher().train(training), batch)
    except _InputTaken as taken:
        return taken.given
    raise UserError("train.strategy=pp needs measure() to call the model it is given")


def make_stage(
    model: nn.Module,
    split_points: Sequence[str],
    rank: int,
    size: int,
    device: torch.device,
    example: Callable[[], Tensor],
) -> Any:
    """Cut the model, and return this rank's stage, a PipelineStage. Raises UserError.

    An `nn.Sequential` is cut before the items in `split_points`. Without them, the stages have
    about as many weights each. Any other model is traced with `example()`, a micro-batch's input,
    and cut before the modules in `split_points`.
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
            "train.strategy=pp needs a model that is an nn.Sequential, or the experiment to say "
            "where it is cut: def split_points(self): return ['layers.6'], the modules with which "
            "the second stage and later ones begin"
        )
    missing = [name for name in split_points if name not in dict(model.named_modules())]
    if missing:
        raise UserError(f"split_points() names {missing[0]!r}, which the model does not have")
    cuts = dict.fromkeys(split_points, SplitPoint.BEGINNING)
    # A trace keeps the device it was made on.
    model, given = model.to(device), example()
    try:
        whole = pipeline(model, mb_args=(given,), split_spec=cuts)
    except RuntimeError as error:
        # PyTorch hides the reason behind advice to call what RankZero calls. It may be pages long.
        why = failures.reason(error.__cause__ or error).partition("\n")[0]
        raise UserError(
            f"train.strategy=pp cannot trace the model: {why}; use an nn.Sequential, or ddp or fsdp"
        ) from error
    # Maps a stage to a weight's name in it. A module called in two stages has "@1" in its name.
    for names in whole.replicated_params:
        shared_weights.refuse([re.sub(r"@\d+", "", name) for name in names.values()], "pp")
    return whole.build_stage(rank, device)


def cut(model: nn.Sequential, split_points: Sequence[str], size: int) -> list[nn.Sequential]:
    """Return the stages of a sequential model. Raises UserError if one would have no weights."""
    items = list(model.named_children())
    names = [name for name, _ in items]
    unknown = [name for name in split_points if name not in names]
    if unknown:
        raise UserError(
            f"split_points() names {unknown[0]!r}; the model's items are {', '.join(names)}"
        )
    # A stage ends where the next one begins.
    if split_points:
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
            f"a stage of the pipeline has no weights: use fewer than {size} processes, or name "
            "split_points()"
        )
    return stages


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return the index at which each part of a list begins. Pure.

    Each part has a weight that is not 0, and about as much as the others. Raises UserError if the
    list is too short.
    """
    heavy = [number for number, weight in enumerate(weights) if weight]
    before = list(itertools.accumulate(weights, initial=0))
    if len(heavy) < parts:
        raise UserError(
            f"the model has {len(heavy)} items with weights, too few for {parts} processes"
        )
    starts, place = [0], 0
    for part in range(1, parts):
        # Each of the parts to come needs a weight, so a part may have to begin early.
        latest = len(heavy) - (parts - part)
        due = before[-1] * part / parts
        place = next((n for n in range(place + 1, latest) if before[heavy[n]] >= due), latest)
        starts.append(heavy[place])
    return starts
