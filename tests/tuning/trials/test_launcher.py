"""The search's process has no PyTorch, and sends its entry points by name."""

from __future__ import annotations

import subprocess
import sys

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
