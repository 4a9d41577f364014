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


@pytest.mark.parametrize(("way", "steps"), [("on_step", 12), ("on_epoch", 2)])
def test_loss_that_the_module_logs_itself_counts(way: str, steps: int, tmp_path: Path) -> None:
    ways = {"on_step": way == "on_step", "on_epoch": way == "on_epoch"}
    events = fitted(
        tmp_path,
        "class Own(Model):",
        "    def by_hand(self, loss):",
        # As a mean over two ranks would be.
        f"        self.log('train/loss', 100 + loss.detach(), sync_dist=True, **{ways})",
        "        return loss",
        "fit(Own)",
    )
    losses = points(events)["train/loss"]
    assert len(losses) == steps and min(losses.values()) > 100
