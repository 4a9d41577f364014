"""A trial's journal as the search reads it: quality against time, and how it ended. Pure.

Time is training time: the seconds of the steps and of their waits for data. Evaluations and
checkpoints do not count. How often a user evaluates must not decide which configuration is fastest.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from rankzero.events import Evaluated, Event, RunEnded, RunStarted, StepsLogged, SystemSampled
from rankzero.experiment import Goal
from rankzero.metric_names import SPEED, STEP_SECONDS, TOKENS


class CurvePoint(NamedTuple):
    """The goal's metric after some training."""

    step: int
    seconds: float
    value: float


@dataclasses.dataclass
class LearningCurve:
    """The part of a trial that its journal has so far. Call it with each event."""

    goal: Goal
    points: list[CurvePoint] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    """Training time up to the last report."""
    samples: float = 0.0
    """All samples up to then. Steps of `batches()` have not `train.batch_size` each."""
    tokens: float | None = None
    """All tokens up to then. None: the experiment counts none."""
    step: int = 0
    total_steps: int | None = None
    ended: RunEnded | None = None
    peaks: dict[str, float] = dataclasses.field(default_factory=dict)
    """The highest mean of each system metric."""
    joules_before: float | None = None
    """The energy up to the first report of steps. None: there was no report yet."""
    step_before: int = 0
    """The last step whose energy `joules_before` has."""
    sampled: float | None = None
    sampled_before: float | None = None
    """The times of the last sample, and of the last one before the first report of steps."""
    device: str = ""
    """The kind of device, as the run notes it."""

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted(environment=noted):
                self.device = noted.get("rankzero.gpu") or noted.get("rankzero.device", "")
                # A trial may begin again with a smaller micro-batch.
                self.ended, self.total_steps = None, event.total_steps
            case StepsLogged(steps=steps, metrics=metrics):
                # Also a report without a speed: later seconds count the steps before.
                if self.joules_before is None:
                    self.joules_before, self.sampled_before = self.joules or 0.0, self.sampled
                    # Without a sample before this report, the energy of its steps is counted.
                    self.step_before = steps[-1] if self.joules else 0
                if STEP_SECONDS in metrics:
                    # The reported numbers are means over the steps since the last report.
                    seconds = metrics[STEP_SECONDS][-1] * (steps[-1] - self.step)
                    self.seconds, self.step = self.seconds + seconds, steps[-1]
                    self.samples += metrics.get(SPEED, [0.0])[-1] * seconds
                    if TOKENS in metrics:
                        self.tokens = (self.tokens or 0.0) + metrics[TOKENS][-1] * seconds
            case Evaluated(step=step, metrics=metrics) if self.goal.metric in metrics:
                self.points.append(CurvePoint(step, self.seconds, metrics[self.goal.metric]))
            case SystemSampled(time=time, metrics=metrics):
                self.sampled = time
                for name, value in metrics.items():
                    self.peaks[name] = max(value, self.peaks.get(name, value))
            case RunEnded():
                self.ended = event

    @property
    def best(self) -> float | None:
        """Return the best value of the goal's metric so far, or None before an evaluation."""
        best: float | None = None
        for point in self.points:
            best = point.value if self.goal.better(point.value, best) else best
        return best

    @property
    def samples_per_second(self) -> float | None:
        """Return the speed that the run's summary has, or None before its end."""
        return None if self.ended is None else self.ended.metrics.get("samples_per_second")

    @property
    def mean_speed(self) -> float:
        """Return the samples/s of all steps. The run's summary leaves out the first ones."""
        return self.samples / max(self.seconds, 1e-9)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed that the run's summary has, else the mean of all steps.

        None: the experiment counts no tokens.
        """
        # A short trial ends before its speed is steady, and has none in its summary.
        steady = None if self.ended is None else self.ended.metrics.get("tokens_per_second")
        mean = None if self.tokens is None else self.tokens / max(self.seconds, 1e-9)
        return steady or mean

    @property
    def is_finished(self) -> bool:
        """Return whether the trial was trained to its end."""
        return self.ended is not None and self.ended.status == "FINISHED"

    @property
    def joules(self) -> float | None:
        """Return the energy that the job's GPUs took, or None if it is not measured.

        Without GPUs: what the machine's processors took.
        """
        gpus = {name for name in self.peaks if name.startswith("system/gpu_")}
        if not gpus:
            return self.peaks.get("system/cpu_energy_joules")
        # Several GPUs have a sum, or it is not known. The first one's share would mislead.
        is_one = all(name.startswith("system/gpu_0_") for name in gpus)
        return self.peaks.get(f"system/gpu_{'0_' if is_one else ''}energy_joules")

    @property
    def training_joules(self) -> float | None:
        """Return the energy since the first report of steps, or None if it is not measured."""
        return None if self.joules is None else self.joules - (self.joules_before or 0.0)

    @property
    def sampled_seconds(self) -> float:
        """Return the seconds that have the energy since the first report. 0: not known."""
        return 0.0 if self.sampled_before is None else (self.sampled or 0.0) - self.sampled_before

    @property
    def samples_per_joule(self) -> float | None:
        """Return the samples for each joule after the first report, or of all in a short run."""
        steps, joules = self.step - self.step_before, self.training_joules
        if not steps or not joules:
            steps, joules = self.step, self.joules
        return self.samples * steps / max(1, self.step) / joules if joules else None

    @property
    def memory_megabytes(self) -> float | None:
        """Return the most memory that one of the job's GPUs had in use, or None without a GPU."""
        ending = "memory_usage_megabytes"
        names = (name for name in self.peaks if "/gpu_" in name and name.endswith(ending))
        return max((self.peaks[name] for name in names), default=None)

    @property
    def full_seconds(self) -> float:
        """Return the training time of all steps, also of those after an early end."""
        return self.seconds * max(1.0, (self.total_steps or 0) / max(1, self.step))

    def seconds_to(self, target: float) -> float | None:
        """Return the training time until the metric first reached `target`, or None.

        The metric is interpolated linearly between the evaluation that reached the target and the
        best one before it. A first evaluation that reaches it counts with its full time.
        """
        goal = dataclasses.replace(self.goal, target=target)
        before: CurvePoint | None = None
        for point in self.points:
            if goal.reached(point.value):
                if before is None:
                    return point.seconds
                # A value that reaches it but for rounding must not lie beyond the evaluation.
                share = min(1.0, (target - before.value) / (point.value - before.value))
                return before.seconds + share * (point.seconds - before.seconds)
            best = before.value if before is not None else None
            if math.isfinite(point.value) and goal.better(point.value, best):
                before = point
            elif before is not None:
                # The metric did not improve since, so the line starts at this later time.
                before = before._replace(seconds=point.seconds)
        return None

    def gap(self, target: float) -> float:
        """Return by how much the best value misses `target`, relative to it. 0 or less: reached."""
        if self.best is None:
            return 1.0
        missing = target - self.best if self.goal.mode == "max" else self.best - target
        if dataclasses.replace(self.goal, target=target).reached(self.best):
            missing = min(0.0, missing)
        if missing == math.inf:  # as of a perplexity that overflowed
            return 1.0
        size = max(abs(target), 1e-12)
        # A value may miss by many times its target. No value at all, 1, is further off than any.
        return missing / (size + max(0.0, missing))
