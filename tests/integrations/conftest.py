"""Settings of the tests of tracked runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MLFLOW_TRACKING_URI", "RANKZERO_DIR"):
        monkeypatch.delenv(name, raising=False)
