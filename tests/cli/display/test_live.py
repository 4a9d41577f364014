"""The console prints names, reasons and paths with brackets and colons as they are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_launch_run import finish
from rankzero.cli.commands import logs
from rankzero.cli.display import delivery_notes
from rankzero.cli.display.live import Console, command, look
from rankzero.cli.display.terminal import table_console
from rankzero.errors import FAILED, RESUMABLE
from rankzero.events import Evaluated
from rankzero.experiment import Goal
from rankzero.reporting import run_report
from rankzero.reporting.run_facts import facts_of
from rankzero.run_store.delivery_state import load, path_of
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import delivery_status
from rankzero.training.checkpoints import best_model
from support.commands import TINY, Command, last_end
from support.runs import append, ended, make_folder, saved, started, steps

ODD = "val/a[/b]"
REASON = "cannot read [/data/x.pt]: no key [train] of :key: [red]"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    root = tmp_path / "[" / "root]"
    return make_folder(root, f"sqlite:///{root}/mlflow.db", experiment="of [/us]")


def test_text_like_markup_is_printed_as_it_is(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(folder, Goal(ODD, "max"))
    with console:
        console.notice(REASON)
        with console.status(REASON):
            pass
    console.result(ended("FAILED", REASON, metrics={"best": 0.5}))
    output = capsys.readouterr().out
    assert output.count(REASON) == 2, output
    assert (
        f"best {ODD}" in output
        and "of [/us]" in output
        and "--dir" in output
        and "[/root]" in output
    ), output


def test_the_result_of_a_resumed_run_has_the_steps_of_all_attempts(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(folder, Goal(ODD, "max"))
    with console:
        append(folder, started(attempt=2, step=42), steps(43, 76), ended(metrics={"steps": 34}))
    assert console.ended is not None
    console.result(console.ended)
    output = capsys.readouterr().out
    assert re.search(r"steps +│ 76 of 100 ", output), output


def test_run_with_odd_names_is_followed_to_its_end(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(folder, Goal(ODD, "max"), advise=lambda event: REASON)
    with console:
        append(folder, started(), Evaluated(0.0, 3, {ODD: 0.5}, True), ended(reason=REASON))
    assert console.ended is not None and console.ended.status == "FINISHED"
    output = capsys.readouterr().out
    assert f"{ODD} 0.5" in output and REASON in output, output


def test_a_stopped_run_is_followed_to_the_exit_code_of_its_command(folder: RunFolder) -> None:
    append(folder, started(), ended("KILLED"))
    assert logs._follow(folder, 0) == FAILED, "it has no checkpoint"
    (folder.checkpoints / "step_00000003").mkdir(parents=True)
    assert logs._follow(folder, 0) == RESUMABLE


def test_output_without_ends_of_lines_hides_nothing_after_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder.path / "logs" / "launch" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    bars = "\r 10%|#         |" * 10_000
    console = Console(folder, Goal("val/accuracy", "max"), is_first=True)
    with console:
        log.write_text(f"{bars}\nfirst\n" + "a line\n" * 30_000 + "killed here")
        append(folder, started(), ended())
    output = capsys.readouterr().out
    assert "\nfirst\n" in output and output.count("a line") == 30_000
    assert "killed here\n" in output
    assert logs._show(folder, 0) and f"{bars}\nfirst\n" in capsys.readouterr().out


def test_one_of_several_machines_shows_the_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        console = Console(folder, Goal(ODD, "max"), is_first=None)
        with console:
            assert capsys.readouterr().out == ""
            console.joined(number)
            append(folder, started(), Evaluated(0.0, 3, {ODD: 0.5}, True), ended(reason=REASON))
        console.notice(REASON)
        console.result(ended())
        output = capsys.readouterr().out
        assert ("of [/us]" in output and f"{ODD} 0.5" in output) if number == 0 else output == ""


def test_where_runs_are_seen(tmp_path: Path) -> None:
    def seen(uri: str) -> str:
        return look(make_folder(tmp_path, uri))

    assert seen("http://me:hunter2@server:5000") == "http://server:5000"
    assert seen("sqlite:////team/mlflow.db").endswith("rankzero ui --dir /team")
    assert seen("sqlite:////team/all.db").endswith(" --backend-store-uri sqlite:////team/all.db")
    assert seen("mysql://me:hunter2@host/db").endswith(" mysql://host/db")


def test_commands_to_paste_are_quoted_and_name_their_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "mit raum"
    folder = make_folder(root, f"sqlite:///{root}/mlflow.db")
    assert look(folder).endswith(f"rankzero ui --dir '{root}'")
    file = ["train", "Läufe aus Köln/my.py"]
    assert command(root, *file).endswith(f" train 'Läufe aus Köln/my.py' --dir '{root}'")
    assert command(Path("mlruns"), "sync", "one").endswith("rankzero sync one")
    monkeypatch.setenv("RANKZERO_DIR", str(root))
    assert command(root, "sync", "one").endswith("rankzero sync one")
    assert command(Path("mlruns"), "sync", "one").endswith(" --dir mlruns")
    program = tmp_path / "my venv/rankzero"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    assert command(root, "ui") == "'my venv/rankzero' ui"


def test_commands_of_an_offline_run_name_its_store(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mit raum")
    name, option = folder.path.name, f" --dir '{tmp_path / 'mit raum'}'"
    assert delivery_notes.offline_note(folder).endswith(f"rankzero sync {name}{option}")
    append(folder, started(), saved(folder, 50), ended("KILLED"))
    assert f"\nrankzero resume {name}{option}\n" in run_report.page(folder)
    kept = run_report.written(folder, facts_of(folder), load(path_of(folder, 0)))
    assert f"\nrankzero resume {name}\n" in kept, "MLflow's page stays true if the store is moved"


def test_tables_print_colons_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table_console().print("aten:key:")
    assert capsys.readouterr().out == "aten:key:\n"


def test_best_model_is_logged_also_if_the_console_missed_the_end(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(folder, started(), saved(folder, 4), ended())
    logged = []
    monkeypatch.setattr(
        delivery_status, "wait", lambda of, enough: delivery_status.status(of)._replace(done=True)
    )
    monkeypatch.setattr(
        best_model.LoggingProcess, "wait", lambda process, *_: logged.append(process)
    )
    finish(folder, seen=False)
    assert len(logged) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is a full disk of Linux")
def test_a_full_disk_of_the_commands_output_fails_no_run(rankzero: Command) -> None:
    words = [sys.executable, "-m", "rankzero", "train", str(TINY), "train.steps=6", "--offline"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            words,
            cwd=rankzero.folder,
            env=rankzero.environ,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=100,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_standard_streams_fail_no_command(rankzero: Command) -> None:
    words = [sys.executable, "-m", "rankzero", "train", str(TINY), "train.steps=6"]
    words += ["--run-name", "deaf", "--offline"]

    def code_of(closed: str, *command: str) -> int:
        script = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
        where, environ = rankzero.folder, rankzero.environ
        return subprocess.run(script, cwd=where, env=environ, check=False, timeout=100).returncode

    assert code_of("<&- >&- 2>&-", *words) == 0
    (run,) = rankzero.runs
    assert last_end(run).status == "FINISHED"
    assert code_of(">&-", *words[:3], "ui", "--dir", "nowhere") == 2
    assert code_of("<&-", *words[:3], "runs") == 0


def test_output_encoding_without_characters_breaks_nothing(rankzero: Command) -> None:
    rankzero.environ["PYTHONIOENCODING"] = "ascii"
    code, output = rankzero(
        *("train", TINY, "train.steps=10", "--run-name", "l\u00e4uft"),
        *("--experiment-name", "\u00dcbersicht \u2713", "--offline"),
    )
    assert code == 0 and "Traceback" not in output, output
    assert r"l\xe4uft: FINISHED" in output and r"\xdcbersicht \u2713" in output, output
    code, output = rankzero("runs")
    assert code == 0 and r"l\xe4uft" in output and "FINISHED" in output, output
