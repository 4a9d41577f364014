"""Metrics over a window of steps, summed over all ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NoReturn

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.ratio import Ratio
from rankzero.training.distributed.world import World
from rankzero.training.stop import StopCode, most_urgent


@dataclasses.dataclass(frozen=True)
class WindowStats:
    """A window of steps over all ranks: the same bits on each."""

    values: Mapping[str, list[float]]
    """Per metric, each step's mean over all ranks' samples, or the quotient of a `Ratio`."""
    stop_code: StopCode
    """The most urgent of all ranks' requests to stop."""
    seconds: float
    """The slowest rank's wall-clock time for the window."""
    data_waits: list[float]
    """Per rank, the seconds of waiting for data."""
    forwards: list[float]
    """Per rank, the seconds of one forward. 0 if none was timed."""
    steps: int
    tokens: float = 0.0
    """All ranks' tokens, if the experiment counts them."""
    quotients: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Per `Ratio` of vectors, the quotients [steps, n]; `values` has their means."""

    is_finite: bool = True
    """Whether the last step's losses, or both parts of each `Ratio`, are finite numbers."""
    suspended_seconds: float = 0.0
    """For how long a rank as a whole stood still, at least."""

    @property
    def data_wait_seconds(self) -> float:
        """The longest wait of any rank."""
        return max(self.data_waits)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    def and_then(self, later: WindowStats) -> WindowStats:
        """Return the times of this window and the next as one, with the next one's values."""
        return dataclasses.replace(
            later,
            seconds=self.seconds + later.seconds,
            data_waits=[a + b for a, b in zip(self.data_waits, later.data_waits, strict=True)],
            steps=self.steps + later.steps,
            tokens=self.tokens + later.tokens,
            suspended_seconds=self.suspended_seconds + later.suspended_seconds,
        )

    def without_suspension(self, step_seconds: float) -> WindowStats:
        """Return the window with the times that it would have without a suspension.

        `step_seconds`: of the window before, or infinite. They bound what nobody measured.
        """
        if not self.suspended_seconds:
            return self
        left = self.seconds - self.suspended_seconds
        seconds = min(left if left > 0 else self.seconds, step_seconds * self.steps)
        waits = [min(wait, seconds) for wait in self.data_waits]
        return dataclasses.replace(self, seconds=seconds, data_waits=waits)


def reduce_window(
    world: World,
    columns: Mapping[str, Sequence[Tensor]],
    stop_code: int,
    seconds: float,
    data_wait_seconds: float,
    forward_seconds: float = 0.0,
    tokens: float = 0.0,
    *,
    suspended_seconds: float = 0.0,
) -> WindowStats:
    """Return a window of steps over all ranks. Collective.

    The arguments are this rank's. `columns`: per metric, each step's 0-d tensor, detached, a mean
    over this rank's samples. For a `Ratio`: its two parts, [2] or [2, n], each such a mean.
    """
    # One sum carries everything, so there is one collective and one wait for the device. Each rank
    # fills its row of a matrix of zeros with its own numbers.
    mine = [stop_code, seconds, data_wait_seconds, forward_seconds, tokens, suspended_seconds]
    own = torch.zeros(world.size, len(mine), dtype=torch.float64)
    own[world.ranks.rank] = torch.tensor(mine, dtype=torch.float64)
    # Sorted, because ranks may return the same metrics in other orders.
    ordered = sorted(columns, key=str)
    stacked = [torch.stack(list(columns[name])) for name in ordered]
    values = torch.cat([one.flatten().double() for one in stacked])
    fused = world.sum(torch.cat([values / world.size, own.flatten().to(values.device)])).cpu()
    parts = fused[: len(values)].split([one.numel() for one in stacked])
    summed = {
        name: part.view(one.shape) for name, part, one in zip(ordered, parts, stacked, strict=True)
    }
    finished = {name: quotients(value) for name, value in summed.items()}
    times = fused[len(values) :].tolist()
    # With turns, each has a loss of its own, as in "critic/loss".
    of_turns = [name for name in summed if name.partition("/")[2] == "loss"]
    losses = ["loss"] if "loss" in summed else of_turns
    return WindowStats(
        values={name: means(finished[name]).tolist() for name in columns},
        stop_code=most_urgent(int(code) for code in times[::6]),
        seconds=max(times[1::6]),
        data_waits=times[2::6],
        forwards=times[3::6],
        steps=len(stacked[0]),
        tokens=sum(times[4::6]),
        suspended_seconds=max(times[5::6]),
        quotients={name: value for name, value in finished.items() if value.dim() > 1},
        # Once a weight is NaN, every later loss is. So an earlier loss alone shows nothing.
        is_finite=all(bool(summed[name][-1].isfinite().all()) for name in losses),
    )


