"""`rankzero compare` and `rankzero profile`, for real: two processes, MLflow."""

from __future__ import annotations

import gzip
import json
import signal

import pytest

from rankzero.run_store.folder import RunFolder
from support.commands import TINY, Command, last_end
from support.stores import mlflow_runs

LAYERED = TINY.with_name("layered.py")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_same_work_under_several_strategies(rankzero: Command) -> None:
    output = rankzero.succeed(
        *("compare", LAYERED, "--strategies", "single,dp,ddp,fsdp,pp", "--nproc", "1,2"),
        "train.steps=60",
    )
    runs = mlflow_runs(rankzero.folder)
    (parent,) = (run for run in runs.values() if "mlflow.parentRunId" not in run.tags)
    children = {
        name.removeprefix(parent.name + "-"): run for name, run in runs.items() if run is not parent
    }
    assert {name: run.status for name, run in children.items()} == {
        "single-1": "FINISHED",
        "dp-2": "FAILED",
        "ddp-2": "FINISHED",
        "fsdp-2": "FINISHED",
        "pp-2": "FINISHED",
    }
    assert all(run.tags["mlflow.parentRunId"] == parent.run_id for run in children.values())
    assert (
        children["fsdp-2"].params["train.strategy"] == "fsdp"
        and children["fsdp-2"].params["world_size"] == "2"
    )
    artifacts = rankzero.folder / "mlruns/runs" / parent.name / "artifacts"
    table = json.loads((artifacts / "compare.json").read_text())
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert rows["single"]["speed-up"] == "1.00x" and rows["ddp"]["speed-up"].endswith("x")
    assert (
        rows["dp"]["time"] == "not run"
        and "not run: dp-2: train.strategy=dp divides a batch among GPUs" in output
    )
    assert all(rows[name]["limited by"] for name in ("single", "ddp", "fsdp", "pp"))
    assert (artifacts / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "Fastest" in output or "Nothing is faster" in output


def test_a_profile_reports_the_parts_of_a_step(rankzero: Command) -> None:
    output = rankzero.succeed(
        "profile", LAYERED, "--nproc", 2, "train.drop_last=false", "train.batch_size=24"
    )
    assert "A step takes" in output and "The limit is" in output and "aten::" in output
    run = next(iter(mlflow_runs(rankzero.folder).values()))
    assert run.status == "FINISHED" and "The limit is" in run.tags["mlflow.note.content"]
    folder = rankzero.folder / "mlruns/runs" / run.name / "artifacts/profile"
    for rank in range(2):
        trace = json.loads(gzip.decompress((folder / f"trace_rank_{rank}.json.gz").read_bytes()))
        assert any("aten::" in str(event.get("name")) for event in trace["traceEvents"])
    found = json.loads((folder / "profile.json").read_text())
    assert found["batch_size"] == 100 / 5, "four batches of 24, and one of 4"
    assert (
        sum(found["breakdown"].values()) == pytest.approx(1)
        and found["breakdown"]["communication"] > 0
    )
    assert all(
        found["breakdown"][part] > 0 for part in ("forward", "backward", "optimizer", "other")
    )
    assert (folder.parent / "step_time.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_comparison_is_no_failure_and_mlflow_has_its_end(rankzero: Command) -> None:
    process = rankzero.start(
        *("compare", TINY, "--strategies", "single", "--nproc", 1, "--name", "c"),
        *("step_seconds=0.02", "train.epochs=1000"),
    )
    rankzero.wait_for_step(5, "c-single-1")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "interrupted" in output, output
    ended = last_end(RunFolder(rankzero.folder / "mlruns/runs/c"))
    assert (ended.status, ended.reason) == ("KILLED", "stopped by SIGTERM")
    found = {name: run.status for name, run in mlflow_runs(rankzero.folder).items()}
    assert found == {"c": "KILLED", "c-single-1": "KILLED"}


def test_each_mistake_gets_one_message(rankzero: Command) -> None:
    for words, message in (
        (("compare", "--strategies", "ddq"), "no strategy is called 'ddq'"),
        (("compare", "--nproc", "two"), "--nproc takes whole numbers"),
        (("profile", "--nproc", 0), "--nproc must be at least 1"),
    ):
        code, output = rankzero(words[0], LAYERED, *words[1:])
        assert code in (1, 2) and message in output and "Traceback" not in output, output
