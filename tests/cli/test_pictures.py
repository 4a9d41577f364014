"""Pictures and data sets of real runs, as MLflow has them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from PIL import Image

from rankzero.events import DataDescribed, PicturesTaken
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import RunFolder
from support.commands import Command, events
from support.paths import EXPERIMENTS, FIXTURES

DIGITS = EXPERIMENTS / "digits.py"
PICTURED = FIXTURES / "pictured.py"
FEW = ("train.epochs=2", "train.mlflow.log_model=false", "train.checkpoints.save_every=0")


def artifacts(rankzero: Command, run: RunFolder) -> Path:
    record = MlflowRuns(f"sqlite:///{rankzero.folder / 'mlruns' / 'mlflow.db'}").find_run(
        run.path.name
    )
    (found,) = (rankzero.folder / "mlruns" / "artifacts").glob(f"*/{record.run_id}/artifacts")
    return found


def inputs(rankzero: Command) -> dict[str, dict[str, tuple[str, str, int]]]:
    """Return MLflow's data sets, by run and context: name, digest, rows."""
    found: dict[str, dict[str, tuple[str, str, int]]] = {}
    query = """select r.name, t.value, d.name, d.digest, d.dataset_profile from inputs i
        join datasets d on d.dataset_uuid = i.source_id join runs r on r.run_uuid = i.destination_id
        join input_tags t on t.input_uuid = i.input_uuid and t.name = 'mlflow.data.context'"""
    with sqlite3.connect(rankzero.folder / "mlruns" / "mlflow.db") as database:
        for run, context, name, digest, profile in database.execute(query):
            found.setdefault(run, {})[context] = (name, digest, json.loads(profile)["num_rows"])
    return found


@pytest.mark.slow
def test_mistakes_of_two_ranks_are_in_mlflow(rankzero: Command) -> None:
    rankzero.succeed("train", DIGITS, "--nproc", 2, *FEW)
    rankzero("sync")
    (run,) = rankzero.runs
    folder = artifacts(rankzero, run)
    steps = [event.step for event in events(run) if isinstance(event, PicturesTaken)]
    assert steps == [22, 44] and not list(run.pictures.iterdir())
    keyed = sorted(tuple(path.name.split("+")[:3]) for path in (folder / "images").glob("*.png"))
    both = ("pictures~confusion_matrix", "pictures~hardest_mistakes")
    wanted = [(key, "step", str(step)) for key in both for step in steps]
    assert keyed == [*wanted, ("pictures~training_batch", "step", "22")]
    assert len(list((folder / "images").glob("*+compressed.webp"))) == len(keyed)
    ours = [
        f"pictures/{name}.png"
        for name in ("confusion_matrix", "hardest_mistakes", "training_batch")
    ]
    for name in ours:
        with Image.open(folder / name) as image:
            assert min(image.size) > 200


@pytest.mark.slow
def test_runs_on_the_same_data_are_found_by_its_digest(rankzero: Command) -> None:
    for name, settings in (
        ("one", ()),
        ("two", ("lr=1e-4", "train.seed=7")),
        ("other", ("samples=46",)),
    ):
        words = ("--run-name", name, "--offline", *settings)
        rankzero.succeed("train", f"{PICTURED}:Showing", *words)
    rankzero("sync")
    found = inputs(rankzero)
    assert found["one"] == found["two"] and found["one"]["training"] == found["other"]["training"]
    assert found["one"]["validation"] != found["other"]["validation"]
    name, digest, samples = found["one"]["training"]
    assert name == "Squares" and samples == 64
    described = [event for event in events(rankzero.runs[0]) if isinstance(event, DataDescribed)]
    assert [event.context for event in described] == ["training", "validation"] and described[
        0
    ].digest == digest
    code, output = rankzero("runs", f"data={digest}", "--json")
    assert code == 0 and {one["name"] for one in json.loads(output)} == {"one", "two", "other"}
    record = MlflowRuns(f"sqlite:///{rankzero.folder / 'mlruns' / 'mlflow.db'}").find_run("one")
    assert f"Squares, 64 samples, digest {digest}" in record.tags["mlflow.note.content"]
    assert {
        path.name for path in (artifacts(rankzero, rankzero.runs[0]) / "pictures").iterdir()
    } >= {
        "input.png",
        "grey ramp~x.png",
        "confusion_matrix.png",
    }


def test_resume_deletes_unfinished_pictures_of_a_killed_attempt(rankzero: Command) -> None:
    words = ("--run-name", "run", "train.steps=6", "train.checkpoints.save_every=3", "--offline")
    rankzero.succeed("train", f"{PICTURED}:Showing", *words)
    (run,) = rankzero.runs
    left = [
        run.pictures / "step_00000006_1800000000000.npz",
        run.pictures / ".step_00000009_1800000000000.npz.4711",
    ]
    for path in left:
        path.write_bytes(b"half of it")
    rankzero.succeed("resume", "run", "train.steps=12", "--offline")
    rankzero("sync")
    assert not list(run.pictures.iterdir())
    assert [event.step for event in events(run) if isinstance(event, PicturesTaken)] == [
        3,
        6,
        9,
        12,
    ]


@pytest.mark.parametrize(
    ("strategy", "shown"),
    [("fsdp", {"input", "confusion_matrix", "training_batch"}), ("pp", {"training_batch"})],
)
def test_sharded_model_has_the_pictures_that_rank_0_can_make(
    rankzero: Command, strategy: str, shown: set[str]
) -> None:
    words = (f"train.strategy={strategy}", "train.checkpoints.save_every=0", "--offline")
    code, output = rankzero("train", f"{PICTURED}:Showing", "--nproc", 2, *words)
    assert code == 0 and output.count("note:") == output.count("note: offline") == 1, output
    rankzero("sync")
    (run,) = rankzero.runs
    names = {path.stem for path in (artifacts(rankzero, run) / "pictures").iterdir()}
    assert shown <= names and (strategy == "fsdp" or names == shown)


def test_pictures_can_be_switched_off(rankzero: Command) -> None:
    words = ("train.mlflow.log_pictures=false", "own=raises", "--offline")
    code, output = rankzero("train", f"{PICTURED}:Showing", *words)
    assert code == 0 and "pictures" not in output.partition("look:")[2], output
    (run,) = rankzero.runs
    assert not run.pictures.exists() and not any(
        isinstance(event, PicturesTaken) for event in events(run)
    )
