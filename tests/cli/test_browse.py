"""`rankzero runs`, `report`, `logs`, `export`, `register` on runs that were trained for it once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from rankzero.catalog.lookup import mlflow_id
from rankzero.cli.display.live import Console
from rankzero.cli.main import main
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import RunFolder
from support.commands import TINY, Command, command_in, free_port
from support.runs import make_folder

CHATTY = """
from tiny import Tiny

class Chatty(Tiny):
    def data(self):
        print("hello from a rank", flush=True)
        return super().data()
"""
Here = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, new_store: Path) -> Iterator[Command]:
    """Two runs of a file in a repository, the second after an uncommitted change."""
    with command_in(tmp_path_factory.mktemp("trained"), new_store) as command:
        (command.folder / "tiny.py").write_text(TINY.read_text())
        (command.folder / "chatty.py").write_text(CHATTY)
        (command.folder / ".gitignore").write_text("mlruns/\n")
        git(command.folder, "init", "-q")
        git(command.folder, "add", ".")
        git(command.folder, "commit", "-qm", "one")
        command.succeed(
            "train", "chatty.py", "--nproc", 2, "--run-name", "first", "train.mlflow.log_model=true"
        )
        (command.folder / "tiny.py").write_text(TINY.read_text().replace("nn.ReLU()", "nn.GELU()"))
        command.succeed(
            "train", "tiny.py", "--nproc", 1, "--run-name", "second", "lr=0.001", "train.steps=9"
        )
        yield command


@pytest.fixture
def here(
    trained: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    """Run a command in this process; return its exit code and what it printed."""
    monkeypatch.chdir(trained.folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("RANKZERO_DIR", raising=False)

    def run(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.err + captured.out

    return run


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *words],
        cwd=folder,
        check=True,
    )


def names(output: str) -> list[str]:
    return [
        line.split()[0] for line in output.splitlines()[1:] if line and not line.startswith("*")
    ]


def on_a_terminal(command: Command, *words: str, columns: int = 80, **environ: str) -> str:
    """Return what the command prints on a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rankzero", *words],
        cwd=command.folder,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**command.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **environ},
    )
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(master, 65536):
            output += chunk
    os.close(master)
    assert process.wait(timeout=60) == 0
    return output.decode()


def test_ui_opens_the_runs_of_the_newest_experiment(trained: Command, tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    os.mkfifo(opened)
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o700)
    command = dataclasses.replace(trained, environ={**trained.environ, "BROWSER": str(browser)})
    server = command.start("ui", "--port", free_port(), "--open", cold=True)
    address = opened.read_text().strip()
    assert server.stdout is not None and server.stdout.readline() == f"runs: {address}\n"
    assert "/#/experiments/" in address and "workflowType=machine_learning" in address
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=30) == 0


def test_runs_are_filtered_and_sorted(here: Here) -> None:
    assert names(here("runs")[1]) == ["second", "first"]
    assert names(here("runs", "--sort", "lr")[1]) == ["second", "first"]
    assert names(here("runs", "--sort", "-lr")[1]) == ["first", "second"]
    assert names(
        here("runs", "experiment=chat*", "lr>1e-2", "status=finished", "val/accuracy>=0.5")[1]
    ) == ["first"]
    assert "no run matches" in here("runs", "status=FAILED")[1]
    code, output = here("runs", "val/acuracy>0.9")
    assert code == 2 and "did you mean 'val/accuracy'" in output
    code, output = here("runs", "val/accuracy")
    assert code == 2 and "in quotes" in output
    assert here("runs", "lr<low")[0] == 2


def test_runs_as_json_have_the_same_keys(here: Here) -> None:
    found = json.loads(here("runs", "--json")[1])
    assert [one["name"] for one in found] == ["second", "first"]
    assert {tuple(one) for one in found} == {
        (
            "name",
            "experiment",
            "status",
            "reason",
            "started",
            "seconds",
            "goal",
            "best",
            "samples_per_second",
            "undelivered",
            "parent",
            "mlflow_run_id",
            "data",
            "mlflow_name",
            "bytes",
            "parent_mlflow_name",
            "params",
            "metrics",
            "tags",
        )
    }
    assert found[0]["params"]["lr"] == "0.001" and 0 <= found[0]["metrics"]["val/accuracy"] <= 1
    assert json.loads(here("runs", "--json", "status=FAILED")[1]) == []


