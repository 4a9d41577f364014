"""Signals to workers that start and stop. With the real agent: cli/test_signals.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rankzero.launch.signals import LaunchStopped, SignalForwarder, Workers

WORKER = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, lambda received, frame: print(signal.Signals(received).name, flush=True))
print("listens", flush=True)
while True:
    signal.pause()
"""


class Agent:
    """Starts and stops a worker as torchrun's agent does, and reports it to an observer."""

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, observer: Workers) -> None:
        observer.starting()
        self.workers.append(
            subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
        )
        assert self.printed() == "listens"
        observer.started([self.workers[-1].pid])

    def stop(self, observer: Workers) -> None:
        observer.stopping()
        with self.workers[-1] as worker:
            worker.kill()

    def printed(self) -> str:
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


def test_stopped_workers_are_not_started_again_for_another_machine(agent: Agent) -> None:
    with (
        SignalForwarder() as signals,
        signals.to_workers() as workers,
        pytest.raises(LaunchStopped, match="SIGTERM, and not started again"),
    ):
        agent.start(workers)
        os.kill(os.getpid(), signal.SIGTERM)
        assert workers.is_stopped
        agent.stop(workers)
        agent.start(workers)  # torchrun's agent does not count a restart for new members
    assert len(agent.workers) == 1


def test_a_kill_ends_a_launch_that_waits_for_other_machines() -> None:
    with (
        SignalForwarder(of_trial=True) as signals,
        signals.to_workers(),
        pytest.raises(LaunchStopped, match="SIGQUIT before it began"),
    ):
        os.kill(os.getpid(), signal.SIGQUIT)
        signal.pause()


@pytest.mark.parametrize(("of_trial", "gets"), [(False, "SIGQUIT"), (True, "SIGTERM")])
def test_second_signal_ends_workers_unless_only_sigquit_does(
    agent: Agent, of_trial: bool, gets: str
) -> None:
    with (
        SignalForwarder(of_trial=of_trial) as signals,
        signals.to_workers() as workers,
    ):
        agent.start(workers)
        os.kill(os.getpid(), signal.SIGINT)
        assert agent.printed() == "SIGINT"
        os.kill(os.getpid(), signal.SIGTERM)
        assert agent.printed() == gets


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_manager_and_the_program_that_forwards_ask_once(
    agent: Agent, second: signal.Signals
) -> None:
    now = 100.0
    with SignalForwarder(clock=lambda: now) as signals, signals.to_workers() as workers:
        agent.start(workers)
        os.kill(os.getpid(), signal.SIGTERM)
        assert agent.printed() == "SIGTERM"
        now += 1.0
        os.kill(os.getpid(), second)
        now += 2.0
        os.kill(os.getpid(), second)
        assert agent.printed() == "SIGQUIT" and signals.received == [signal.SIGTERM, second]


def test_workers_that_hang_after_a_second_signal_are_killed(agent: Agent) -> None:
    now = 100.0
    with SignalForwarder(clock=lambda: now) as signals, signals.to_workers() as workers:
        agent.start(workers)
        for gets in ("SIGINT", "SIGQUIT"):
            os.kill(os.getpid(), signal.SIGINT)
            assert agent.printed() == gets
        now += 9.0
        workers.kill_late()
        os.kill(os.getpid(), signal.SIGINT)
        assert agent.printed() == "SIGQUIT"
        now += 1.0
        workers.kill_late()
        assert agent.workers[-1].wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("of_trial", "stops"), [(False, True), (True, False)])
def test_sigusr2_asks_to_stop_unless_a_search_prunes_by_it(of_trial: bool, stops: bool) -> None:
    with SignalForwarder(of_trial=of_trial) as signals, signals.to_workers() as workers:
        workers.starting()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert workers.is_stopped == stops and (signal.SIGUSR2 in signals.received) == stops


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_that_was_ignored_at_start_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with SignalForwarder() as signals:
            os.kill(os.getpid(), number)
            assert not signals.received and signal.getsignal(number) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == [signal.SIGTERM]
    finally:
        signal.signal(number, before)
