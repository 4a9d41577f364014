"""What a program logs besides numbers: params, tags, files, figures, images, in MLflow's words."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from matplotlib.figure import Figure
from mlflow import MlflowClient
from PIL import Image
from torch.distributed import checkpoint

import rankzero
from rankzero.events import ArtifactLogged, Noticed, PicturesTaken, TagsSet
from rankzero.integrations.own_loop import logged_files
from rankzero.integrations.own_loop.tracked_run import TrackedRun
from rankzero.mlflow_store import limits
from rankzero.run_store import delivery_state
from rankzero.run_store.folder import RunFolder
from rankzero.tracking import sync
from support.memory_store import MemoryStore, delivered
from support.runs import of_kind


@pytest.fixture
def run() -> TrackedRun:
    return rankzero.track("mine", {"lr": 0.1}, offline=True)


def folder_of(run: TrackedRun) -> RunFolder:
    assert run.folder is not None
    return RunFolder(run.folder)


def delivery_of(run: TrackedRun) -> MemoryStore:
    """Return a store that has what the run has logged so far."""
    delivered(folder_of(run), store := MemoryStore())
    return store


def test_everything_is_delivered_as_it_was_before_the_run_ends(run: TrackedRun) -> None:
    """As after a crash of the program: MLflow gets what the journal has, without an end."""
    Path("data/deep").mkdir(parents=True)
    for name in ("data/a.txt", "data/deep/b.txt", "c.txt"):
        Path(name).write_text("as it was")
    figure = Figure()
    figure.subplots().plot([1, 2])
    run.log_params({"lr": 0.2, "late": {"n": 1}})
    run.set_tags({"team": "vision", "n": 3})
    run.log_artifact("data")
    run.log_artifact("c.txt", "below/here")
    run.log_text("hello", "notes/hello.txt")
    run.log_text("long", "n" * 250)
    run.log_dict({"a": [1, 2]}, "values.json")
    run.log_dict({"a": {"b": 1}}, "values.yaml")
    run.log_figure(figure, "figures/curve.svg")
    run.log_image(np.zeros((4, 4, 3), np.uint8), "black.png")
    run.log_image(torch.rand(3, 8, 8), key="val/sample", step=np.int64(5))  # type: ignore[arg-type]
    for path in (*Path("data").rglob("*.txt"), Path("c.txt")):
        path.write_text("changed later")
    store = MemoryStore()
    deliverer = delivered(folder_of(run), store)
    assert not deliverer.state.problems.rejected
    assert store.params["lr"] == "0.1" and store.params["late.n"] == "1"
    assert store.tags["team"] == "vision" and store.tags["n"] == "3"
    texts = {
        name: text for name, text in store.artifacts.items() if not name.startswith("provenance")
    }
    assert texts.keys() == {
        *("data/a.txt", "data/deep/b.txt", "below/here/c.txt", "notes/hello.txt"),
        *("values.json", "values.yaml", "figures/curve.svg", "black.png", "n" * 250),
    }
    for name in ("data/a.txt", "data/deep/b.txt", "below/here/c.txt"):
        assert texts[name] == "as it was"
    assert texts["notes/hello.txt"] == "hello" and texts["values.yaml"] == "a:\n  b: 1\n"
    assert "<svg" in texts["figures/curve.svg"] and "PNG" in texts["black.png"]
    assert [(key, step) for key, step, _ in store.pictures] == [("val/sample", 5)]


def test_numbers_in_a_dict_stay_numbers(run: TrackedRun) -> None:
    many, half = np.arange(2000), torch.full((2,), 0.5, dtype=torch.bfloat16)
    odd = {"many": many, "acc": np.float32(0.5), "half": half, "type": np.float32, "path": Path()}
    run.log_dict(odd, "result.json")
    found = json.loads((folder_of(run).artifacts / "result.json").read_text())
    assert (found["many"], found["acc"], found["half"]) == ([*range(2000)], 0.5, [0.5, 0.5])
    assert (found["type"], found["path"]) == ("<class 'numpy.float32'>", ".")


class Textless:
    def __str__(self) -> str:
        raise RuntimeError("gone")


def test_bad_entry_costs_only_itself(run: TrackedRun, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run.set_tags({"team": "a", "owner": "me", "rankzero.x": "b", "bad": Textless()})
        run.set_tags({"rankzero.x": "b"})
        run.log_params({"ok": 1, "bad": Textless(), "deep": {"bad": Textless()}})
    child = run.child("fold", {"fold": 1, "bad": Textless()})
    store, below = delivery_of(run), delivery_of(child)
    assert (store.tags["team"], store.tags["owner"], store.params["ok"]) == ("a", "me", "1")
    assert below.params["fold"] == "1" and "bad" not in below.params
    assert not {"bad", "rankzero.x"} & (store.tags.keys() | store.params.keys())
    printed = capsys.readouterr().out
    assert printed.count("a tag is not logged: rankzero.x is RankZero's own") == 1
    for name in ("tag bad", "param bad", "param deep.bad"):
        assert printed.count(f"the {name} is not logged: RuntimeError: gone") == 1


def test_tags_whose_names_differ_only_in_odd_characters_all_reach_mlflow(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        run.set_tags({"t:u": 1, "t(u": 2, "t_u": 3})
        run.set_tag("t)u", 4)
    store = delivery_of(run)
    assert store.tags["t_u"] == "3"
    tags = {name: text for name, text in store.tags.items() if name.startswith("t_u")}
    assert sorted(tags.values()) == ["1", "2", "3", "4"]
    assert capsys.readouterr().out.count("in MLflow, which has another tag t_u") == 3


def test_threads_that_set_their_first_tags_keep_different_names(run: TrackedRun) -> None:
    tags = [f"t{character}u" for character in "(){}[]!?"]
    with ThreadPoolExecutor(len(tags)) as pool:
        list(pool.map(run.set_tag, tags, tags))
    store = delivery_of(run)
    assert set(tags) <= set(store.tags.values())


def test_params_whose_names_differ_only_in_odd_characters_all_reach_mlflow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):  # each as in a process of its own
        run = rankzero.track("mine", {"p:u": 1}, name="params", offline=True)
        run.log_params({"p(u": 2})
        run.log_params({"p_u": 3, "p)u": 4})
        run.log_param("p(u", 2)
        run.finish()
    store = delivery_of(run)
    params = {limits.name(key): text for key, text in store.params.items() if key[0] == "p"}
    assert params["p_u"] == "1" and sorted(params.values()) == ["1", "2", "3", "4"]
    assert capsys.readouterr().out.count("in MLflow, which has another param p_u") == 6


@pytest.mark.parametrize("tag", ["rankzero.uuid", "mlflow.loggedArtifacts"])
@pytest.mark.parametrize("before", ["", "/", "//", "./"])
def test_own_tags_are_refused_however_they_are_written(
    run: TrackedRun, capsys: pytest.CaptureFixture[str], before: str, tag: str
) -> None:
    run.set_tag(before + tag, "mine")
    store = delivery_of(run)
    assert "mine" not in store.tags.values()
    assert f"a tag is not logged: {before}{tag} is RankZero's own" in capsys.readouterr().out


def test_another_process_keeps_the_names_of_tags_and_the_tables(tmp_path: Path) -> None:
    for tag in ("t_u", "t(u"):  # each as in a process of its own
        run = rankzero.track("mine", name="again", offline=True)
        run.set_tag(tag, tag)
        run.log_table([[1]], f"{len(tag)}-{tag == 't_u'}.json")
        # As an earlier version let programs do.
        run._log(TagsSet(0.0, {"mlflow.loggedArtifacts": "no list"}))
        run.finish()
    store = delivery_of(run)
    assert store.tags["t_u"] == "t_u" and "t(u" in store.tags.values()
    assert {"3-True.json", "3-False.json"} <= store.artifacts.keys()


def test_what_a_folder_contains_is_copied_without_the_runs_beside_it(run: TrackedRun) -> None:
    Path("deep").mkdir()
    for name in ("deep/b.txt", "c.txt"):
        Path(name).write_text(name)
    run.log_artifacts(".", "all")
    run.log_artifacts("nowhere")
    store = delivery_of(run)
    logged = {name for name in store.artifacts if not name.startswith("provenance")}
    assert logged == {"all/c.txt", "all/deep/b.txt"}
    (note,) = of_kind(run.folder, Noticed)
    assert "nowhere is not logged" in note.text


def test_table_takes_what_can_be_listed(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log_table({}, "none.json")
    run.log_table({"a": range(2)}, "range.json")
    run.log_table({"a": {"x": 1}.values()}, "values.json")
    run.log_table(([row] for row in (1, 2)), "rows.json", columns=["a"])
    run.log_table({1: [3], "1": [4]}, "keys.json")  # type: ignore[dict-item]
    expected = {
        "none": ([], []),
        "range": (["a"], [[0], [1]]),
        "values": (["a"], [[1]]),
        "rows": (["a"], [[1], [2]]),
        "keys": (["1"], [[4]]),
    }
    for name, (columns, data) in expected.items():
        found = json.loads((folder_of(run).artifacts / f"{name}.json").read_text())
        assert found == {"columns": columns, "data": data}, name
    assert capsys.readouterr().out.count("several keys are the column 1: the last counts") == 1


def test_table_grows_by_rows_of_any_kind(run: TrackedRun) -> None:
    run.log_table({"step": [1, 2], "loss": np.array([0.5, np.nan])}, "deep/losses.json")
    run.log_table([{"step": 3, "loss": torch.tensor(0.25)}], "deep/losses.json")
    run.log_table([(4, 1 / 3)], "deep/losses.json", columns=["step", "loss"])
    run.log_table(pandas.DataFrame({"step": [5], "more": ["007"]}), "deep//losses.json")
    run.log_table({"only": "one row"}, "row.json")
    run.log_table({"id": [2**53 + 1]}, "ids.json")
    run.log_table([{"id": 2**53 + 3}, {"new": 1}], "ids.json")
    store = delivery_of(run)
    assert json.loads(store.artifacts["deep/losses.json"]) == {
        "columns": ["step", "loss", "more"],
        "data": [
            [1, 0.5, None],
            [2, None, None],
            [3, 0.25, None],
            [4, 0.333333333333333, None],
            [5, None, "007"],
        ],
    }
    assert json.loads(store.artifacts["row.json"])["data"] == [["one row"]]
    assert json.loads(store.artifacts["ids.json"])["data"] == [
        [2**53 + 1, None],
        [2**53 + 3, None],
        [None, 1],
    ]
    assert [entry["path"] for entry in json.loads(store.tags["mlflow.loggedArtifacts"])] == [
        "deep/losses.json",
        "row.json",
        "ids.json",
    ]


def test_mlflow_reads_a_table_as_its_own(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.log_table({"name": ["cat", "dog"], "score": torch.tensor([0.5, 1.0])}, "scores.json")
    run.finish()
    folder = folder_of(run)
    assert sync.deliver(folder).complete
    client = MlflowClient(folder.identity.tracking_uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", folder.identity.tracking_uri)
    (found,) = client.search_runs(["1"])
    table = client.load_table("1", "scores.json", [found.info.run_id])
    assert table.to_dict("list") == {"name": ["cat", "dog"], "score": [0.5, 1.0]}


def test_table_that_cannot_be_one_costs_only_itself(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log_text("no table", "taken.json")
    for data, name, reason in (
        ({"a": [1], "b": [1, 2]}, "lengths.json", "same length"),
        (3, "three.json", "columns, rows or a DataFrame, not 3"),
        ([[1]], "table.csv", "the name of a table ends with .json"),
        ([[1]], "taken.json", "a file that is no table has this name"),
    ):
        run.log_table(data, name)
        assert reason in capsys.readouterr().out
    for number in range(200):
        run.log_table([[number]], f"{number:030}.json")
    assert capsys.readouterr().out.count("tables of this run, others as files") == 1
    store = delivery_of(run)
    listed = json.loads(store.tags["mlflow.loggedArtifacts"])
    assert 50 < len(listed) < 200 and f"{199:030}.json" in store.artifacts
    assert store.artifacts["taken.json"] == "no table"


class Undrawable:
    def savefig(self, path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("no font")


def test_bad_input_is_noted_and_costs_nothing_else(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    actions: list[tuple[Any, tuple[Any, ...], str]] = [
        (run.log_params, (3,), "a param is not logged: a config must be"),
        (run.set_tags, ({"rankzero.uuid": "x"},), "rankzero.uuid is RankZero's own"),
        (run.set_tags, ({"mlflow.loggedArtifacts": "x"},), "loggedArtifacts is RankZero's own"),
        (run.log_artifact, ("absent.bin",), "absent.bin is not logged: FileNotFoundError"),
        (run.log_artifact, ("/dev/zero",), "/dev/zero is not a regular file"),
        (run.log_artifact, (None,), "None is not logged: TypeError"),
        (run.log_artifact, ("empty",), "empty is not logged: ValueError: it contains no file"),
        (run.log_table, ([[1]], None), "None is not logged: TypeError"),
        (run.log_text, ("x", "../out.txt"), "'../out.txt' cannot be the name"),
        (run.log_text, ("x", "/etc/out.txt"), "'/etc/out.txt' cannot be the name"),
        (run.log_text, ("x", ".hidden"), "'.hidden' cannot be the name"),
        (run.log_text, ("x", "provenance/diff.patch"), "'provenance/diff.patch' cannot"),
        (run.log_text, ("x", "\udcff.txt"), "not logged: UnicodeEncodeError"),
        (run.log_text, (3, "n.txt"), "n.txt is not logged: TypeError"),
        (run.log_figure, (Undrawable(), "f.png"), "f.png is not logged: RuntimeError: no font"),
        (run.log_figure, ("text", "g.png"), "str is no figure"),
        (
            run.log_figure,
            (Figure(), "g"),
            "g is not logged: ValueError: the name of a figure needs",
        ),
        (run.log_image, ("text", "i.png"), "str is no tensor, array, PIL image"),
        (run.log_image, (np.zeros(3),), "an image has the shape"),
        (run.log_text, ("x", "taken/below.txt"), "taken/below.txt is not logged: "),
    ]
    run.log_text("kept", "taken")
    Path("empty").mkdir()
    for act, arguments, note in actions:
        act(*arguments)
        assert note in capsys.readouterr().out, note
    # A hole: it has its size, and no bytes on the disk.
    with Path("big.bin").open("wb") as big:
        big.truncate(shutil.disk_usage(".").free + 10 * 2**30)
    run.log_artifact("big.bin")
    assert "bytes, and the disk of the runs has" in capsys.readouterr().out
    run.set_tags({"long": "x" * 10_000})
    run.log({"loss": 1.0}, 1)
    run.finish()
    store, folder = MemoryStore(), folder_of(run)
    problems = delivered(folder, store).state.problems
    assert store.status == "FINISHED" and store.curve("loss") == {1: 1.0}
    assert "tag 'long': 10,000 characters, of which MLflow keeps 8,000" in problems.remarks[0]
    assert {name.split("/")[0] for name in store.artifacts} == {"provenance", "taken"}
    assert store.artifacts["taken"] == "kept"
    assert not [path for path in folder.artifacts.rglob("*") if path.name.startswith(".")]


def test_file_that_cannot_be_copied_costs_no_other_of_its_folder(
    run: TrackedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".hydra/config.yaml", ".ignore", "a.txt", "gone.txt", "z.txt"):
        Path("out", name).parent.mkdir(parents=True, exist_ok=True)
        Path("out", name).write_text(name)
    Path("out/nowhere").symlink_to("nothing")
    Path("out/circle").symlink_to(".")
    Path("out/link.txt").symlink_to("a.txt")
    os.mkfifo("out/pipe")
    save = logged_files.write

    def write(folder: RunFolder, name: str, *rest: Any) -> ArtifactLogged:
        Path("gone.txt").unlink(missing_ok=True)
        return save(folder, name, *rest)

    monkeypatch.chdir("out")
    monkeypatch.setattr(logged_files, "write", write)
    run.log_artifact(".")
    assert "5 of 9 files" in capsys.readouterr().out
    copied = folder_of(run).artifacts / "out"
    found = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert found == {".hydra/config.yaml", "a.txt", "link.txt", "z.txt"}


def test_copy_that_takes_long_is_noted_once(
    run: TrackedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("whole.pt").write_bytes(bytes(100))
    seconds = itertools.count(step=20)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    for _ in range(2):
        run.log_artifact("whole.pt")
    monkeypatch.undo()
    assert capsys.readouterr().out.count("s to copy whole.pt") == 1


def test_image_that_changes_is_noted_once(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    integers = torch.arange(256).reshape(1, 16, 16)
    run.log_image(integers, "integers.png")
    run.log_image(np.zeros((3000, 2, 3), np.uint8), "large.png")
    assert "image" not in capsys.readouterr().out
    for _ in range(2):
        run.log_image(torch.linspace(-1.0, 1.0, 64).reshape(8, 8), "normal.png")
        run.log_image(np.zeros((3000, 2, 3), np.uint8), key="large")
        run.log_image(integers, "both.png", key="both", step=3)
        run.log_image(integers, "file.png", step=3)
    printed = capsys.readouterr().out
    for note in (
        "the image 'normal.png' has values from -1 to 1: the smallest is shown black",
        "of the image 'large', 1 in 2 rows and columns is kept",
        "file.png has no step",
    ):
        assert printed.count(note) == 1, note
    artifacts = folder_of(run).artifacts
    with Image.open(artifacts / "both.png") as both, Image.open(artifacts / "large.png") as large:
        assert np.array_equal(np.asarray(both), integers[0].numpy()) and large.height == 3000
    assert [event.step for event in of_kind(run.folder, PicturesTaken)] == [0, 3, 3, 3]


def test_images_of_different_keys_have_different_names(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["k:u", "k(u", "x" * 100 + "a", "x" * 100 + "b", "\ud800"]
    for _ in range(2):
        for key in keys:
            run.log_image(torch.zeros(2, 2), key=key, step=1)
    printed = capsys.readouterr().out
    store = delivery_of(run)
    drawn = {key for key, *_ in store.pictures}
    assert len(drawn) == len(keys), drawn
    assert printed.count("the image k(u is k_u-") == 1
    assert printed.count("are called xxxx") == 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_of_torch_distributed_is_logged_with_its_hidden_file(run: TrackedRun) -> None:
    weights = {"weight": torch.arange(3.0)}
    checkpoint.save(weights, checkpoint_id="sharded")
    run.log_artifact("sharded")
    run.finish()
    store, folder = MemoryStore(), folder_of(run)
    delivered(folder, store)
    assert {"sharded/.metadata", "sharded/__0_0.distcp"} <= set(store.artifacts)
    loaded = {"weight": torch.zeros(3)}
    checkpoint.load(loaded, checkpoint_id=folder.artifacts / "sharded")
    assert torch.equal(loaded["weight"], weights["weight"])


def test_empty_path_is_not_the_working_folder(
    run: TrackedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("secret.txt").write_text("x")
    run.log_artifact("")
    run.log_artifacts("", "below")
    assert not [*folder_of(run).artifacts.rglob("secret.txt")]
    assert capsys.readouterr().out.count("is not logged: ValueError: its path is empty") == 2


def test_folder_of_the_runs_is_not_copied_into_itself(run: TrackedRun) -> None:
    Path("train.py").write_text("x")
    run.log_artifact(".")
    copied = next(folder_of(run).artifacts.glob("test_*"))
    assert [path.name for path in copied.iterdir()] == ["train.py"]
    run.finish()
    beside = rankzero.track("mine", folder=".", offline=True)
    beside.log_artifact(".")
    copied = next(folder_of(beside).artifacts.glob("test_*"))
    assert (copied / "train.py").exists() and not (copied / "runs").exists()


def test_threads_that_write_one_name_do_not_mix_their_texts(run: TrackedRun) -> None:
    both, folder = threading.Barrier(2), folder_of(run)

    def log(text: str) -> None:
        def save(path: Path) -> None:
            path.write_text(text)
            both.wait(10)

        logged_files.write(folder, "a.txt", save)

    threads = [threading.Thread(target=log, args=(text,)) for text in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (folder.artifacts / "a.txt").read_text() in ("one", "other")
    assert not list(folder.artifacts.glob(".*"))


def test_url_is_that_of_the_servers_page(run: TrackedRun, tmp_path: Path) -> None:
    assert run.id is None and run.url is None, "offline"
    run.finish()
    online = rankzero.track("mine", name="r2", tracking_uri="http://me:secret@127.0.0.1:9")
    state = delivery_state.DeliveryState(run_id="abc", experiment_id="7")
    delivery_state.save(delivery_state.path_of(folder_of(online), 0), state)
    assert online.id == "abc"
    assert (online.url or "").endswith("127.0.0.1:9/#/experiments/7/runs/abc")
    assert "secret" not in (online.url or "")
