"""The courier leaves processor time to others, unless it falls behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from rankzero.tracking.throttle import Throttle, is_crowded


class Process:
    """A process that runs and waits for a processor, by a clock of its own."""

    def __init__(self, counts_waiting: bool = True, behind: float = 0.0) -> None:
        self.crowded = False
        self.now = self.used = self.waited = 0.0
        self.pauses: list[float] = []
        self.throttle = Throttle(
            self._wait,
            behind=behind,
            clock=lambda: self.now,
            used=lambda: self.used,
            waited=lambda: self.waited if counts_waiting else None,
            crowded=lambda: self.crowded,
        )

    def _wait(self, seconds: float) -> bool:
        self.now += seconds
        self.pauses.append(round(seconds, 3))
        return False

    def run(self, used: float, waited: float) -> list[float]:
        """Use a processor and wait for one; return the pauses after that."""
        self.pauses = []
        self.used, self.waited, self.now = (
            self.used + used,
            self.waited + waited,
            self.now + used + waited,
        )
        self.throttle.pause()
        return self.pauses


def test_courier_takes_a_tenth_of_a_processor_that_others_want() -> None:
    process = Process()
    for _ in range(20):
        assert process.run(0.02, 0.02) == [0.16]
    assert process.used / process.now == pytest.approx(0.1)
    assert process.run(0.02, 0.5) == [], "it got less than its share"
    assert process.run(5.0, 5.0) == [1.0], "it sees the end of the training in time"


def test_courier_does_not_pause_on_a_machine_with_free_processors() -> None:
    process = Process()
    assert not any(process.run(0.02, 0.001) for _ in range(100))


def test_courier_in_the_place_of_another_one_is_as_far_behind() -> None:
    process = Process(behind=20.0)
    assert process.run(0.02, 0.02) == [], "its full share"


def test_courier_does_not_pause_among_many_processes() -> None:
    process = Process()
    process.crowded = True
    assert process.run(0.02, 0.2) == []
    process.crowded = False
    assert process.run(0.02, 0.02) == [0.16]


def test_many_busy_processes_make_a_crowd() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        deadline = time.monotonic() + 10.0
        while not is_crowded():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_courier_takes_more_the_longer_it_is_behind() -> None:
    process = Process()
    process.now = 10.0
    process.throttle.pause()
    assert process.run(0.02, 0.02) == [0.027]
    process.now = 20.0
    process.throttle.pause()
    assert not any(process.run(0.02, 0.02) for _ in range(100))
    process.throttle.caught_up()
    assert process.run(0.02, 0.02) == [0.16]


def test_waiting_that_is_not_counted_is_expected() -> None:
    assert Process(counts_waiting=False).run(0.02, 0.0) == [0.18]


PROGRAM = """
import signal, time
from rankzero.tracking.throttle import Throttle
def burn(seconds):
    began, until = time.monotonic(), time.process_time() + seconds
    while time.process_time() < until:
        pass
    return time.monotonic() - began
def wait(seconds):
    time.sleep(seconds)
    return over
over = False
with Throttle(wait, waited=lambda: None, crowded=lambda: False):
    throttled = burn(0.12)
    over = True
    # On a crowded machine it has less than its share, and so it does not pause each time.
    while signal.getitimer(signal.ITIMER_PROF) != (0.0, 0.0):
        burn(0.05)
assert throttled > 0.6, throttled
burn(0.1)
"""


def test_program_is_paused_at_any_moment_and_ends_normally() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 0
