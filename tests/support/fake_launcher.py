"""A launcher without processes: formulas make the journals of its trials.

The samples to the target grow with the batch size, and with the distance of the learning rate from
the best. Samples/s grow with the batch size until the device is full. `fate` decides which trials
fail, and how.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence

from rankzero.events import (
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)
from rankzero.experiment import Experiment
from rankzero.launch.failures import FailureKind

EPOCHS, SAMPLES = 20, 1000
Fate = Callable[[int, Experiment], str]


def healthy(_number: int, _experiment: Experiment) -> str:
    return ""


class FakeLauncher:
    """Gives every trial the journal that its configuration deserves."""

    def __init__(
        self,
        fate: Fate = healthy,
        best_lr: float = 0.1,
        critical: float = 256.0,
        full: float = 128.0,
        jitter: float = 0.0,
        watts: Callable[[Experiment], float] | None = None,
    ) -> None:
        self.watts = watts
        self.jitter, self.seconds = jitter, 0.0
        self.fate, self.best_lr, self.critical, self.full = fate, best_lr, critical, full
        self._moment, self.device = 0, ""
        self.host: object = None
        self.started: list[Experiment] = []
        self.running: list[FakeRunning] = []

    def start(self, experiment: Experiment, name: str, processes: int | None = None) -> FakeRunning:
        self.started.append(experiment)
        self.running.append(
            FakeRunning(
                self,
                experiment,
                name,
                self.fate(len(self.started) - 1, experiment),
                processes or 1,
            )
        )
        return self.running[-1]

    @property
    def most_at_once(self) -> int:
        """Return how many ran at the same time, at most."""
        moments = sorted(
            moment
            for running in self.running
            for moment in ((running.began, 1), (running.ended, -1))
        )
        return max(itertools.accumulate(change for _, change in moments))

    def tick(self) -> int:
        """Return the next moment of a clock that counts what happens."""
        self._moment += 1
        return self._moment

    def speed(self, experiment: Experiment) -> float:
        batch = experiment.train.batch_size
        luck = self.jitter * math.sin(37.0 * experiment.train.seed + batch)
        loading = 2 if experiment.train.workers else 1
        return 1e4 * loading * math.exp(luck) * batch / (batch + self.full)

    def quality(self, experiment: Experiment, samples: float) -> float:
        batch = experiment.train.batch_size
        best = self.best_lr * math.sqrt(batch / 64)
        ease = 1 / (1 + batch / self.critical) / (1 + math.log(experiment.lr / best) ** 2)
        noise = 0.002 * math.sin(experiment.train.seed + batch)
        return 1 - 0.5 * math.exp(-3 * ease * samples / SAMPLES / 5) + noise


class FakeRunning:
    """One trial: an epoch's events at a time."""

    def __init__(
        self,
        launcher: FakeLauncher,
        experiment: Experiment,
        name: str,
        fate: str,
        devices: int,
    ) -> None:
        self.devices = devices
        self.launcher, self.experiment, self.name, self.fate = launcher, experiment, name, fate
        self.asked: list[str] = []
        # Its journal is written already, so nobody need wait for it.
        self.handles: Sequence[int] = () if fate in ("hang", "queued") else (os.eventfd(1),)
        self.was_lost = fate == "lost"
        # Longer than the silence that tests permit.
        self._starts = time.monotonic() + (0.2 if fate == "queued" else 0.0)
        self.closed = False
        self.began = self.ended = launcher.tick()
        # Looks that find no event, as in a long evaluation.
        self._beats = 20 if fate == "evaluates" else 0
        self._journal = self._tell()
        self._over = False

    def new_events(self) -> list[Event]:
        if self.fate == "ctrl-c":
            raise KeyboardInterrupt
        if self.is_starting or (self.fate == "hang" and not self.asked):
            return []
        if self.fate == "late":
            # The first look finds nothing.
            self.fate = ""
            return []
        if self._beats:
            return []
        found = next(self._journal, None)
        self._over = found is None
        return found or []

    @property
    def has_beat(self) -> bool:
        has_beat, self._beats = self._beats > 0, max(0, self._beats - 1)
        return has_beat

    @property
    def is_starting(self) -> bool:
        return time.monotonic() < self._starts

    @property
    def has_ended(self) -> bool:
        return self._over

    @property
    def failure(self) -> FailureKind | None:
        return KINDS.get(self.fate)

    def prune(self, reason: str) -> None:
        self.asked.append(f"prune: {reason}")

    def stop(self) -> None:
        self.asked.append("stop")

    def kill(self, reason: str) -> None:
        self.asked.append(reason)

    def close(self) -> None:
        self.closed, self.ended = True, self.launcher.tick()
        for handle in self.handles:
            os.close(handle)
        self.handles = ()

    def _tell(self) -> Iterator[list[Event]]:
        batch = self.experiment.train.batch_size
        together = self.devices / (1 + 0.2 * (self.devices - 1))
        speed = together * self.launcher.speed(self.experiment)
        yield [
            RunStarted(
                0.0,
                {},
                {"rankzero.gpu": self.launcher.device},
                1,
                total_steps=EPOCHS * SAMPLES // batch,
            )
        ]
        if self.fate == "hang":
            yield [RunEnded(1.0, "FAILED", self.asked[0], None, {})]
            return
        if self.fate in ENDS:
            yield [RunEnded(1.0, "FAILED", ENDS[self.fate], ENDS[self.fate], {})]
            return
        for epoch in range(1, EPOCHS + 1):
            step = epoch * SAMPLES // batch
            value = self.launcher.quality(self.experiment, epoch * SAMPLES)
            self.launcher.seconds += SAMPLES / speed
            yield [
                StepsLogged([step], [float(epoch)], {"throughput/step_seconds": [batch / speed]}),
                Evaluated(float(epoch), step, {"val/accuracy": value}, best=True),
            ]
            if self.asked:
                yield [RunEnded(9.0, "KILLED", f"pruned at step {step}", None, {})]
                return
            if self.experiment.train.limits.stop_at_target and self.experiment.goal.reached(value):
                break
        if self.launcher.watts is not None:
            joules = self.launcher.watts(self.experiment) * epoch * SAMPLES / speed
            yield [SystemSampled(9.0, 0, {"system/gpu_0_energy_joules": joules})]
        yield [RunEnded(9.0, "FINISHED", "done", None, {"samples_per_second": speed})]


ENDS = {
    "crash": "RuntimeError: broken",
    "oom": "torch.OutOfMemoryError: CUDA out of memory",
    "nan": "NotFinite: train/loss is not finite at step 3",
    "lost": "its processes wrote no end",
}
KINDS = {
    "crash": FailureKind.OTHER,
    "oom": FailureKind.OUT_OF_MEMORY,
    "nan": FailureKind.NOT_FINITE,
}
