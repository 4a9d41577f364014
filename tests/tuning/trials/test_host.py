"""Several hosts."""

from __future__ import annotations

import threading

import pytest

from rankzero.tuning.trials.host import closed_together


class Slow:
    """A host whose end waits for the others' ends."""

    def __init__(self, others: threading.Barrier) -> None:
        self._others, self.is_closed = others, False

    def close(self) -> None:
        self._others.wait(10)
        self.is_closed = True


def test_hosts_are_closed_at_the_same_time_also_after_an_error() -> None:
    barrier = threading.Barrier(5)
    slow = [Slow(barrier) for _ in range(5)]
    with pytest.raises(KeyError), closed_together() as hosts:
        hosts += slow  # type: ignore[arg-type]
        raise KeyError
    assert all(one.is_closed for one in slow)


def test_an_error_of_one_end_is_raised_after_all_others() -> None:
    broken, whole = Slow(threading.Barrier(2)), Slow(threading.Barrier(1))
    broken._others.abort()
    with pytest.raises(threading.BrokenBarrierError), closed_together() as hosts:
        hosts += [broken, whole]  # type: ignore[list-item]
    assert whole.is_closed


def test_no_hosts_are_no_error() -> None:
    with closed_together() as hosts:
        assert hosts == []
