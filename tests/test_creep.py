"""Costs that may not creep up, as counts that do not depend on the machine's speed.

Each limit is what was counted when it was set, and 5 % more. Whoever makes something cheaper lowers
its limit.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rankzero
from rankzero import config, experiment_file
from rankzero.events import StepsLogged, encode_line
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.metrics.reporter import Reporter
from rankzero.training.metrics.straggler import TimedBatches
from rankzero.training.metrics.throughput import RunTotals
from rankzero.training.step import train_step
from rankzero.training.stop import StopCode

DIGITS = Path(__file__).parents[1] / "experiments" / "digits.py"
PACKAGE = str(Path(rankzero.__file__).parent)
STEPS = 100
IO = Path("/proc/self/io")
CREEP = 1.05


@pytest.fixture
def training() -> tuple[Reporter, Callable[[], None]]:
    """A training that has begun, and a function that trains and adds 100 steps."""
    # The calls do not depend on the size of the model and of the batch.
    small = {"train.steps": 10 * STEPS, "train.batch_size": 8, "width": 4}
    given = config.override(experiment_file.load(str(DIGITS))(), small)
    job, state = build(given, World(Ranks(), torch.device("cpu")))
    loaded = job.train_loader.train_batches(job.batch_order, 0, 0, job.total_steps)
    batches = TimedBatches(loaded, job.world.device)
    reporter = Reporter(job, state, RunTotals(), batches.read)
    reporter.start_window()

    def steps() -> None:
        for _ in range(STEPS):
            metrics = train_step(job, state, batches)
            state.step += 1
            reporter.add(metrics)

    steps()
    return reporter, steps


def test_a_step_makes_no_more_calls_in_rankzero(
    training: tuple[Reporter, Callable[[], None]],
) -> None:
    reporter, steps = training
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: types.FrameType, event: str, _: object) -> None:
        if event in {"call", "c_call"} and frame.f_code.co_filename.startswith(PACKAGE):
            calls[event] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        steps()
    finally:
        sys.setprofile(before)
    assert calls["call"] / STEPS <= 20.2 * CREEP
    assert calls["c_call"] / STEPS <= 20.5 * CREEP
    window, _ = reporter.report(StopCode.NONE, actions_due=False)
    assert window.steps == 2 * STEPS


def test_a_step_reads_and_writes_nothing(training: tuple[Reporter, Callable[[], None]]) -> None:
    def system_calls() -> int:
        counts = dict(line.split(": ") for line in IO.read_text().splitlines())
        return int(counts["syscr"]) + int(counts["syscw"])

    _, steps = training
    first = system_calls()
    own = system_calls() - first
    before = system_calls()
    steps()
    assert system_calls() - before <= own


def test_a_step_takes_no_more_bytes_of_the_journal() -> None:
    steps = list(range(1, 501))
    event = StepsLogged(
        steps,
        [1.75e9 + step / 500 for step in steps],
        {"train/loss": [float(torch.tensor(1 / step)) for step in steps]},
    )
    assert len(encode_line(event)) / len(steps) <= 39.7 * CREEP


@pytest.mark.parametrize(("words", "limit"), [(["--help"], 13), (["runs"], 124)])
def test_a_command_imports_no_more_modules(words: list[str], limit: int, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rankzero.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(sum(name.partition('.')[0] not in sys.stdlib_module_names for name in sys.modules),"
        " file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) <= limit * CREEP
