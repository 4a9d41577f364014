"""Strategies through the command: tracked, stopped twice and resumed, with unchanged losses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankzero.mlflow_store.client import MlflowRuns
from support.commands import TINY, Command, command_in, last_end, losses, tracked

LAYERED = TINY.with_name("layered.py")
STEPS = 40
SETTINGS = (
    "dropout=0",
    "slow_rank=0",
    f"train.steps={STEPS}",
    "train.eval_every=10",
    "train.log_every=2",
)
STRATEGIES = (
    "zero1",
    "fsdp",
    "tp",
    "pp",
)  # single and ddp are what all other tests run; dp needs GPUs


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, new_store: Path
) -> Iterator[dict[int, float]]:
    """The losses by step of one process that is not stopped."""
    with command_in(tmp_path_factory.mktemp("undisturbed"), new_store) as rankzero:
        words = ("--nproc", 1, "train.strategy=single", "--offline", *SETTINGS)
        rankzero.succeed("train", LAYERED, *words)
        yield losses(rankzero.runs[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_strategy_stopped_twice_and_resumed_has_the_losses_of_one_process(
    rankzero: Command, undisturbed: dict[int, float], strategy: str
) -> None:
    how = ("--nproc", 2, "--run-name", "run", f"train.strategy={strategy}")
    process = rankzero.start("train", LAYERED, "--offline", *how, *SETTINGS)
    run = rankzero.wait_for_step(6)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert last_end(run).status == "KILLED"
    assert last_end(run).reason.startswith("stopped by SIGTERM")

    reached = max(losses(run))
    assert reached < STEPS
    process = rankzero.start("resume", "run", "--offline")
    rankzero.wait_for_step(reached + 4)
    process.send_signal(signal.SIGUSR2)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert last_end(run).status == "KILLED" and last_end(run).reason.startswith(
        "stopped by SIGUSR2"
    )

    rankzero.succeed("resume", "run")  # delivers all three attempts
    assert tracked(run).status == "FINISHED"
    assert losses(run) == pytest.approx(undisturbed, rel=1e-4, abs=1e-5)
    points = MlflowRuns(run.identity.tracking_uri).history(tracked(run).run_id, "train/loss")
    assert {point.step: point.value for point in points} == losses(run) and len(points) == STEPS
