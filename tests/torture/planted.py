"""Runs with planted violations, and the check that a promise reports them."""

from __future__ import annotations

from typing import Any

import pytest

from rankzero.events import Event
from rankzero.run_store.folder import RunFolder
from support.runs import append, make_folder
from torture.ground import Broken, Ground

STEPS = 4
REFERENCE = {
    "train/loss": {step: 1.0 / step for step in range(1, STEPS + 1)},
    "val/accuracy": {4: 0.5},
}
REFERENCE["val/loss"] = {4: 0.5}


def expect_broken(begin: str, check: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(Broken, match=f"^{begin}"):
        check(*arguments, **options)


def run_of(place: Ground, *events: Event) -> RunFolder:
    run = make_folder(place.folder / "mlruns", place.store)
    append(run, *events)
    return run
