"""Running values on the device, one fused reduction per report; throughput with its confidence interval; the sum."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.training.distributed.world import World
from rankzero.training.stop import most_urgent


@dataclasses.dataclass(frozen=True)
class WindowStats:
    """What every rank knows after a window of steps: the same bits on each."""

    values: Mapping[str, list[float]]
    """Per metric, each step's mean over all ranks' samples."""
    stop_codes: list[int]
    """Per rank, why it wants to stop; 0: it does not."""
    seconds: float
    """The slowest rank's wall-clock time for the window."""
    data_waits: list[float]
    """Per rank, the seconds spent waiting for data."""
    forwards: list[float]
    """Per rank, the seconds of one forward; see `straggler`."""
    steps: int

    @property
    def data_wait_seconds(self) -> float:
        """The slowest rank's."""
        return max(self.data_waits)

    @property
    def stop_code(self) -> int:
        return most_urgent(self.stop_codes)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def finite(self) -> bool:
        """Tell whether the last step's loss is a number."""
        return math.isfinite(self.values["loss"][-1])

    def and_then(self, later: WindowStats) -> WindowStats:
        """Return this report's times and those of the one of the steps after it as one, with the latter's values."""
        return dataclasses.replace(
            later,
            seconds=self.seconds + later.seconds,
            data_waits=[a + b for a, b in zip(self.data_waits, later.data_waits, strict=True)],
            steps=self.steps + later.steps,
        )


class MetricWindow:
    """The steps since the last report. Values stay on the device until `reduce`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: list[str] | None = None
        self._rows: list[list[Tensor]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Keep one step's metrics: 0-d tensors, detached, means over this rank's samples of the step."""
        if self._names is None:
            self._names = check_metrics(metrics)
        try:
            self._rows.append([metrics[name] for name in self._names])
        except KeyError as error:
            raise UserError(
                f"measure() left out {error} that it returned before: return the same keys every time"
            ) from None

    def reduce(
        self, stop_code: int, seconds: float, data_wait_seconds: float, forward_seconds: float = 0.0
    ) -> WindowStats:
        """Add up the window over all ranks and start a new one. The only collective and host sync between steps."""
        names, rows, world = self._names or [], self._rows, self._world
        self._rows = []
        mine = torch.zeros(world.size, 4, dtype=torch.float64)
        mine[world.ranks.rank] = torch.tensor(
            [stop_code, seconds, data_wait_seconds, forward_seconds], dtype=torch.float64
        )
        values = torch.stack([value for row in rows for value in row]).double()
        fused = world.sum(
            torch.cat([values / world.size, mine.flatten().to(values.device)])
        ).tolist()
        width, cut = len(names), len(values)
        return WindowStats(
            values={name: fused[column:cut:width] for column, name in enumerate(names)},
            stop_codes=[int(code) for code in fused[cut::4]],
            seconds=max(fused[cut + 1 :: 4]),
            data_waits=fused[cut + 2 :: 4],
            forwards=fused[cut + 3 :: 4],
            steps=len(rows),
        )


class EvaluationMeans:
    """Means over every sample that any rank saw, however ragged the batches: sums and counts."""

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
        """Return the means over all ranks' samples. A collective: a rank without samples must call it too."""
        counts = self._world.gather(torch.tensor([self._samples])).flatten()
        told = self._world.broadcast(json.dumps(self._names).encode(), source=int(counts.argmax()))
        names: list[str] = json.loads(told)
        nothing = torch.zeros(len(names), dtype=torch.float64, device=self._world.device)
        totals = self._world.sum(nothing if self._sums is None else self._sums).tolist()
        return {name: total / int(counts.sum()) for name, total in zip(names, totals, strict=True)}


def check_metrics(metrics: Mapping[str, Tensor]) -> list[str]:
    """Return the metrics' names, loss first. Raises UserError where `measure` broke its contract."""
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"measure() must return a mapping like {{'loss': loss}}, got {type(metrics).__name__}"
        )
    if "loss" not in metrics:
        raise UserError(f"measure() returned no 'loss', only {sorted(metrics)}: add the key 'loss'")
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.dim():
            shape = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise UserError(
                f"measure()[{name!r}] must be a 0-d tensor (a mean over the batch), got {shape}"
            )
        if value.device != metrics["loss"].device:
            raise UserError(
                f"measure()[{name!r}] is on {value.device}, the loss on {metrics['loss'].device}: leave every metric "
                "where the model computes it; moving it to the host would make each step wait"
            )
    return ["loss", *(name for name in metrics if name != "loss")]
