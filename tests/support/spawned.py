"""Functions that a spawned process finds by name, which it cannot in a test's own module."""

from __future__ import annotations

from rankzero.integrations.deferred_run import DeferredRun


def log_second_step(run: DeferredRun) -> None:
    run.log({"loss": 0.5}, 2)


def train(run: DeferredRun, steps: int) -> None:
    run.begin_training()
    run.log({"loss": 0.5}, steps)
    run.end()
