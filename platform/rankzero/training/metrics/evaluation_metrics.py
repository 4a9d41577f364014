"""The metrics of one evaluation: every sample of all ranks counts once, in batches of any size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.distributed.world import World
from rankzero.training.metrics.derived import derived
from rankzero.training.metrics.stateful import StatefulMetrics
from rankzero.training.metrics.window import (
    check_metrics,
    check_names,
    means,
    metrics_checksum,
    quotients,
    refuse_differing,
)


class EvaluationMetrics:
    """Adds up what `measure` returns.

    `parts`: into how many parts the ranks divide the samples; 1 if all see the same.
    """

    def __init__(self, world: World, parts: int, experiment: Experiment) -> None:
        self._world, self._experiment = world, experiment
        self._stateful = StatefulMetrics(experiment.metrics(), world, parts)
        # The shape of each metric's sums: () of a mean, [2] or [2, n] of a Ratio.
        self._shapes: dict[str, list[int]] = {}
        self._sums: Tensor | None = None
        self._samples = 0

    def add(self, metrics: Mapping[str, Any], samples: int) -> None:
        """Add a batch: its means over `samples`, its ratios, and the arguments of an update.

        A batch of 0 samples is one that this rank repeats, and does not count.
        """
        if not samples:
            return
        if not self._shapes:
            names = check_metrics(metrics, self._stateful.names)
            self._shapes = {name: list(metrics[name].detach().shape) for name in names}
        check_names(metrics.keys() - self._stateful.names, self._shapes.keys())
        # Sorted, because ranks may return them in other orders. A Ratio's parts are sums already.
        rows = [
            metrics[name].detach().double().flatten() * (1 if self._shapes[name] else samples)
            for name in sorted(self._shapes, key=str)
        ]
        row = torch.cat(rows)
        self._sums = row if self._sums is None else self._sums + row
        self._samples += samples
        self._stateful.update(metrics, samples)

    def reduce(self) -> dict[str, float]:
        """Return the values over all ranks' samples. Collective, also for a rank without samples.

        Raises UserError without samples, if ranks have other metrics, or if an object of
        `metrics()` or `derive` returns no number.
        """
        world = self._world
        mine = torch.tensor([self._samples, metrics_checksum(self._shapes)])
        counts, checksums = world.gather(mine).unbind(1)
        if not int(counts.sum()):
            raise UserError(
                "an evaluation got no samples: let __iter__ of the data set begin again at each "
                "call"
            )
        source = int(counts.argmax())
        # A rank without samples does not know the names.
        for rank in ((checksums != checksums[source]) & (counts > 0)).nonzero().flatten().tolist():
            refuse_differing(world, self._shapes, rank, source)
        shapes: dict[str, list[int]] = world.share(self._shapes, source)
        ordered = sorted(shapes)
        sizes = [torch.Size(shapes[name]).numel() for name in ordered]
        sums = self._sums
        if sums is None:
            sums = torch.zeros(sum(sizes), dtype=torch.float64, device=world.device)
        parts = dict(zip(ordered, world.sum(sums).cpu().split(sizes), strict=True))
        finished = {
            name: quotients((parts[name] if shape else parts[name] / counts.sum()).view(1, *shape))
            for name, shape in shapes.items()
        }
        values = {name: means(value).item() for name, value in finished.items()}
        values |= self._stateful.compute(counts.tolist(), source)
        vectors = {name: value[0] for name, value in finished.items() if value.dim() > 1}
        return values | derived(self._experiment, values, vectors)
