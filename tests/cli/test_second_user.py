"""Another user of the machine stops neither a training nor its resume, and reaches no store."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rankzero.cli.commands.ui  # noqa: F401 — `nobody` may not be able to read it
from rankzero.cli.main import main
from support.commands import TINY, Command, command_in, last_end
from support.second_user import as_nobody, listening, needs_root, nobody_locks, store_keys

pytestmark = needs_root


@pytest.fixture
def shared(new_store: Path) -> Iterator[Command]:
    """The command in a folder that every user may enter and read, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="rankzero-shared-") as folder:
        Path(folder).chmod(0o755)
        with command_in(Path(folder), new_store) as command:
            yield command


def test_a_store_that_one_may_only_read_is_not_served(capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        assert as_nobody(main, ["ui", "--port", "0", "--dir", folder]) == 2
    assert f"you may only read {folder}" in capfd.readouterr().err


@pytest.mark.slow
def test_nobody_can_stop_a_run_or_its_resume(shared: Command) -> None:
    settings = ("--nproc", 2, "step_seconds=0.02", "train.epochs=1000", "train.log_every=2")
    training = shared.start("train", TINY, "--offline", "--run-name", "run", *settings)
    run = shared.wait_for_step(4)
    with nobody_locks(shared.folder) as held:
        assert str(run.path / "events.jsonl") in held, "it can read the run, and tries it all"
        addresses = listening(psutil.Process(training.pid))
        assert len(addresses) >= 2, "the ranks' gloo"
        assert [as_nobody(store_keys, *address) for address in addresses] == [None] * len(addresses)
        training.send_signal(signal.SIGUSR2)  # as submitit does before the machine goes
        output, _ = training.communicate(timeout=120)
        assert training.returncode == 75, output
        assert last_end(run).reason.startswith("stopped by SIGUSR2")
        code, output = shared(
            "resume", "run", "--offline", "train.epochs=none", "train.steps=900", "step_seconds=0"
        )
        assert code == 0 and last_end(run).status == "FINISHED", output
    assert (run.path / "launcher.lock").stat().st_mode & 0o077 == 0
