"""A scenario's folder without a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from torture.ground import Ground


@pytest.fixture
def place(tmp_path: Path, new_store: Path) -> Ground:
    """A scenario's folder in which no command has run yet."""
    return Ground(tmp_path / "ground", 1, new_store)
