"""The objects of `Experiment.metrics()`: each needs every sample of the validation set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.training.distributed.world import World


class StatefulMetrics:
    """The objects in one evaluation.

    torchmetrics' objects are updated with each batch, and add their states over ranks themselves.
    Two states of other objects cannot be added. These objects get all samples in one update, so
    their values have the same bits on any number of ranks.
    """

    def __init__(self, objects: Mapping[str, Any], world: World, parts: int) -> None:
        self._world, self._divided = world, parts > 1
        self._objects = dict(objects)
        self._arguments: dict[str, list[Sequence[Tensor]]] = {}
        # Importing it takes a second. If it is not loaded, no object is of its classes.
        library = sys.modules.get("torchmetrics") if objects else None
        kinds = (library.Metric, library.MetricCollection) if library else ()
        for name, metric in self._objects.items():
            if isinstance(metric, nn.Module):
                metric.to(world.device)
            # It may be the object of the evaluation before.
            if callable(reset := getattr(metric, "reset", None)):
                reset()
            is_own = not isinstance(metric, kinds)
            if is_own:
                self._arguments[name] = []
            if is_own or not self._divided:
                # The ranks see the same samples, or only one rank updates and computes it.
                for module in _modules([metric, getattr(metric, "__dict__", {})]):
                    if hasattr(module, "distributed_available_fn"):
                        module.distributed_available_fn = lambda: False

    @property
    def names(self) -> Collection[str]:
        return self._objects.keys()

    def update(self, metrics: Mapping[str, Any], samples: int) -> None:
        """Update the objects with a batch, or keep it. Raises UserError for wrong arguments."""
        for name, metric in self._objects.items():
            args = metrics.get(name)
            if not isinstance(args, tuple):
                raise UserError(
                    f"measure()[{name!r}] must be the tuple of arguments of update(), because "
                    f"metrics() has an object of this name; got {type(args).__name__}"
                )
            if name not in self._arguments:
                metric.update(*args)
                continue
            for arg in args:
                if not isinstance(arg, Tensor) or not arg.dim() or len(arg) != samples:
                    found = f"shape {tuple(arg.shape)}" if isinstance(arg, Tensor) else type(arg)
                    raise UserError(
                        f"measure()[{name!r}]: update() must get tensors with {samples} rows, one "
                        f"for each sample of the batch, got {found}: let collate() keep every "
                        "sample; an object of torchmetrics may get anything"
                    )
            # A view would keep the model's whole output, and a CUDA graph writes over it.
            self._arguments[name].append(tuple(arg.clone() for arg in args))
            _check_rows(name, args, [one.shape[1:] for one in self._arguments[name][0]])

    def compute(self, counts: Sequence[int], source: int) -> dict[str, float]:
        """Return the values, by name or ``name/key``. Collective. Raises UserError.

        `counts`: each rank's samples. `source`: a rank that has some.
        """
        world = self._world
        found: dict[str, float] = {}
        if not self._objects:
            return {}
        if self._divided and not all(counts) and len(self._arguments) < len(self._objects):
            raise UserError(
                "torchmetrics needs a validation sample on each rank: use more samples, or fewer "
                "processes"
            )
        is_source = world.ranks.rank == source
        for name, metric in self._objects.items():
            if name in self._arguments:
                args = self._gathered(name, counts, source)
                if is_source:
                    metric.update(*args)
            if is_source or (self._divided and name not in self._arguments):
                found |= _numbers(name, metric.compute())
        values: dict[str, float] = world.share(found, source)
        return values

    def _gathered(self, name: str, counts: Sequence[int], source: int) -> list[Tensor]:
        """Return all ranks' arguments, by sample, to the source and on its device. Collective."""
        mine = [torch.cat(batches) for batches in zip(*self._arguments[name], strict=True)]
        if not self._divided:
            return mine
        # Ranks have different numbers of rows, and one may have none.
        world, most = self._world, max(counts)
        known = [[str(arg.dtype).removeprefix("torch."), arg.shape[1:]] for arg in mine]
        # Samples are dealt to the ranks in turn.
        rows = torch.arange(most)[:, None] < torch.tensor(counts)
        gathered, shared = [], world.share(known, source)
        # A padded copy would repeat rows of width 1.
        _check_rows(name, mine, [shape for _, shape in shared])
        for number, (dtype, shape) in enumerate(shared):
            padded = torch.zeros(most, *shape, dtype=getattr(torch, dtype), device=world.device)
            if mine:
                padded[: len(mine[number])] = mine[number]
            every = world.gather(padded.view(-1).view(torch.uint8)).view(padded.dtype)
            if world.ranks.rank == source:
                every = every.to(mine[number].device).view(world.size, *padded.shape)
                gathered.append(every.transpose(0, 1)[rows])
        return gathered


def _modules(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the modules in a tree: a user's object may hold objects of torchmetrics."""
    if isinstance(value, nn.Module):
        yield from value.modules()
    elif depth:  # A list may hold itself.
        for one in value.values() if isinstance(value, dict) else value:
            # Another mapping than a dict may load a file for each value.
            if isinstance(one, (nn.Module, dict, list, tuple)):
                yield from _modules(one, depth - 1)


def _check_rows(name: str, args: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> None:
    """Raise UserError if the rows of `args` have other shapes than those before."""
    for arg, shape in zip(args, shapes, strict=False):
        if tuple(arg.shape[1:]) != tuple(shape):
            raise UserError(
                f"measure()[{name!r}]: rows of shape {tuple(shape)} and {tuple(arg.shape[1:])}: "
                "pad them to one width"
            )


def without_stateful(measure: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Return `measure` without the values of these names in training, where nobody updates them."""
    if not names:
        return measure

    def measure_sums(model: Any, *given: Any) -> Any:
        values = measure(model, *given)
        if not model.training:
            return values
        return {name: value for name, value in values.items() if name not in names}

    return measure_sums


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return what a `compute` returned as numbers. Raises UserError if it is none."""
    found = value if isinstance(value, Mapping) else {"": value}
    try:
        return {f"{name}/{key}" if key else name: float(one) for key, one in found.items()}
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"metrics()[{name!r}].compute() must return a number or {{name: number}}, got {value!r}"
        ) from None
