"""The live display of a notebook, in IPython's own shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rankzero.api import notebook
from support.paths import ROOT
from support.runs import make_folder

PROGRAM = """
import json, sys, time
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from rankzero.api import notebook
from rankzero.experiment import Goal
from rankzero.run_store.folder import RunFolder
from support.runs import append, evaluated, started, steps

shell, folder = InteractiveShell.instance(), RunFolder(Path(sys.argv[1]))
with capture_output() as captured, notebook.progress(folder, Goal("val/<accuracy>", "max")):
    append(folder, started(), steps(1, 4))
    time.sleep(0.8)
    append(folder, steps(5, 50), evaluated(50, 0.5))
print(json.dumps([output.data for output in captured.outputs]))
"""


def test_progress_is_one_output_that_follows_the_journal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder.path)],
        cwd=ROOT / "tests",
        text=True,
        check=True,
        capture_output=True,
    ).stdout
    texts = [shown["text/plain"] for shown in json.loads(said)]
    assert texts[0] == "starting…" and texts[1].startswith("step 4/100  loss 0.25"), texts
    last = json.loads(said)[-1]["text/html"]
    assert last.startswith('<progress value="50" max="100"></progress> step 50/100  loss 0.02')


def test_a_program_without_ipython_is_no_notebook() -> None:
    assert not notebook.is_running()