def test_pipes_get_no_colours(trained: Command) -> None:
    code, piped = trained("runs")
    assert code == 0 and "\x1b" not in piped and "first" in piped
    assert "\x1b[32m" in on_a_terminal(trained, "runs")
    assert "\x1b[32m" not in on_a_terminal(trained, "runs", NO_COLOR="1")


def test_report_equals_the_page_in_mlflow(here: Here, trained: Command) -> None:
    folder = RunFolder(trained.folder / "mlruns/runs/first")
    tags = MlflowRuns(folder.identity.tracking_uri).find_run(mlflow_id(folder) or "").tags
    _, output = here("report", "first")
    notes, marker, written = tags["mlflow.note.content"].partition("-->\n\n")
    assert notes.startswith("<!-- rankzero ") and marker
    assert output == written.replace("&nbsp;\n\n", "").replace("&emsp;", "")
    for says in (
        "### FINISHED",
        "Limited by",
        "rankzero resume first train.epochs=8",
        "Processes | 2 on cpu",
        "\nrankzero train chatty.py --nproc 2 train.mlflow.log_model=true\n",
        "git checkout ",
    ):
        assert says in output
    assert "git apply diff.patch" in here("report", "second")[1]
    shown = on_a_terminal(trained, "report", "first", NO_COLOR="1")
    assert "FINISHED" in shown and "###" not in shown
    assert here("report", "nobody")[0] == 2 and not (trained.folder / "mlruns/studies.db").exists()


def test_report_of_two_runs_shows_differences(here: Here) -> None:
    code, output = here("report", "first", "second")
    rows = {
        line.split()[0]: line.split()[1:] for line in output.splitlines() if line.startswith("  ")
    }
    assert code == 0 and rows["lr"][:2] == ["0.05", "0.001"]
    assert rows["world_size"] == ["2", "1"] and len(rows["samples/s"]) in (2, 3)
    assert "train.seed" not in rows and "torch" not in rows and "commit" not in rows
    assert "tiny.py (second only)" in output and "++        " in output and "nn.GELU()" in output
    everything = here("report", "first", "second", "--all")[1]
    assert "train.seed" in everything and "torch" in everything and "commit" in everything
    code, output = here("report", "first", "second", "first")
    row = next(line for line in output.splitlines() if line.startswith("  lr "))
    assert code == 0 and row.split() == ["lr", "0.05", "0.001", "0.05"]
    assert here("report", "first", "b", "c")[0] == 2
    code, output = here("report", "first", "second", "--html", "page.html")
    assert code == 0 and output == "page.html\n"
    assert "nn.GELU()" in Path("page.html").read_text()


def test_narrow_terminal(trained: Command) -> None:
    for words in (
        ("runs",),
        ("runs", "--sort", "lr"),
        ("report", "first"),
        ("report", "first", "second"),
    ):
        lines = on_a_terminal(trained, *words, NO_COLOR="1", TERM="dumb").splitlines()
        assert lines and max(map(len, lines)) <= 80, words


def test_logs_show_what_the_ranks_printed(here: Here) -> None:
    assert here("logs", "first") == (0, "[0] hello from a rank\n[1] hello from a rank\n")
    assert here("logs", "first", "--rank", 1) == (0, "hello from a rank\n")
    assert here("logs", "second") == (0, "second: its ranks printed nothing on this machine\n")
    code, output = here("logs", "first", "--rank", 2)
    assert code == 2 and "its ranks here are 0, 1" in output
    code, output = here("logs", "first", "--follow")
    assert code == 0 and "hello from a rank" in output and "first: FINISHED" in output


def test_follow_on_a_machine_without_rank_0_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path, name="wide").system(1).touch()
    assert main(["logs", "wide", "--follow", "--dir", str(tmp_path)]) == 2
    assert "the journal of rank 0 is not on this disk" in capsys.readouterr().err


def test_follow_does_not_affect_the_run_and_ends_with_it(rankzero: Command) -> None:
    training = rankzero.start(
        "train", TINY, "--offline", "--run-name", "live", "step_seconds=0.03", "train.epochs=1000"
    )
    rankzero.wait_for_step(10)
    first, second = (rankzero.start("logs", "live", "--follow") for _ in range(2))
    for process in (first, second):
        assert process.stdout is not None
        assert any(line.startswith("step") for line in process.stdout)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 0 and "detached; live continues" in output
    assert training.poll() is None and second.poll() is None
    training.send_signal(signal.SIGTERM)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 75 and "live: KILLED" in output and "resume live" in output
    assert training.wait(timeout=60) == 75


def test_ctrl_c_before_the_display_starts_detaches(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(console: Console) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Console, "catch_up", interrupted)
    code, output = here("logs", "first", "--follow")
    assert code == 0 and "detached; first continues" in output


