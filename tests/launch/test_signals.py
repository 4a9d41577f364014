"""What signals ask of workers, between the agent's turns. With the agent itself: cli/test_signals.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rankzero.launch.signals import LaunchStopped, SignalForwarder

WORKER = """
import signal
for number in (signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, lambda received, frame: print(signal.Signals(received).name, flush=True))
print("listens", flush=True)
while True:
    signal.pause()
"""


class Agent:
    """Starts and stops a worker as torchrun's agent does."""

    def __init__(self) -> None:
        self._remaining_restarts = 3
        self.workers: list[subprocess.Popen[str]] = []

    def _start_workers(self) -> dict[int, int]:
        self.workers.append(
            subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
        )
        assert self.says() == "listens"
        return {0: self.workers[-1].pid}

    def _stop_workers(self) -> None:
        with self.workers[-1] as worker:
            worker.kill()

    def says(self) -> str:
        output = self.workers[-1].stdout
        assert output is not None
        return output.readline().strip()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    for worker in made.workers:
        with worker:
            worker.kill()


def test_who_was_told_to_stop_is_not_started_again_for_another_machines_sake(agent: Agent) -> None:
    with (
        SignalForwarder() as signals,
        signals.to(agent),
        pytest.raises(LaunchStopped, match="SIGTERM, and not begun again"),
    ):
        agent._start_workers()
        os.kill(os.getpid(), signal.SIGTERM)
        agent._stop_workers()
        agent._remaining_restarts = 1  # torchrun's agent counts no restart because of new members
        agent._start_workers()
    assert len(agent.workers) == 1


@pytest.mark.parametrize(("second_ends", "told"), [(True, "SIGQUIT"), (False, "SIGTERM")])
def test_a_second_signal_ends_workers_unless_who_steers_says_that_otherwise(
    agent: Agent, second_ends: bool, told: str
) -> None:
    with SignalForwarder(second_ends=second_ends) as signals, signals.to(agent):
        agent._start_workers()
        os.kill(os.getpid(), signal.SIGINT)
        assert agent.says() == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)
        assert agent.says() == told
