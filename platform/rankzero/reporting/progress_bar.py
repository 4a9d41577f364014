"""A run's progress as text. Pure."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rankzero import scalars
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, SystemSampled
from rankzero.experiment import Goal
from rankzero.metric_names import DATA_WAIT, MFU, SPEED, STEP_SECONDS, TOKENS
from rankzero.reporting.run_facts import Facts, straggler, take
from rankzero.reporting.run_report import duration
from rankzero.scalars import shown

_BAR_WIDTH = 32
_GPU = re.compile("/gpu_.*_utilization_percentage$")
# The value as people read it, and the value itself.
_FACTS = (
    ("train/loss", "loss {0}"),
    (SPEED, "{0} samples/s"),
    (TOKENS, "{0} tokens/s"),
    (MFU, "MFU {1:.0%}"),
    (DATA_WAIT, "data wait {1:.0%}"),
)
_RESULTS = (
    ("tokens_per_second", "tokens/s", "{0}"),
    ("mfu", "MFU", "{1:.1%}"),
    ("data_wait_fraction", "waiting for data", "{1:.1%}"),
)


class ProgressModel:
    """The newest values of a run. Takes events."""

    def __init__(self, goal: Goal) -> None:
        self.goal, self.run, self._began = goal, Facts(), time.time()
        self.gpus: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        take(self.run, event)
        if isinstance(event, RunStarted):
            self.run.steps = event.step
        elif isinstance(event, SystemSampled):
            known = scalars.numbers(event.metrics)
            self.gpus |= {name: known[name] for name in known if _GPU.search(name)}

    def facts(self) -> list[str]:
        """Return the progress: step, loss, speed and so on, a few words each."""
        step, total, values = self.run.steps, self.run.total_steps, self.run.metrics
        facts = [f"step {step:,}/{total:,}" if total else f"step {step:,}"]
        facts += [
            text.format(shown(values[key]), values[key]) for key, text in _FACTS if key in values
        ]
        # One number for all GPUs of the node: the block has one line.
        if self.gpus:
            facts.append(f"GPU {statistics.fmean(self.gpus.values()):.0f}%")
        step_seconds = values.get(STEP_SECONDS, math.nan)
        if total is not None and math.isfinite(step_seconds):
            facts.append(f"ETA {duration((total - step) * step_seconds)}")
        return facts

    def evaluation_line(self, event: Evaluated) -> str:
        """Return an evaluation as one line, the goal's metric first."""
        values = scalars.numbers(event.metrics)
        names = sorted(values, key=lambda name: (name != self.goal.metric, name))
        text = "  ".join(f"{name} {shown(values[name])}" for name in names)
        return f"step {event.step:>7,}  {text}{'  best' if event.best else ''}"

    def results(self, ended: RunEnded) -> Iterator[tuple[str, str]]:
        """Yield the rows of the result table."""
        figures = scalars.numbers(ended.metrics)
        yield "result", ended.reason
        if "best" in figures:
            target = "" if self.goal.target is None else f"  (target {self.goal.target:g})"
            yield f"best {self.goal.metric}", f"{shown(figures['best'])}{target}"
        for name, value in figures.items():
            if name.startswith("test/"):
                yield name, shown(value)
        if "samples_per_second" in figures:
            half = figures.get("samples_per_second_half_width")
            spread = "" if half is None else f" ± {shown(half)} (95 %)"
            yield "samples/s", f"{shown(figures['samples_per_second'])}{spread}"
        for key, label, text in _RESULTS:
            if key in figures:
                yield label, text.format(shown(figures[key]), figures[key])
        if slowest := straggler(figures):
            yield "slowest rank", slowest
        # Those of the end are the attempt's.
        yield "steps", self.run.steps_text
        yield "time", duration(ended.time - (self.run.started or self._began))


def progress_panel(progress: ProgressModel) -> Table | Text:
    """Return the live block: a bar and the facts."""
    step = progress.run.steps
    if not step:
        return Text("starting…", style="dim")
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=progress.run.total_steps or step, completed=step, width=_BAR_WIDTH)
    row.add_row(bar, Text("  ".join(progress.facts())))
    return row
