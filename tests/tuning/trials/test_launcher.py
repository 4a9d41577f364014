"""The search's process has no PyTorch, and sends its entry points by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rankzero.catalog.lookup import last_end
from rankzero.tuning.trials.launcher import LaunchedTrial
from support.runs import make_folder

CODE = """
import pickle, sys
from rankzero.cli.commands import compare, probe, search
from rankzero.compare import runner
from rankzero.training.profiling import profiler
from rankzero.tuning import search
from rankzero.tuning.probe import worker
from rankzero.tuning.trials import launcher
for entry in (launcher.train, worker.main, profiler.main):
    assert pickle.loads(pickle.dumps(entry)) is entry
assert "torch" not in sys.modules, "the search imports PyTorch"
"""


def test_the_search_and_its_entry_points_import_no_torch() -> None:
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_a_beat_is_a_sign_of_life_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    trial = LaunchedTrial(folder, cast("Any", None))
    assert not trial.has_beat
    folder.beat.write_text("1.0")
    assert trial.has_beat and not trial.has_beat


def test_a_trial_that_is_stopped_before_it_began_is_killed(tmp_path: Path) -> None:
    class Host(SimpleNamespace):
        is_starting = was_lost = False

        def has_ended(self, seconds: float = 0.0) -> bool:
            return True

        def signal(self, *_: object) -> None:
            pass

    for asked, status in ((True, "KILLED"), (False, "FAILED")):
        folder = make_folder(tmp_path)
        trial = LaunchedTrial(folder, cast("Any", Host()))
        if asked:
            trial.stop()
        trial.close()
        end = last_end(folder)
        assert end is not None and end.status == status
        assert ("before it began" in end.reason) == asked
