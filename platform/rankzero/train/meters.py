"""Running values on the device, one fused reduction per report; throughput with its confidence interval; the sum."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.intervals import half_width
from rankzero.train.stop import foremost
from rankzero.train.straggler import Paces
from rankzero.train.world import World


@dataclasses.dataclass(frozen=True)
class Report:
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
        return foremost(self.stop_codes)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def finite(self) -> bool:
        """Tell whether the last step's loss is a number."""
        return math.isfinite(self.values["loss"][-1])

    def and_then(self, later: Report) -> Report:
        """Return this report's times and those of the one of the steps after it as one, with the latter's values."""
        return dataclasses.replace(
            later,
            seconds=self.seconds + later.seconds,
            data_waits=[a + b for a, b in zip(self.data_waits, later.data_waits, strict=True)],
            steps=self.steps + later.steps,
        )


class Window:
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

    def reduce(self, stop_code: int, seconds: float, data_wait_seconds: float, forward_seconds: float = 0.0) -> Report:
        """Add up the window over all ranks and start a new one. The only collective and host sync between steps."""
        names, rows, world = self._names or [], self._rows, self._world
        self._rows = []
        mine = torch.zeros(world.size, 4, dtype=torch.float64)
        mine[world.ranks.rank] = torch.tensor(
            [stop_code, seconds, data_wait_seconds, forward_seconds], dtype=torch.float64
        )
        values = torch.stack([value for row in rows for value in row]).double()
        fused = world.sum(torch.cat([values / world.size, mine.flatten().to(values.device)])).tolist()
        width, cut = len(names), len(values)
        return Report(
            values={name: fused[column:cut:width] for column, name in enumerate(names)},
            stop_codes=[int(code) for code in fused[cut::4]],
            seconds=max(fused[cut + 1 :: 4]),
            data_waits=fused[cut + 2 :: 4],
            forwards=fused[cut + 3 :: 4],
            steps=len(rows),
        )


class Means:
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


class Throughput:
    """Samples per second in the steady state, with a 95 % confidence interval, by the method of batch means.

    Each window is one batch mean; windows are long enough (about a second) to be nearly
    independent. Evaluations, checkpoints and the warm-up windows never enter.
    """

    def __init__(self, warmup_windows: int = 2) -> None:
        self._skip = warmup_windows
        self._windows: list[tuple[int, float]] = []

    def add(self, samples: int, seconds: float) -> None:
        """Add a window."""
        if self._skip:
            self._skip -= 1
        elif seconds > 0:
            self._windows.append((samples, seconds))

    @property
    def samples_per_second(self) -> float | None:
        """All samples over all seconds; None before the first window after the warm-up."""
        if not self._windows:
            return None
        return sum(samples for samples, _ in self._windows) / sum(seconds for _, seconds in self._windows)

    @property
    def half_width(self) -> float | None:
        """Half the 95 % interval, in samples per second; None with fewer than two windows."""
        return half_width([samples / seconds for samples, seconds in self._windows])


@dataclasses.dataclass
class Tally:
    """What the run's summary is made of."""

    throughput: Throughput = dataclasses.field(default_factory=Throughput)
    paces: Paces = dataclasses.field(default_factory=Paces)
    steps: int = 0
    train_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    blocked_seconds: float = 0.0
    best: float | None = None
    last_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, report: Report, batch_size: int) -> None:
        self.throughput.add(report.steps * batch_size, report.seconds)
        self.paces.add(report.seconds, report.forwards, report.data_waits)
        self.steps += report.steps
        self.train_seconds += report.seconds
        self.data_wait_seconds += report.data_wait_seconds

    def summary(self) -> dict[str, float]:
        """Return the run's figures; one that was not measured is left out."""
        figures = {
            "best": self.best,
            "samples_per_second": self.throughput.samples_per_second,
            "samples_per_second_half_width": self.throughput.half_width,
            "steps": float(self.steps),
            "train_seconds": self.train_seconds,
            "data_wait_fraction": self.data_wait_seconds / self.train_seconds if self.train_seconds else None,
            "checkpoint_blocked_seconds": self.blocked_seconds,
            **self.paces.straggler(),
        }
        return {**self.last_metrics, **{name: value for name, value in figures.items() if value is not None}}


def check_metrics(metrics: Mapping[str, Tensor]) -> list[str]:
    """Return the metrics' names, loss first. Raises UserError where `measure` broke its contract."""
    if not isinstance(metrics, Mapping):
        raise UserError(f"measure() must return a mapping like {{'loss': loss}}, got {type(metrics).__name__}")
    if "loss" not in metrics:
        raise UserError(f"measure() returned no 'loss', only {sorted(metrics)}: add the key 'loss'")
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.dim():
            shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"measure()[{name!r}] must be a 0-d tensor (a mean over the batch), got {shape}")
        if value.device != metrics["loss"].device:
            raise UserError(
                f"measure()[{name!r}] is on {value.device}, the loss on {metrics['loss'].device}: leave every metric "
                "where the model computes it; moving it to the host would make each step wait"
            )
    return ["loss", *(name for name in metrics if name != "loss")]
