"""Bad input gets one message with a fix, the right exit code, no traceback and no run folder."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rankzero.cli.housekeeping.delete import confirmed
from rankzero.cli.main import main
from rankzero.cli.verbs import VERBS
from rankzero.config import ConfigError
from rankzero.launch import agent
from rankzero.training.checkpoints import best_model
from support.commands import TINY
from support.runs import make_folder

Here = Callable[..., tuple[int, str]]
LIGHT = {"torch", "mlflow", "optuna", "pynvml", "numpy", "yaml", "rich", "multiprocessing"}


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Here:
    """Run a command in this process, which has PyTorch loaded; return its exit code and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "warm_up", lambda *_, **__: None)

    def run(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.err + captured.out

    return run


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["train", TINY, "trian.epochs=3"], 2, "did you mean 'train.epochs'"),
        (["train", TINY, "batch_size=3"], 2, "did you mean 'train.batch_size'"),
        (["train", TINY, "width=wide"], 2, "width: expected int, got 'wide'"),
        (["train", TINY, "train.epochs=0"], 2, "train.epochs: must be at least 1"),
        (["train", TINY, "train.precision=fp8"], 2, "expected fp32 | tf32 | bf16 | fp16"),
        (["train", TINY, "lr"], 2, "write key=value"),
        (
            ["train", TINY, "--nproc", 3],
            2,
            "evenly among 3 processes: use train.batch_size=30 or 33",
        ),
        (["train", TINY, "--nproc", 0], 2, "at least 1"),
        (["train", TINY, "train.strategy=single", "--nproc", 2], 2, "is one process, not 2: give"),
        (["train", TINY, "train.strategy=tp", "--nproc", 2], 2, "def parallelize(self)"),
        (["train", TINY, "train.strategy=pp", "train.drop_last=false"], 2, "train.drop_last=true"),
        (["train", TINY, "--nproc", "two"], 2, "--nproc-per-node: 'two' is no whole number, auto"),
        (["train", TINY, "--max-restarts", -1], 2, "--max-restarts must be at least 0, got -1"),
        (["config", "mistyped.py", "plain=9"], 2, "write `plain: int = 7` in the class to make"),
        (["config", "mistyped.py", "lockstep=true"], 2, "'lockstep'; `rankzero config EXP` lists"),
        (["train", TINY, "--nnodes", 2], 2, "--rdzv-endpoint"),
        (["train", TINY, "--run-name", "../up"], 2, "a run's name may have"),
        (["train", TINY, "--tracking-uri", "./old"], 2, "file store"),
        (["train", "nothing.py"], 2, "no such experiment file: nothing.py"),
        (["train", "empty.py"], 2, "defines no Experiment"),
        (["train", "broken.py"], 1, "broken.py, line 2"),
        (["train", "mistyped.py"], 2, "width: expected int, got 0.5"),
        (["config", "mistyped.py"], 2, "width: expected int, got 0.5"),
        (["config", TINY, "lr=fast"], 2, "lr: expected float"),
        (["config", TINY, "zzz=1"], 2, "'zzz'; `rankzero config EXP` lists the keys"),
        (["trian"], 2, "'trian' is no verb; did you mean 'train'?"),
        (["train", TINY, "learning_rate=1"], 2, "'learning_rate'; `rankzero config EXP` lists"),
        (["tune"], 2, "'tune' is no verb; `rankzero --help` lists them"),
        (["train", TINY, "--trials", 5], 2, "no option --trials; `rankzero config EXP` lists the"),
        (["train", TINY, "--save-every=8"], 2, "write train.checkpoints.save_every=8\n"),
        (["zzz"], 2, "'zzz' is no verb; `rankzero --help` lists them"),
        (["digits.py"], 2, "write rankzero train digits.py"),
        (["train"], 2, "required: EXP\nexample:\n  rankzero train experiments/digits.py"),
        (["train", TINY, "--lr", "0.1"], 2, "no option --lr; write lr=0.1\n"),
        (["train", TINY, "--batch-size=8"], 2, "write train.batch_size=8\n"),
        (["search", TINY, "--ray", ""], 2, "--ray got an empty address"),
        (["search", TINY, "--ray", "auto", "--", "lifetime=detached"], 2, "lifetime of the actors"),
        (["profile", TINY, "--new"], 2, "no option --new"),
        (["search", TINY, "--trails", 3], 2, "no option --trails; did you mean --trials?"),
        (["runs", "--lr", "3"], 2, "'--lr' is one word too many, or an option that does"),
        (["ui", "now"], 2, "'now' is one word too many"),
        (["resume", "nobody"], 2, "no run is called 'nobody'"),
        (["sync", "nobody"], 2, "no run is called 'nobody'"),
    ],
)
def test_mistake_gets_one_message(here: Here, words: list[object], code: int, says: str) -> None:
    Path("empty.py").write_text("x = 1\n")
    Path("broken.py").write_text("x = 1\nraise OSError('of its own')\n")
    body = "class One(Experiment):\n    width: int = 0.5\n    plain = 7\n"
    Path("mistyped.py").write_text(f"from rankzero import Experiment\n{body}")
    found, output = here(*words)
    assert found == code, output
    assert says in output
    assert output.startswith("error:") and "Traceback" not in output
    assert not list(Path.cwd().glob("mlruns/runs/*"))


