"""Going on from a checkpoint: every rank, bit for bit."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rankzero.errors import UserError
from rankzero.training import optimizers, rng, strategies
from rankzero.training.checkpoints import files, manifest
from rankzero.training.job import State, TrainingContext

ELSE = "to go on from the checkpoint before, delete this one"
NEEDED = ("batch_size", "samples", "scaler", "step", "best", "randoms")
"""What a checkpoint must hold besides the strategy's own: model and optimizer."""


def newest(
    checkpoints: Path,
    job: TrainingContext,
    state: State,
    notice: Callable[[str], None],
    *,
    required: bool = False,
) -> None:
    """Set `state` to rank 0's newest intact checkpoint; leave it fresh where there is none. All ranks call it.

    Raises UserError where there is none and one is `required`.
    Ranks that see the folder read it; where any rank does not, rank 0 sends the bytes.
    """
    path, problems = files.newest_intact(checkpoints)
    for problem in problems:
        notice(f"skipped a checkpoint: {problem}")
    name = job.world.broadcast((path.name if path else "").encode()).decode()
    if name:
        with _named(name):
            apply(_read(path, name, job), job, state)
    elif required:
        raise UserError(
            "there is no intact checkpoint where rank 0 runs: resume on the machine that has the run"
        )


def apply(saved: dict[str, Any], job: TrainingContext, state: State) -> None:
    """Set the model, optimizer, scaler, random states and position to `saved`. Raises UserError where they differ."""
    missing = [name for name in NEEDED if name not in saved]
    if missing:
        raise UserError(
            f"the checkpoint holds no {', '.join(missing)}: it is not of a training by `rankzero train`, or of another "
            "version's; start a new run instead"
        )
    for name, mine in (
        ("batch_size", job.batch_order.batch_size),
        ("samples", job.batch_order.samples),
    ):
        if saved[name] != mine:
            raise UserError(
                f"the checkpoint was trained with {name} {saved[name]}, now it is {mine}: the data order "
                "would change; start a new run instead"
            )
    options = optimizers.options(state.optimizer)
    layout = strategies.layout(job.experiment.train.strategy, job.world.size)
    try:
        job.strategy.load(saved)
        optimizers.change_options(state.optimizer, options, saved.get("options", state.options))
        optimizers.place_steps(state.optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"the checkpoint does not fit the experiment's model or optimizer any more: {error}"
        ) from error
    if job.precision.scaler is not None and saved["scaler"] is not None:
        job.precision.scaler.load_state_dict(saved["scaler"])
    state.step, state.best, state.evaluation_pending = (
        saved["step"],
        saved["best"],
        saved.get("owed", False),
    )
    if saved.get("layout", layout) == layout and len(saved["randoms"]) == job.world.size:
        rng.restore(saved["randoms"][job.world.ranks.rank], job.world.device)
    else:  # no saved stream is this rank's; ranks that share their samples have the same
        rng.seed_all(job.batch_order.seed, 1 + job.strategy.shard.rank, state.step)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Have what is wrong with a checkpoint told in words that name it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    except manifest.BrokenCheckpoint as error:
        raise UserError(f"{error}; {ELSE}") from error
    except pickle.UnpicklingError as error:  # nothing of it was run
        raise UserError(
            f"{name} holds more than tensors and plain values, and is refused; {ELSE}"
        ) from error


def _read(path: Path | None, name: str, job: TrainingContext) -> dict[str, Any]:
    world = job.world
    if world.all(path is not None and path.name == name):
        assert path is not None
        return files.load(path)
    content = world.broadcast(
        (path / manifest.STATE).read_bytes() if path and world.ranks.first else b""
    )
    saved: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return saved
