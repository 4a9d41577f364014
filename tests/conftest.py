"""Settings of all tests."""

import gc
import importlib.util
import signal

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
