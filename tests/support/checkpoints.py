"""Checkpoints of a few steps, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from rankzero.events import Event
from rankzero.experiment import Goal
from rankzero.training.checkpoints.writer import Checkpoints

GOAL = Goal("val/loss", "min")


def save_steps(folder: Path, losses: dict[int, float | None], keep: int = 1) -> list[Event]:
    """Save a checkpoint for each step, with its loss, and return all events."""
    checkpoints = Checkpoints(folder, keep, GOAL)
    events: list[Event] = []
    for step, loss in losses.items():
        metrics = {} if loss is None else {"val/loss": loss}
        state = {"weights": torch.full((3,), float(step))}
        events += checkpoints.save(state, step, metrics, best=False)
    return [*events, *checkpoints.close()]


def steps_in(folder: Path) -> list[int]:
    """Return the steps of a run's checkpoints. Fails for any other file."""
    paths = sorted((folder / "checkpoints").iterdir())
    return [int(path.name.removeprefix("step_")) for path in paths]


def damage_checkpoint(folder: Path, how: str) -> None:
    """Damage a checkpoint: truncate, flip, no state, no manifest or torn manifest."""
    state, manifest = folder / "state.pt", folder / "manifest.json"
    content = state.read_bytes()
    match how:
        case "truncate":
            state.write_bytes(content[: len(content) // 2])
        case "flip":
            state.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        case "no state":
            state.unlink()
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_text(manifest.read_text()[:20])