def test_run_is_exported(
    here: Here, trained: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = trained.folder / "mlruns/runs/first/artifacts"
    for name in ("train/roc.png", "val/roc.png"):
        (artifacts / "folder.png").mkdir(exist_ok=True)
        (artifacts / name).parent.mkdir(exist_ok=True)
        (artifacts / name).write_text(name)
    code, output = here("export", "first", "--to", tmp_path / "csv")
    assert code == 0
    for name in ("train/roc.png", "val/roc.png"):
        assert (tmp_path / "csv/figures" / name).read_text() == name and name in output
        (artifacts / name).unlink()
    table = pandas.read_csv(tmp_path / "csv/metrics.csv")
    assert list(table.columns[:2]) == ["step", "time"] and list(table["step"]) == list(
        range(1, len(table) + 1)
    )
    points = MlflowRuns(f"sqlite:///{trained.folder}/mlruns/mlflow.db").history(
        mlflow_id(RunFolder(trained.folder / "mlruns/runs/first")) or "", "train/loss"
    )
    assert table["train/loss"].tolist() == pytest.approx([point.value for point in points])
    assert table["val/accuracy"].notna().sum() == 4
    described = json.loads((tmp_path / "csv/run.json").read_text())
    assert described["params"]["lr"] == "0.05" and described["checkpoints"][-1]["step"] == len(
        table
    )
    assert (tmp_path / "csv/figures/learning_curves.png").read_bytes().startswith(b"\x89PNG")
    assert here("export", "first", "--to", tmp_path / "parquet", "--format", "parquet")[0] == 0
    assert pandas.read_parquet(tmp_path / "parquet/metrics.parquet")["train/loss"].equals(
        table["train/loss"]
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, output = here("export", "first", "--to", tmp_path / "none", "--format", "parquet")
    assert code == 2 and "pip install pyarrow" in output and not (tmp_path / "none").exists()


def test_export_does_not_overwrite_a_run(
    here: Here, trained: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = trained.folder / "mlruns/runs"
    identity = (runs / "first/run.json").read_bytes()
    assert here("export", "first", "--to", runs / "first/tables")[0] == 2
    monkeypatch.chdir(runs)
    code, output = here("export", "first", "--dir", "..")
    assert code == 2 and "--to" in output and not (runs / "first/figures").exists()
    assert (runs / "first/run.json").read_bytes() == identity


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_best_model_is_registered_and_served(here: Here, trained: Command) -> None:
    for _ in range(2):  # again: the same version
        code, output = here("register", "first", "tiny")
        assert code == 0 and "models:/tiny/1 is the best model of first" in output, output
    uri, port = f"sqlite:///{trained.folder}/mlruns/mlflow.db", free_port()
    with served("models:/tiny/1", uri, port):
        example = loaded_example(uri)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            json.dumps({"inputs": example["x"]}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["predictions"] == [
                pytest.approx(row, rel=1e-4) for row in example["y"]
            ]


def loaded_example(uri: str) -> dict[str, Any]:
    """Return the registered model's own input example, and what the model makes of it."""
    import mlflow.pytorch
    import torch
    from mlflow.models import get_model_info

    mlflow.set_tracking_uri(uri)
    with contextlib.ExitStack() as after, warnings.catch_warnings():
        after.callback(mlflow.set_tracking_uri, None)
        warnings.simplefilter("ignore")  # MLflow's own
        signature = get_model_info("models:/tiny/1").signature
        assert signature is not None and signature.outputs is not None
        assert [spec.shape for spec in (*signature.inputs, *signature.outputs)] == [
            (-1, 8),
            (-1, 2),
        ]
        model = mlflow.pytorch.load_model("models:/tiny/1")
        found = mlflow.pyfunc.load_model("models:/tiny/1").input_example
        return {"x": found.tolist(), "y": model(torch.from_numpy(found)).tolist()}


@contextlib.contextmanager
def served(model: str, uri: str, port: int) -> Iterator[None]:
    """Serve the model during the block as people would; `mlflow` finds `uvicorn` on the PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "mlflow", "models", "serve"),
            *("-m", model, "--env-manager", "local", "-p", str(port)),
        ],
        env={
            **os.environ,
            "MLFLOW_TRACKING_URI": uri,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PATH": path,
        },
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=1),
            ):
                break
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_register_without_a_model_is_an_error(here: Here) -> None:
    code, output = here("register", "nobody", "tiny")
    assert code == 2 and "nobody" in output
