"""The end of a rank's process."""

from __future__ import annotations

import multiprocessing
import threading
import time

from rankzero.training import worker


def rank_with_an_endless_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    worker._exit_in_time(7, seconds=0.1)


def test_a_thread_that_never_ends_does_not_keep_a_rank_alive() -> None:
    rank = multiprocessing.get_context("fork").Process(target=rank_with_an_endless_thread)
    rank.start()
    rank.join(60)
    assert rank.exitcode == 7
