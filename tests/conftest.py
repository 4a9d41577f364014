"""Settings of all tests."""

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")  # a failed check there shows its values, too
pytest_plugins = [
    "support.commands",
    "support.slurm",
    "support.stores",
    "support.training",
    "support.two_machines",
    "support.webhook",
]
if importlib.util.find_spec("xdist"):  # the environments of the frameworks have none
    pytest_plugins.append("support.scheduling")

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

# Tests write a gigabyte of small files, and sync each. On a disk, three processes wait for each
# other. No test depends on what a sync does: those of power cuts simulate the disk.
MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 4e9
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Three processes run tests on two cores, and PyTorch's threads would wait for each other there.
# With one for each process, the suite takes a seventh less time. PyTorch reads this at its import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script's background jobs start with SIGINT ignored, jobs under nohup with SIGHUP ignored.
# The processes of tests would inherit that. A handler here is not inherited: they start with the
# defaults.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_sessionstart() -> None:
    gc.disable()  # see below


def pytest_collection_finish() -> None:
    """Keep the garbage collector from PyTorch's and MLflow's objects, which stay."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_run_stays_open() -> Iterator[None]:
    """End the runs that a test leaves open: the next one's run would have a note of them."""
    yield
    module = sys.modules.get("rankzero.integrations.own_loop.tracked_run")
    for run in [] if module is None else list(module.OPEN.values()):
        run.finish()
