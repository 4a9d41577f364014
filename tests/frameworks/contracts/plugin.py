"""A plugin of pytest that runs a framework's own tests with RankZero's adapter in them.

`RANKZERO_CONTRACT` names the framework, and thereby a module of `stand_ins`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rankzero.integrations.own_loop.tracked_run import OPEN

STAND_IN = importlib.import_module(
    f"frameworks.contracts.stand_ins.{os.environ['RANKZERO_CONTRACT']}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace what the suite's modules define, and skip by name what does not apply."""
    for module in {item.getparent(pytest.Module).obj for item in items}:
        STAND_IN.adapt(module)
    for item in items:
        for pattern, reason in STAND_IN.NOT_APPLICABLE.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Check the runs of a test that passes."""
    before = _runs()
    result = yield
    for run in list(OPEN.values()):
        _ = run.step  # flushes
    for folder in _runs() - before:
        STAND_IN.check(folder)
    return result


def pytest_runtest_teardown() -> None:
    """End the runs that a test leaves open: each has a process. Forget the test's store."""
    for run in list(OPEN.values()):
        run.finish()
    os.environ.pop("MLFLOW_TRACKING_URI", None)


def _runs() -> set[Path]:
    return set(Path(os.environ["RANKZERO_DIR"], "runs").glob("*"))
