"""Metrics over a window of steps and over an evaluation, summed over all ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.training.distributed.world import World
from rankzero.training.stop import StopCode, most_urgent


@dataclasses.dataclass(frozen=True)
class WindowStats:
    """What every rank knows after a window of steps: the same bits on each."""

    values: Mapping[str, list[float]]
    """Per metric, each step's mean over all ranks' samples."""
    stop_code: StopCode
    """The most urgent of all ranks' requests to stop."""
    seconds: float
    """The slowest rank's wall-clock time for the window."""
    data_waits: list[float]
    """Per rank, the seconds of waiting for data."""
    forwards: list[float]
    """Per rank, the seconds of one forward. 0 if none was timed."""
    steps: int

    @property
    def data_wait_seconds(self) -> float:
        """The longest wait of any rank."""
        return max(self.data_waits)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def is_finite(self) -> bool:
        """Whether the last step's loss is a finite number."""
        # A training that diverges does not recover: once a weight is NaN, every later loss is. An
        # earlier infinite loss alone may be harmless: fp16's loss scaler skips such a step.
        return math.isfinite(self.values["loss"][-1])

    def and_then(self, later: WindowStats) -> WindowStats:
        """Return the times of this window and the next as one, with the next one's values."""
        return dataclasses.replace(
            later,
            seconds=self.seconds + later.seconds,
            data_waits=[a + b for a, b in zip(self.data_waits, later.data_waits, strict=True)],
            steps=self.steps + later.steps,
        )


def reduce_window(
    world: World,
    columns: Mapping[str, Sequence[Tensor]],
    stop_code: int,
    seconds: float,
    data_wait_seconds: float,
    forward_seconds: float = 0.0,
) -> WindowStats:
    """Return a window of steps over all ranks. Collective.

    The arguments are this rank's. `columns`: per metric, each step's 0-d tensor, detached, a mean
    over this rank's samples.
    """
    # One sum carries everything, so there is one collective and one wait for the device. Each rank
    # fills its row of a matrix of zeros with its own numbers.
    own = torch.zeros(world.size, 4, dtype=torch.float64)
    own[world.ranks.rank] = torch.tensor(
        [stop_code, seconds, data_wait_seconds, forward_seconds], dtype=torch.float64
    )
    values = torch.stack([value for column in columns.values() for value in column]).double()
    fused = world.sum(torch.cat([values / world.size, own.flatten().to(values.device)])).tolist()
    cut = len(values)
    steps = cut // len(columns)
    return WindowStats(
        values={name: fused[i * steps : (i + 1) * steps] for i, name in enumerate(columns)},
        stop_code=most_urgent(int(code) for code in fused[cut::4]),
        seconds=max(fused[cut + 1 :: 4]),
        data_waits=fused[cut + 2 :: 4],
        forwards=fused[cut + 3 :: 4],
        steps=steps,
    )


class EvaluationMeans:
    """Means over every sample that any rank evaluated, with batches of any size."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: list[str] | None = None
        self._sums: Tensor | None = None
        self._samples = 0

    def add(self, metrics: Mapping[str, Tensor], samples: int) -> None:
        """Add a batch's means over its `samples`."""
        if self._names is None:
            self._names = check_metrics(metrics)
        row = torch.stack([metrics[name].detach().double() for name in self._names]) * samples
        self._sums = row if self._sums is None else self._sums + row
        self._samples += samples

    def reduce(self) -> dict[str, float]:
        """Return the means over all ranks' samples. Collective, also for a rank without samples."""
        world = self._world
        counts = world.gather(torch.tensor([self._samples])).flatten()
        # A rank without samples does not know the names.
        names: list[str] = json.loads(
            world.broadcast(json.dumps(self._names).encode(), source=int(counts.argmax()))
        )
        sums = self._sums
        if sums is None:
            sums = torch.zeros(len(names), dtype=torch.float64, device=world.device)
        totals = world.sum(sums).tolist()
        return {name: total / int(counts.sum()) for name, total in zip(names, totals, strict=True)}


def check_metrics(metrics: Mapping[str, Tensor]) -> list[str]:
    """Return the metrics' names, loss first. Raises UserError for anything that is no metric."""
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"measure() must return a mapping like {{'loss': loss}}, got {type(metrics).__name__}"
        )
    if "loss" not in metrics:
        raise UserError(f"measure() returned no 'loss', only {sorted(metrics)}: add the key 'loss'")
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.dim():
            found = type(value).__name__
            if isinstance(value, Tensor):
                found = f"shape {tuple(value.shape)}"
            raise UserError(
                f"measure()[{name!r}] must be a 0-d tensor (a mean over the batch), got {found}"
            )
        if value.device != metrics["loss"].device:
            # Stacking would fail, and moving it would wait for the device in each step.
            raise UserError(
                f"measure()[{name!r}] is on {value.device}, the loss on {metrics['loss'].device}: "
                "leave every metric where the model computes it; moving it to the host would make "
                "each step wait"
            )
    return ["loss", *(name for name in metrics if name != "loss")]
