"""`TrackedRun.latest`: a loop of one's own continues from this disk, from MLflow, on all ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import rankzero
from rankzero import UserError
from rankzero.cli.display import diagnosis
from rankzero.events import Noticed, RunStarted, StepsLogged, encode_line
from rankzero.integrations.own_loop.tracked_run import TrackedRun
from rankzero.reporting import run_report
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking import delivery_status
from support.runs import of_kind


def trained(**options: Any) -> TrackedRun:
    with rankzero.track("mine", name="r1", **options) as run:
        assert run.latest() is None
        for step in (1, 2, 3):
            run.log({"train/loss": 1.0 / step}, step)
            if step == 2:
                run.checkpoint({"weight": torch.ones(2), "step": 2}, 2, {"val/loss": 0.5})
    return run


def test_next_process_continues_from_the_last_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(trained(offline=True).folder or Path())
    with rankzero.track("mine", name="r1", offline=True) as run:
        state = run.latest()
        assert state is not None and state["step"] == 2
        assert torch.equal(state["weight"], torch.ones(2))
        run.log({"train/loss": 0.25})
        run.checkpoint({"step": 3})
        # A checkpoint that is still being written is the last one.
        assert run.latest() == {"step": 3}
    assert "step 3 of train/loss is not above those of an earlier" in capsys.readouterr().out
    for text in (run_report.page(folder), "\n".join(diagnosis._advice(folder, _failed(folder)))):
        assert 'rankzero.track(…, name="r1")\n' in text and "state = run.latest()" in text
        assert "rankzero resume" not in text and "the framework's own checkpoint" in text


def test_metric_counts_on_from_its_own_step_at_the_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Checkpoints and evaluations count epochs, and `log` counts batches."""
    for epochs in ((0, 1, 2), (3, 4)):
        with rankzero.track("mine", name="r1", offline=True) as run:
            assert (run.latest() or {"epoch": -1})["epoch"] == epochs[0] - 1
            for epoch in epochs:
                for _ in range(4):
                    run.log({"train/loss": 0.5})
                run.evaluated({"val/acc": 0.5}, epoch)
                run.checkpoint({"epoch": epoch}, epoch)
    logged = [one.steps for one in of_kind(run.folder, StepsLogged) if one.metrics]
    assert [step for steps in logged for step in steps] == list(range(20))
    assert "earlier attempt" not in capsys.readouterr().out


@pytest.mark.parametrize("saved", [2, None])
def test_value_after_the_checkpoint_is_not_the_best_any_more(saved: int | None) -> None:
    for loss in (0.7, 0.6):  # The second attempt leaves the first one's branch, too.
        with rankzero.track("mine", name="r1", offline=True) as run:
            first = 0 if run.latest() is None else 2
            for step, value in [*enumerate((0.9, 0.8, loss, 0.5), 1)][first:]:
                assert run.evaluated({"val/loss": value}, step)
                run.evaluated({"test/loss": 0.1}, step)
                if step == saved:
                    run.checkpoint({"x": 1}, step)
    with rankzero.track("mine", name="r1", offline=True) as run:
        run.latest()
        assert run.evaluated({"val/loss": 0.85}, 3) is (saved is None)
        assert run.evaluated({"val/loss": 0.79}, 4) and not run.evaluated({"val/loss": 0.85}, 5)


def test_higher_checkpoint_of_an_earlier_training_is_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for step, resumes in ((20, False), (10, False), (15, True)):
        with rankzero.track("mine", name="r1", offline=True) as run:
            assert not resumes or run.latest() == {"step": 20}
            run.checkpoint({"step": step}, step)
    assert capsys.readouterr().out.count("still loads step 20 of an earlier attempt") == 1


def test_metric_counts_on_from_its_own_step_without_a_checkpoint() -> None:
    for epochs in ((0, 1, 2), (3, 4)):
        with rankzero.track("mine", name="r1", offline=True) as run:
            for epoch in epochs:
                for _ in range(4):
                    run.log({"train/loss": 0.5})
                run.evaluated({"val/acc": 0.5}, epoch)
    steps = [step for one in of_kind(run.folder, StepsLogged) for step in one.steps]
    assert steps == sorted({*steps})


def test_metric_counts_on_in_a_run_of_an_older_version() -> None:
    """Its journal does not say how far the metrics were at a checkpoint."""
    for epochs in ((0, 1, 2), (3, 4)):
        with rankzero.track("mine", name="r1", offline=True) as run:
            assert (run.latest() or {"epoch": -1})["epoch"] == epochs[0] - 1
            for epoch in epochs:
                for _ in range(4):
                    run.log({"train/loss": 0.5})
                run.checkpoint({"epoch": epoch}, epoch)
        path = (run.folder or Path()) / "events.jsonl"
        events = [e for e in read_all(path) if not (isinstance(e, StepsLogged) and not e.metrics)]
        for one in events:
            if isinstance(one, RunStarted):
                cast("dict[str, str]", one.environment).pop("rankzero.keep", None)
        path.write_bytes(b"".join(map(encode_line, events)))
    steps = [step for one in of_kind(run.folder, StepsLogged) for step in one.steps]
    assert steps == sorted({*steps})


def _failed(folder: RunFolder) -> Any:
    return diagnosis.read_summary(folder)._replace(status="FAILED")


def test_checkpoint_comes_from_mlflow_if_the_disk_has_none() -> None:
    folder = RunFolder(trained().folder or Path())
    assert delivery_status.wait(folder).done
    shutil.rmtree(folder.checkpoints)
    with rankzero.track("mine", name="r1") as run:
        state = run.latest()
    assert state is not None and state["step"] == 2
    # Another machine, with the same MLflow.
    store = folder.identity.tracking_uri
    with rankzero.track("mine", name="r1", folder="elsewhere", tracking_uri=store) as run:
        state = run.latest()
        assert not run.evaluated({"val/loss": 0.6}, 3), "the best is the checkpoint's"
    assert state is not None and state["step"] == 2
    (told,) = of_kind(run.folder, Noticed)
    assert "step_00000002 is that of MLflow's run" in told.text
    with rankzero.track("mine", name="r1", folder="third", offline=True) as run:
        assert run.latest() is None


def test_mlflow_that_does_not_answer_is_an_error() -> None:
    with (
        pytest.raises(
            UserError, match=r"MLflow cannot be asked: .*offline=True starts without one"
        ),
        rankzero.track("mine", name="r1", tracking_uri="http://127.0.0.1:9") as run,
    ):
        run.latest()


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with rankzero.track("mine") as run, pytest.raises(UserError, match="init_process_group"):
        run.latest()


# It ends at once: while Python shuts down, gloo's threads abort one process in 25 (PyTorch 2.15).
RANK = """
import os, torch, rankzero
torch.distributed.init_process_group("gloo", init_method="file://" + __file__ + ".store",
    rank=int(os.environ["RANK"]), world_size=2)
run = rankzero.track("mine", name="r1", offline=OFFLINE)
for expected in (None, {"step": 2}):
    assert run.latest() == expected
    torch.distributed.all_reduce(torch.ones(()))  # a rank that were behind would get other bytes
    run.checkpoint({"step": 2}, 2)
run.finish()
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("offline", [True, False])
def test_every_rank_gets_the_state(tmp_path: Path, offline: bool) -> None:
    (tmp_path / "rank.py").write_text(RANK.replace("OFFLINE", str(offline)))
    ranks = [
        subprocess.Popen(
            [sys.executable, "rank.py"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
            | {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
