"""Lightning's adapter: stops, names and steps that scripts of Lightning's users have."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.examples import SECONDS
from frameworks.lightning_script import fitted, points
from rankzero.events import RunEnded

pytestmark = pytest.mark.timeout(2 * SECONDS)


def test_training_that_sigterm_stopped_is_killed(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "import os, signal",
        "class Stopped(Model):",
        "    def training_step(self, batch, batch_idx):",
        "        if batch_idx == 3:",
        "            os.kill(os.getpid(), signal.SIGTERM)",
        "        return super().training_step(batch, batch_idx)",
        "fit(Stopped)",
    )
    ends = [(one.status, one.reason) for one in events if isinstance(one, RunEnded)]
    assert ends == [("KILLED", "stopped by SIGTERM")]
    assert [*points(events)["train/loss"]] == [1, 2, 3, 4]