@pytest.mark.parametrize("text", ["1h", "-1", "nan"])
def test_seconds_of_the_environment_are_checked_before_a_run(
    here: Here, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_SETUP_SECONDS", text)
    code, output = here("train", TINY)
    assert code == 2 and f"RANKZERO_SETUP_SECONDS='{text}' is not a number of sec" in output, output
    assert not list(Path.cwd().glob("mlruns/runs/*"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("name: é\n".encode("latin-1"), "byte 0xe9 in line 1): save it as UTF-8"),
        ("lr: 0.1\nwidth: 8\n".encode("utf-16"), "byte 0xff in line 1): save it as UTF-8"),
        (b"lr: [1\n", "not valid YAML"),
        (b"- lr\n", "expected lines of `key: value`"),
    ],
)
def test_invalid_settings_file_is_named(here: Here, content: bytes, says: str) -> None:
    Path("start.yaml").write_bytes(content)
    code, output = here("train", TINY, "--from", "start.yaml")
    assert code == 2 and output.startswith("error: start.yaml") and says in output, output


def test_a_comparison_of_runs_names_the_report(here: Here) -> None:
    make_folder(Path("mlruns"), name="t1")
    code, output = here("compare", "t1", "t2")
    assert code == 2 and "report t1 t2" in output


def test_invalid_settings_of_a_run_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, experiment_file=str(TINY))
    folder.config.write_bytes(b"lr: \xff\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        best_model.experiment_of(folder)
    folder.config.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        best_model.experiment_of(folder)


def test_without_a_verb_the_first_three_commands_are_shown(here: Here) -> None:
    code, output = here()
    shown = [line.split()[:2] for line in output.splitlines() if line.startswith("  rankzero")]
    assert code == 2 and shown == [["rankzero", verb] for verb in ("init", "train", "ui")]
    assert f"all {len(VERBS)} verbs" in output


def test_debug_shows_the_traceback(here: Here) -> None:
    with pytest.raises(ConfigError):
        here("config", TINY, "lr=fast", "--debug")


def test_unwritable_folder_is_an_error(here: Here) -> None:
    Path("file").write_text("in the way")
    code, output = here("train", TINY, "--dir", "file/mlruns")
    assert code == 2 and "cannot write" in output


def test_old_file_store_is_an_error(here: Here) -> None:
    old = Path("mlruns/0")
    old.mkdir(parents=True)
    (old / "meta.yaml").write_text("name: Default\n")
    code, output = here("train", TINY)
    assert code == 2 and "migrate-filestore" in output and not Path("mlruns/runs").exists()


def test_ctrl_d_at_a_question_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pty.openpty()
    os.write(master, b"\x04")
    with os.fdopen(master), os.fdopen(terminal) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        assert not confirmed("delete it", yes=False)


def test_port_that_cannot_be_used_is_an_error(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given in (port, 65535 + port):
            code, output = here("ui", "--port", given)
            assert code == 2 and f"port {given} cannot be used" in output and "--port 0" in output


def test_ui_in_a_wrong_folder_makes_no_store(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path.cwd()
    code, output = here("ui")
    assert code == 2 and f"no store in {home}/mlruns" in output and not Path("mlruns").exists()
    (home / "mlruns").mkdir()
    (home / "mlruns/mlflow.db").touch()
    (home / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(home / "a" / "b")
    assert f"there is one in {home}/mlruns: rankzero ui --dir {home}/mlruns" in here("ui")[1]
    assert not list(Path.cwd().iterdir())


def test_existing_run_name_is_an_error(here: Here) -> None:
    Path("mlruns/runs/mine").mkdir(parents=True)
    Path("mlruns/runs/mine/events.jsonl").touch()
    code, output = here("train", TINY, "--run-name", "mine")
    assert code == 2 and "rankzero resume mine" in output


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["runs", "--help"],
        ["logs", "--help"],
        ["export", "--help"],
        ["register", "--help"],
    ],
)
def test_help_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    heavy = {"torch", "mlflow", "optuna", "pynvml", "numpy"}
    program = (
        "import sys\nfrom rankzero.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"loaded = {heavy!r} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout or "rankzero 0" in done.stdout


def test_a_command_that_has_imported_triton_ends_without_its_report(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = (
        "import gc, sys, triton._C.libtriton\nfrom rankzero.cli.main import command\n"
        "gc.freeze()\nsys.argv = ['rankzero', 'runs']\ncommand()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "no runs" in done.stdout, done.stderr
    assert not done.stderr


def test_importing_rankzero_imports_nothing(tmp_path: Path) -> None:
    program = (
        f"import sys, rankzero\nloaded = {LIGHT!r} & set(sys.modules)\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


@pytest.mark.parametrize(("utf8", "says"), [("0", "write PYTHONUTF8=1"), ("1", "no runs")])
def test_umlaut_is_refused_where_python_reads_paths_as_ascii(
    tmp_path: Path, utf8: str, says: str
) -> None:
    folder = tmp_path / "Köln"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "rankzero", "runs"],
        cwd=folder,
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8},
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert says in done.stderr + done.stdout
    assert (done.returncode == 2) == (utf8 == "0") and "Traceback" not in done.stderr
