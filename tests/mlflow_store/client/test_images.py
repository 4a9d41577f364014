"""Pictures under the file names that MLflow's page needs."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from PIL import Image

from rankzero.mlflow_store.client import MlflowRuns
from rankzero.mlflow_store.client.images import write_images
from rankzero.permanent_errors import NeverAccepted


def test_unreadable_image_is_never_accepted(tmp_path: Path, sqlite: str) -> None:
    (tmp_path / "big.png").write_bytes(b"no picture")
    with pytest.raises(NeverAccepted, match="own: UnidentifiedImageError"):
        MlflowRuns(sqlite).log_pictures("run", {"own": tmp_path / "big.png"}, 7, 1234)


@pytest.mark.parametrize("key", ["漢" * 85, "a" * 250, "pictures/" + "ü" * 120])
def test_long_keys_become_valid_file_names(tmp_path: Path, key: str) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "one.png")
    for other in (key, f"{key}x"):
        write_images({other: tmp_path / "one.png"}, tmp_path, "r" * 32, 2**63 - 1, 10**15 - 1)
    names = [path.name for path in (tmp_path / "images").iterdir()]
    assert len(names) == 4 and max(len(name.encode()) for name in names) <= 255
    assert len(list((tmp_path / "pictures").iterdir())) == 2


def test_file_names_are_mlflows_and_repeatable(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000)).save(tmp_path / "one.png")
    (tmp_path / "ours").mkdir()
    for _ in range(2):
        write_images({"a/b": tmp_path / "one.png"}, tmp_path / "ours", "run", 7, 1234)
    tags = logged_by_mlflow(tmp_path / "one.png", tmp_path, "pictures/a/b", 7, 1234)
    theirs = sorted(path.name for path in (tmp_path / "theirs").rglob("*+step+*"))
    ours = sorted(path.name for path in (tmp_path / "ours" / "images").iterdir())
    assert len(theirs) == len(ours) == 2, "written again, they are the same files"
    for one, other in zip(ours, theirs, strict=True):
        assert one.split("+")[:5] == other.split("+")[:5] and len(one) == len(other)
        assert one.endswith("+compressed.webp") == other.endswith("+compressed.webp")
    assert tags["mlflow.loggedImages"] == "True"


def logged_by_mlflow(
    path: Path, folder: Path, key: str, step: int, milliseconds: int
) -> dict[str, str]:
    """Log an image with MLflow's own client, into ``theirs``; return the run's tags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations among MLflow's dependencies
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
        experiment = client.create_experiment("e", artifact_location=str(folder / "theirs"))
        run = client.create_run(experiment)
        with Image.open(path) as image:
            client.log_image(
                run.info.run_id, image, key=key, step=step, timestamp=milliseconds, synchronous=True
            )
        tags: dict[str, str] = client.get_run(run.info.run_id).data.tags
        return tags
