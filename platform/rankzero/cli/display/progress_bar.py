"""A run's progress as text. Pure, except that it reads the clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rankzero import scalars
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, StepsLogged, SystemSampled
from rankzero.experiment import Goal
from rankzero.metric_names import DATA_WAIT, MFU, SPEED, STEP_SECONDS, TOKENS
from rankzero.reporting.bottleneck import straggler
from rankzero.reporting.run_report import duration

_BAR_WIDTH = 32
_FACTS = (
    ("train/loss", "loss {:.4g}"),
    (SPEED, "{:,.0f} samples/s"),
    (TOKENS, "{:,.0f} tokens/s"),
    (MFU, "MFU {:.0%}"),
    (DATA_WAIT, "data wait {:.0%}"),
)
_RESULTS = (
    ("tokens_per_second", "tokens/s", "{:,.0f}"),
    ("mfu", "MFU", "{:.1%}"),
    ("data_wait_fraction", "waiting for data", "{:.1%}"),
)


class ProgressModel:
    """The newest values of a run. Takes events."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.step = 0
        self.total_steps: int | None = None
        self.started = time.time()
        self.values: dict[str, float] = {}
        self.system: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.step = event.step
                self.total_steps, self.started = event.total_steps, event.time
            case StepsLogged():
                # A journal may hold text where a number belongs.
                steps = [scalars.step(number) or 0 for number in event.steps[-1:]]
                self.step = max([self.step, *steps])
                newest = {name: column[-1] for name, column in event.metrics.items() if column}
                self.values |= scalars.numbers(newest)
            case Evaluated():
                self.values |= scalars.numbers(event.metrics)
            case SystemSampled():
                self.system |= scalars.numbers(event.metrics)
            case _:
                pass

    def facts(self) -> list[str]:
        """Return the progress: step, loss, speed and so on, a few words each."""
        total = f"/{self.total_steps:,}" if self.total_steps else ""
        facts = [f"step {self.step:,}{total}"]
        facts += [text.format(self.values[key]) for key, text in _FACTS if key in self.values]
        # One number for all GPUs of the node: the block has one line.
        suffix = "_utilization_percentage"
        names = [name for name in self.system if "/gpu_" in name and name.endswith(suffix)]
        if names:
            busy = statistics.fmean(self.system[name] for name in names)
            facts.append(f"GPU {busy:.0f}%")
        step_seconds = self.values.get(STEP_SECONDS, math.nan)
        if self.total_steps is not None and math.isfinite(step_seconds):
            facts.append(f"ETA {duration((self.total_steps - self.step) * step_seconds)}")
        return facts

    def evaluation_line(self, event: Evaluated) -> str:
        """Return an evaluation as one line, the goal's metric first."""
        values = scalars.numbers(event.metrics)
        names = sorted(values, key=lambda name: (name != self.goal.metric, name))
        shown = "  ".join(f"{name} {values[name]:.4f}" for name in names)
        return f"step {event.step:>7,}  {shown}{'  best' if event.best else ''}"

    def results(self, ended: RunEnded) -> Iterator[tuple[str, str]]:
        """Yield the rows of the result table."""
        figures = scalars.numbers(ended.metrics)
        yield "result", ended.reason
        if "best" in figures:
            target = "" if self.goal.target is None else f"  (target {self.goal.target:g})"
            yield f"best {self.goal.metric}", f"{figures['best']:.4f}{target}"
        for name, value in figures.items():
            if name.startswith("test/"):
                yield name, f"{value:.4f}"
        if "samples_per_second" in figures:
            half = figures.get("samples_per_second_half_width")
            spread = "" if half is None else f" ± {half:,.0f} (95 %)"
            yield "samples/s", f"{figures['samples_per_second']:,.0f}{spread}"
        for key, label, text in _RESULTS:
            if key in figures:
                yield label, text.format(figures[key])
        if slowest := straggler(figures):
            yield "slowest rank", slowest
        yield "steps", f"{figures.get('steps', 0):,.0f}"
        yield "time", duration(ended.time - self.started)


def progress_panel(progress: ProgressModel) -> Table | Text:
    """Return the live block: a bar and the facts."""
    step = progress.step
    if not step:
        return Text("starting…", style="dim")
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=progress.total_steps or step, completed=step, width=_BAR_WIDTH)
    row.add_row(bar, Text("  ".join(progress.facts())))
    return row
