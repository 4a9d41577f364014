"""`rankzero.track`: the same tracking for one's own loop."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import rankzero
from rankzero import Goal
from rankzero.events import CheckpointSaved, Evaluated, RunEnded, RunStarted, StepsLogged
from rankzero.tracking import sync
from rankzero.tracking.folder import RunFolder
from rankzero.tracking.journal import read_all
from rankzero.tracking.mlflow import Tracker
from rankzero.train import checkpoint
from rankzero.train.own_loop import params_of


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MLFLOW_TRACKING_URI", "RANKZERO_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_three_lines_are_tracked_to_the_end() -> None:
    model = torch.nn.Linear(2, 1)
    with rankzero.track("mine", {"lr": 0.1, "net": {"width": 3}}, goal=Goal("val/loss"), name="r1") as run:
        for step in range(1, 6):
            loss = torch.tensor(float(step))
            run.log({"train/loss": loss, "other": step * 2}, step=step)
            loss.zero_()  # what is logged is the value at the time
        run.checkpoint(model.state_dict(), step=5, metrics={"val/loss": torch.tensor(0.5)})
    assert run.folder is not None
    folder = RunFolder(run.folder)
    events = list(read_all(folder.events))
    logged = {event.steps[0]: event.metrics for event in events if isinstance(event, StepsLogged)}
    assert {step: metrics["train/loss"][0] for step, metrics in logged.items()} == {n: float(n) for n in range(1, 6)}
    assert [type(event) for event in events if not isinstance(event, StepsLogged)] == [
        RunStarted, Evaluated, CheckpointSaved, RunEnded]  # fmt: skip
    path, _ = checkpoint.newest_intact(folder.checkpoints)
    assert path is not None and torch.equal(checkpoint.load(path)["weight"], model.weight)
    delivery = sync.wait(folder)
    assert delivery.done and delivery.run_id is not None
    found = Tracker(folder.identity.tracking_uri).find_run("r1")
    assert found.status == "FINISHED"
    assert found.params["net.width"] == "3" and found.metrics["train/loss"] == 5.0


@pytest.mark.parametrize(
    ("raised", "status"),
    [(RuntimeError("boom"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(3), "FAILED"),
     (SystemExit(0), "FINISHED")],
)  # fmt: skip
def test_the_status_is_how_the_block_was_left(raised: BaseException, status: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("rankzero.tracking.recorder.start", lambda *words, **options: Closed())
    with pytest.raises(type(raised)), rankzero.track("mine") as run:
        raise raised
    assert run.folder is not None
    end = [event for event in read_all(run.folder / "events.jsonl") if isinstance(event, RunEnded)]
    assert [event.status for event in end] == [status]
    assert ("boom" in str(end[0].error)) == isinstance(raised, RuntimeError)


class Closed:
    def close(self) -> None:
        """Nothing was started."""


def test_other_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with rankzero.track("mine") as run:
        run.log({"loss": torch.tensor(1.0)}, step=1)
        run.checkpoint({}, step=1)
    assert run.name is None and not Path("mlruns").exists()


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    sizes: tuple[int, ...] = (1, 2)


def test_configs_become_params() -> None:
    assert params_of(None) == {}
    assert params_of({"a": {"b": 1}, "c": None}) == {"a.b": "1", "c": "none"}
    assert params_of(Settings()) == {"lr": "0.1", "sizes": "[1, 2]"}
    with pytest.raises(rankzero.ConfigError, match="mapping or a dataclass"):
        params_of(3)


def test_what_is_no_number_is_told_and_does_not_stop_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankzero.tracking.recorder.start", lambda *words, **options: Closed())
    with rankzero.track("mine") as run:
        for step in (1, 2):
            run.log({"text": "x", "many": torch.ones(3), "none": None, "good": np.float32(1)}, step=step)
    assert run.folder is not None
    logged = [event for event in read_all(run.folder / "events.jsonl") if isinstance(event, StepsLogged)]
    assert len(logged) == 2
    for event in logged:
        assert event.metrics["good"] == [1.0]
        assert all(math.isnan(event.metrics[name][0]) for name in ("text", "many", "none"))
    told = capsys.readouterr().out
    assert told.count("a tensor of shape (3,)") == told.count("'x'") == told.count("'None'") == 1


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no recorder."""
    monkeypatch.setattr("rankzero.tracking.recorder.start", lambda *words, **options: Closed())


@pytest.mark.usefixtures("untracked")
def test_going_on_with_a_run_goes_on_with_its_best() -> None:
    for value, best in ((0.9, True), (0.5, False), (0.95, True)):
        with rankzero.track("mine", name="r1", goal=Goal("val/accuracy", "max")) as run:
            assert run.evaluated({"val/accuracy": value}, step=1) is best
    assert run.folder is not None
    ended = [event for event in read_all(run.folder / "events.jsonl") if isinstance(event, RunEnded)]
    assert [event.metrics["best"] for event in ended] == [0.9, 0.9, 0.95]


@pytest.mark.usefixtures("untracked")
def test_a_written_checkpoint_is_told_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankzero.train.own_loop.FLUSH_ROWS", 1)
    with rankzero.track("mine") as run:
        assert run.folder is not None
        run.checkpoint({"x": torch.zeros(1)}, step=1)
        run._checkpoints._pending.result()
        run.log({"loss": 1.0}, step=2)
        assert any(isinstance(event, CheckpointSaved) for event in read_all(run.folder / "events.jsonl"))


@pytest.mark.usefixtures("untracked")
def test_a_checkpoint_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with rankzero.track("mine") as run:
        assert run.folder is not None
        (run.folder / "checkpoints").write_text("in the way")
        for step in (1, 2):
            run.checkpoint({"x": torch.zeros(1)}, step=step)
    assert capsys.readouterr().out.count("a checkpoint could not be written") == 2
