"""`rankzero.train`, `repeat` and `search`: the example notebook, an interrupt, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

import rankzero
from rankzero.api import commands
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from support.commands import TINY, Command, wait_until
from support.paths import EXPERIMENTS

Start = Callable[..., subprocess.Popen[str]]


LONG = """
import rankzero
from tiny import Tiny
quiet = rankzero.Train.MLflow(log_model=False)
long = rankzero.Train(epochs=400, batch_size=32, log_every=5, mlflow=quiet)
slow = Tiny(train=long, step_seconds=0.03)
"""


@pytest.fixture
def start(rankzero: Command) -> Start:
    """Start scripts in a folder with an empty store; they end with the test."""
    folder = rankzero.folder
    (folder / "tiny.py").write_text(TINY.read_text())

    def started(text: str = "", words: Sequence[str] = ("script.py",)) -> subprocess.Popen[str]:
        (folder / "script.py").write_text(text)
        return rankzero.start_program(sys.executable, *words)

    return started


def texts(notebook: Path) -> str:
    """Return all that a notebook's cells printed and returned."""
    outputs = [
        output
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", ())
    ]
    found = (
        "".join(output.get("text") or output["data"].get("text/plain", "")) for output in outputs
    )
    return "\n".join(found)


def is_clean(notebook: Path) -> bool:
    cells = [
        cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    return not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_example_notebook_runs_from_top_to_bottom(start: Start, tmp_path: Path) -> None:
    assert is_clean(EXPERIMENTS / "notebook.ipynb"), "strip the outputs"
    for name in ("digits.py", "notebook.ipynb"):
        shutil.copy(EXPERIMENTS / name, tmp_path)
    process = start(
        words=("-m", "jupyter", "execute", "--inplace", "notebook.ipynb")
    )  # with a real kernel
    said, _ = process.communicate(timeout=220)
    assert process.returncode == 0, said
    output = texts(tmp_path / "notebook.ipynb")
    assert (
        "\x1b[2K" not in output and "\x1b[1A" not in output
    )  # nothing drawn over, though kernels set FORCE_COLOR
    assert (
        "<run from-a-notebook: FINISHED, val/accuracy 0." in output
        and "('FINISHED',\n 0." in output
    )
    assert "Digits(train=Train(epochs=4" in output and "COMPLETE" in output
    assert output.count("step 88/88  loss") == 1, "one output that is drawn again, and no lines"
    assert "<comparison of from-a-notebook, digits-search-" in output
    run = rankzero.run("from-a-notebook", dir=tmp_path / "mlruns")
    assert (
        run.params["lr"] == 0.01 and run.params["world_size"] == 2 and run.metrics["val/loss"] > 0
    )
    assert list(run.history("val/loss")["step"]) == [22, 44, 66, 88]
    started = next(read_all(RunFolder(run.folder).events))
    assert (
        "digits.py:Digits train.epochs=4 lr=0.01 --run-name"
        in vars(started)["environment"]["rankzero.command"]
    )
    study = next(path for path in (tmp_path / "mlruns/runs").glob("digits-search-??????"))
    assert len(rankzero.runs("parent=digits-search*", all=True, dir=tmp_path / "mlruns")) >= 2
    assert rankzero.run(study.name, dir=tmp_path / "mlruns").status == "FINISHED"


def test_interrupt_stops_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    process = start(
        LONG + "try:\n    rankzero.train(slow, run_name='stopped', nproc=1, offline=True)\n"
        "except KeyboardInterrupt:\n    print(rankzero.run('stopped').status)\n"
    )
    assert process.stdout is not None
    assert any(line.startswith("step") for line in process.stdout)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and output.endswith("KILLED\n"), output
    run = rankzero.run("stopped", dir=tmp_path / "mlruns")
    assert run.reason.startswith("stopped by") and run.checkpoints[-1].path.exists()


def test_what_ends_the_program_stops_the_training_first(start: Start, tmp_path: Path) -> None:
    process = start(
        LONG + "rankzero.train(slow, run_name='ended', nproc=1, offline=True)\nprint('continued')\n"
    )
    assert process.stdout is not None
    assert any(line.startswith("step") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == -signal.SIGTERM and "continued" not in output
    run = rankzero.run("ended", dir=tmp_path / "mlruns")
    assert run.status == "KILLED" and run.checkpoints[-1].path.exists()


def test_an_exception_stops_the_training_first(start: Start, tmp_path: Path) -> None:
    gone = (
        "import io, sys\nclass Gone(io.StringIO):\n    def write(self, text):\n"
        "        if text.startswith('step'):\n            raise BrokenPipeError\n"
        "sys.stdout = Gone()\n"
    )
    process = start(f"{LONG}{gone}rankzero.train(slow, run_name='ended', nproc=1, offline=True)\n")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1 and "BrokenPipeError" in output
    run = rankzero.run("ended", dir=tmp_path / "mlruns")
    assert run.status == "KILLED" and run.checkpoints[-1].path.exists()


@pytest.mark.slow
def test_repeat_returns_the_means_and_sync_logs_its_models(start: Start, tmp_path: Path) -> None:
    process = start(
        "import rankzero\nfrom tiny import Tiny\n"
        "quiet = rankzero.Train.MLflow(log_pictures=False)\n"
        "short = Tiny(train=rankzero.Train(epochs=1, batch_size=32, mlflow=quiet))\n"
        "over = {'width': [8, 16]}\n"
        "run = rankzero.repeat(short, over=over, seeds=[3], run_name='r', offline=True)\n"
        "print(run.name, run.status, run.metrics['val/accuracy/mean'])\n"
    )
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and "r FINISHED 0." in output, output
    output, _ = start(words=("-m", "rankzero", "sync", "r")).communicate(timeout=150)
    parts = [tmp_path / "mlruns/runs" / f"r-width{width}-seed3" for width in (8, 16)]
    assert all((part / "best_model.json").exists() for part in parts), output


def test_file_that_trains_when_imported_is_an_error(start: Start, tmp_path: Path) -> None:
    process = start(f"{TINY.read_text()}\nimport rankzero\nrankzero.train(Tiny(), nproc=1)\n")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and output.count('if __name__ == "__main__"') == 1, output
    assert not list((tmp_path / "mlruns").glob("runs/*"))


def test_an_error_has_the_text_of_the_command_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from tiny import Tiny\nclass Broken(Tiny):\n"
        "    def measure(self, model, batch):\n        raise RuntimeError('CUDA error: odd')\n"
    )
    by_hand = start(words=("-m", "rankzero", "train", "broken.py:Broken", "--offline"))
    process = start(
        "import rankzero\nfrom broken import Broken\n"
        "try:\n    rankzero.train(Broken(), nproc=1, offline=True)\n"
        "except rankzero.RunFailed as error:\n    print('caught', error)\n"
    )
    outputs = [one.communicate(timeout=150)[0] for one in (process, by_hand)]
    caught = outputs[0].partition("caught ")[2]
    assert caught.startswith("RuntimeError: CUDA error: odd ("), outputs
    assert outputs[1].partition("\nerror: ")[2] == caught


@pytest.mark.slow
def test_ui_is_served_until_the_program_exits(start: Start, tmp_path: Path) -> None:
    process = start(
        "import psutil, rankzero, signal, urllib.request\n"
        # A cell is interrupted while the server starts.
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\nsignal.alarm(1)\n"
        "try:\n    rankzero.open_ui()\nexcept KeyboardInterrupt:\n    pass\n"
        "assert not psutil.Process().children()\naddress = rankzero.open_ui()\n"
        "assert rankzero.open_ui() == address\n"
        "print(address, urllib.request.urlopen(address + '/health').status)\n"
        "try:\n    rankzero.open_ui(dir='nowhere')\n"
        "except rankzero.UserError as error:\n    print(error, flush=True)\n"
        # As a notebook's kernel ends.
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    output, _ = process.communicate(timeout=90)
    found = re.match(r"(http://127\.0\.0\.1:\d+) 200\nthere is no store in /.*/nowhere;", output)
    assert process.returncode == -signal.SIGKILL and found, output
    wait_until(lambda: not answers(found[1]))


def answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
        return True
    return False


def test_experiment_must_be_in_a_file() -> None:
    class Local(rankzero.Experiment):
        pass

    with pytest.raises(rankzero.UserError, match=r"%%writefile local\.py"):
        rankzero.train(Local())


@pytest.mark.parametrize(
    ("nproc", "words"),
    [
        (2, ["--nproc=2"]),
        (numpy.int64(2), ["--nproc=2"]),
        ([1, 2, 4], ["--nproc=1,2,4"]),
        ("1,2", ["--nproc=1,2"]),
        (None, []),
    ],
)
def test_settings_and_options_become_arguments(
    nproc: int | str | list[int] | None,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    called: list[list[str]] = []

    def call(words: list[str], **_: bool) -> None:
        called.append(words[:-1])
        assert words[-1].startswith("--result-file=")
        raise rankzero.UserError("not now")

    monkeypatch.setattr(commands, "_call", call)
    monkeypatch.syspath_prepend(TINY.parent)
    from tiny import Tiny

    experiment = rankzero.override(Tiny(), {"lr": 0.1, "train.epochs": 7})
    with pytest.raises(rankzero.UserError, match="not now"):
        rankzero.search(
            experiment,
            minutes=2.5,
            nproc=nproc,
            probe=False,
            new=False,
            tag=("a=1", "b=2"),
            dir=tmp_path,
            offline=False,
        )
    assert called == [
        [
            *("search", f"{TINY}:Tiny", "train.epochs=7", "lr=0.1", "--minutes=2.5"),
            *(*words, f"--dir={tmp_path}", "--no-probe", "--tag=a=1", "--tag=b=2", "--no-offline"),
        ]
    ]


def test_a_stopped_search_has_no_result_for_the_caller() -> None:
    commands._check(75, "")
    with pytest.raises(rankzero.RunFailed, match="continues the study"):
        commands._check(
            75, "interrupted: `rankzero search x.py` continues the study\n", stopped_fails=True
        )


def test_killed_command_is_named_and_not_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(rankzero.RunFailed, match=r"^the command ended with exit code -9$"):
        commands._check(-9, "note: mlruns was moved\n")
    assert capsys.readouterr().err == "note: mlruns was moved\n"


@pytest.mark.parametrize("typed", [True, False])
def test_command_of_a_typed_program_is_no_task_of_slurm(
    typed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr("rankzero.launch.machines.is_typed", lambda: typed)
    monkeypatch.setattr(commands, "_COMMAND", [sys.executable, "-c"])
    commands._call(["import os; print('SLURM_STEP_ID' in os.environ)"], showing=True)
    assert capfd.readouterr().out == f"{not typed}\n"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of the command that the test's call would have run."""
    words: list[str] = []

    def call(new: list[str], *, showing: bool) -> None:
        words.extend(new)

    monkeypatch.setattr(commands, "_call", call)
    monkeypatch.setattr("rankzero.api.results.Run", lambda folder, **_: folder.path.name)
    monkeypatch.syspath_prepend(TINY.parent)
    return words


def test_a_repeats_value_may_have_a_comma(called: list[str], tmp_path: Path) -> None:
    from tiny import Tiny

    rankzero.repeat(Tiny(), over={"width": [8, 16], "name": ["a,b"]}, dir=tmp_path)
    assert called[-2:] == ['--over=width=["8", "16"]', '--over=name=["a,b"]']


def test_defaults_of_a_file_that_was_edited_since_its_import_do_not_replace_settings(
    called: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base, file = tmp_path / "edited_base.py", tmp_path / "edited_since.py"
    base.write_text("import rankzero\n\nclass Base(rankzero.Experiment):\n    lr: float = 0.25\n")
    settings = "    width: int = 3\n    password: str = 'planted'\n"
    file.write_text(f"from edited_base import Base\n\nclass Edited(Base):\n{settings}")
    monkeypatch.syspath_prepend(tmp_path)
    edited = importlib.import_module("edited_since")
    rankzero.train(edited.Edited(), dir=tmp_path)
    assert "lr=0.25" not in called
    base.write_text(base.read_text().replace("0.25", "0.5"))
    rankzero.train(edited.Edited(), dir=tmp_path)
    assert "lr=0.25" in called and "width=3" in called
    assert "planted" not in str(called), "anyone can read a command line"
    rankzero.train(edited.Edited(password="another"), dir=tmp_path)
    assert "password=another" in called, "only the file has a default"


@pytest.mark.parametrize("over", [{"lr": 0.1}, {"name": "ab"}, "lr", [0.1]])
def test_a_repeat_over_no_lists_is_refused(called: list[str], over: Any) -> None:
    from tiny import Tiny

    with pytest.raises(rankzero.UserError, match=r"over must be \{setting: values\}"):
        rankzero.repeat(Tiny(), over=over)
    assert not called


@pytest.mark.parametrize(
    ("given", "says"),
    [(rankzero.Experiment, r"such as Experiment\(\)"), ("tiny.py", r"Digits\(\), got 'tiny\.py'")],
)
def test_what_is_no_experiment_is_refused(called: list[str], given: Any, says: str) -> None:
    for verb, run in (("train", rankzero.train), ("search", rankzero.search)):
        with pytest.raises(rankzero.UserError, match=f"^rankzero.{verb} takes an object.*{says}"):
            run(given)
    assert not called


class Adam(rankzero.Train.DDP): ...


class SGD(Adam): ...


class Short(rankzero.Train): ...


class Chooses(rankzero.Experiment):
    opt: Adam = Adam()


def test_group_of_another_class_is_refused(called: list[str], tmp_path: Path) -> None:
    with pytest.raises(rankzero.UserError, match=r"^opt is SGD\(…\), .* give Adam the values, or"):
        rankzero.train(Chooses(opt=SGD()), dir=tmp_path)
    assert not called
    former: Any = dataclasses.make_dataclass("Adam", [("gone", int, 1)], frozen=True)()
    rankzero.train(Chooses(opt=former), dir=tmp_path)  # the command says that it is gone
    assert "opt.gone=1" in called
    rankzero.train(Chooses(train=Short(epochs=3), opt=Adam(bucket_mb=1)), dir=tmp_path)
    assert {"train.epochs=3", "opt.bucket_mb=1"} < set(called)


class Computes(rankzero.Experiment):
    width: int = 8
    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hidden", self.hidden or 4 * self.width)


def test_a_computed_setting_is_passed_if_the_command_would_refuse_its_usual_value(
    called: list[str], tmp_path: Path
) -> None:
    usual = Computes().hidden
    rankzero.train(Computes(width=64), dir=tmp_path)
    assert {"width=64", "hidden=256"} < set(called)
    called.clear()
    rankzero.train(Computes(width=64, hidden=usual), dir=tmp_path)
    assert {"width=64", f"hidden={usual}"} < set(called)


@pytest.mark.parametrize("stdout", [None, object()])
def test_replaced_output_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stdout: object
) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(commands, "_call", lambda words, *, showing: shown.append(showing))
    monkeypatch.setattr("rankzero.api.results.Run", lambda folder, **_: folder.path.name)
    monkeypatch.syspath_prepend(TINY.parent)
    from tiny import Tiny

    monkeypatch.setattr(sys, "stdout", stdout)
    rankzero.train(Tiny(), dir=tmp_path)
    assert shown == [False]


@pytest.mark.parametrize("verb", ["train", "repeat"])
def test_name_is_another_spelling_of_run_name(verb: str, called: list[str], tmp_path: Path) -> None:
    from tiny import Tiny

    assert getattr(rankzero, verb)(Tiny(), name="named", dir=tmp_path) == "named"
    assert [word for word in called if word.startswith(("--name", "--run-name"))] == ["--run-name"]
    assert called[called.index("--run-name") + 1] == "named"


@pytest.mark.parametrize(("slurm", "options"), [(True, {}), (False, {"nnodes": 2})])
def test_several_machines_need_a_name(
    slurm: bool,
    options: dict[str, int],
    called: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tiny import Tiny

    step = {"ID": "0", "NUM_TASKS": "2", "NUM_NODES": "2", "NODELIST": "n[1-2]"}
    for name, value in step.items() if slurm else ():
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(rankzero.UserError, match="give run_name="):
        rankzero.train(Tiny(), dir=tmp_path, **options)
    assert not called
    assert rankzero.train(Tiny(), dir=tmp_path, run_name="named", **options) == "named"
    for count in (1, "1:1"):
        rankzero.train(Tiny(), dir=tmp_path, nnodes=count)
    rankzero.repeat(Tiny(), dir=tmp_path)


def test_import_of_the_api_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys, time, rankzero\n"
        "assert callable(rankzero.train) and callable(rankzero.search)\n"
        "rankzero.runs, rankzero.run\n"
        "loaded = {'torch', 'mlflow', 'optuna', 'numpy', 'pandas'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert time.monotonic() - began < 20