def quotients(values: Tensor) -> Tensor:
    """Return means [steps] as they are, and sums [steps, 2] or [steps, 2, n] divided.

    A quotient is NaN if its denominator is 0.
    """
    if values.dim() == 1:
        return values
    numerators, denominators = values.unbind(1)
    return torch.where(denominators == 0, math.nan, numerators / denominators)


def means(values: Tensor) -> Tensor:
    """Return [steps] as it is, and of [steps, n] the means of each step's numbers, without NaN."""
    return values.nanmean(1) if values.dim() > 1 else values


def check_metrics(metrics: Mapping[str, object], stateful: Collection[str] = ()) -> list[str]:
    """Return the metrics' names, loss first. Raises UserError for anything that is no metric.

    `stateful`: the names in the experiment's `metrics()`, which are left out.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"measure() must return a mapping like {{'loss': loss}}, got {type(metrics).__name__}"
        )
    if "loss" not in metrics:
        raise UserError(f"measure() returned no 'loss', only {sorted(metrics)}: add the key 'loss'")
    device = _parts("loss", metrics["loss"])[0].device
    names = ["loss", *(name for name in metrics if name != "loss" and name not in stateful)]
    for name in names:
        for part in _parts(name, metrics[name]):
            if part.device != device:
                # Stacking would fail, and moving it would wait for the device in each step.
                raise UserError(
                    f"measure()[{name!r}] is on {part.device}, the loss on {device}: leave every "
                    "metric where the model computes it, or each step waits for a copy"
                )
    return names


def check_names(found: Set[str], first: Set[str]) -> None:
    """Raise UserError if `measure` did not return the names that it returned first."""
    if found == first:
        return
    name = min(first ^ found, key=str)
    change = f"did not return {name!r}, which it returned before"
    if name in found:
        change = f"returned {name!r}, which it did not return before"
    raise UserError(
        f"measure() {change}: return the same keys every time. A LightningModule must log the same "
        "names in each step"
    )


def metrics_checksum(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return a number that is equal on all ranks if names and shapes are, in any order."""
    ordered = sorted((str(name), list(shape)) for name, shape in shapes.items())
    return zlib.crc32(json.dumps(ordered).encode())


def refuse_differing(
    world: World, shapes: Mapping[str, Sequence[int]], rank: int, source: int
) -> NoReturn:
    """Raise a UserError that names what differs between two ranks' metrics. Collective."""
    mine = {str(name): list(shape) for name, shape in shapes.items()}
    there, here = world.share(mine, rank), world.share(mine, source)
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    facts = [
        f"{name!r} is missing on rank {source if name in there else rank}"
        if (name in there) != (name in here)
        else f"{name!r} has the shapes {there[name]} and {here[name]}"
        for name in names
    ]
    raise UserError(
        f"measure() returned other metrics on rank {rank} than on rank {source}: "
        f"{', '.join(facts)}; return the same keys every time, on every rank"
    )


def _parts(name: str, value: object) -> list[Tensor]:
    """Return a metric's tensors. Raises UserError if it is no mean and no `Ratio`."""
    if not isinstance(value, Ratio):
        if isinstance(value, Tensor) and not value.dim():
            return [value]
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        hint = ", and metrics() has no object of this name" if isinstance(value, tuple) else ""
        raise UserError(
            f"measure()[{name!r}] must be a 0-d tensor (a mean over the batch) or a Ratio, got "
            f"{found}{hint}"
        )
    numerator, denominator = value.numerator, value.denominator
    most = 0 if name == "loss" else 1
    if not isinstance(numerator, Tensor) or numerator.dim() > most:
        found = f"shape {tuple(numerator.shape)}" if isinstance(numerator, Tensor) else numerator
        allowed = "a 0-d or 1-d tensor" if most else "a 0-d tensor"
        raise UserError(f"measure()[{name!r}]: the numerator must be {allowed}, got {found}")
    if not isinstance(denominator, Tensor):
        if isinstance(denominator, (int, float)):
            return [numerator]
        raise UserError(
            f"measure()[{name!r}]: the denominator must be a tensor or a number, got "
            f"{type(denominator).__name__}"
        )
    if denominator.dim() and denominator.shape != numerator.shape:
        raise UserError(
            f"measure()[{name!r}]: numerator and denominator have the shapes "
            f"{tuple(numerator.shape)} and {tuple(denominator.shape)}: make them equal"
        )
    if name == "loss" and denominator.requires_grad:
        # The sum of all denominators is known only after the backward.
        raise UserError(
            "measure()['loss'] is a Ratio, and its denominator depends on the model: use "
            "denominator.detach() if it only counts, else return the quotient itself"
        )
    return [numerator, denominator]
