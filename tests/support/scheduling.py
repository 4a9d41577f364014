"""Divides the tests among processes: modules whose tests share an expensive fixture stay whole.

xdist's marker ``xdist_group`` does nothing with pytest 9.2 (xdist 3.8).
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

SHARED = {
    "tests/cli/commands/test_ui.py",
    "tests/cli/commands/test_ui_access.py",
    "tests/cli/test_browse.py",
    "tests/cli/test_strategies.py",
    "tests/crash_points/test_crash_points.py",
    "tests/experiments/test_examples.py",
    "tests/old_stores/test_old_stores.py",
    "tests/torture/test_campaign.py",
    "tests/training/data/test_two_ranks.py",
    "tests/training/metrics/test_sums.py",
    "tests/training/strategies/test_staged.py",
    "tests/training/strategies/test_strategies.py",
    "tests/training/strategies/test_turns.py",
}


class SharedFixtureScheduling(LoadScopeScheduling):
    """Gives each process the next test, or the next whole module of `SHARED`."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        return module if module in SHARED else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharedFixtureScheduling:
    """Return the scheduler that xdist uses."""
    return SharedFixtureScheduling(config, log)
