"""Continue a training from a checkpoint: every rank, bit for bit. Loading never executes code."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rankzero.errors import UserError
from rankzero.run_store import checkpoint_files
from rankzero.run_store.checkpoint_files import BrokenCheckpoint, RefusedCheckpoint
from rankzero.training import rng, strategies
from rankzero.training.checkpoints.host_copy import with_paths
from rankzero.training.data.stream import StreamLoader
from rankzero.training.distributed.world import World
from rankzero.training.job import State, TrainingContext
from rankzero.training.optimization import optimizers
from rankzero.training.optimization.averaged_weights import AveragedWeights

_REQUIRED = ("batch_size", "samples", "scaler", "step", "best", "randoms")
"""Keys that a checkpoint must have, apart from the strategy's own (model and optimizer)."""


def load(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state, on the CPU, after verifying its checksums.

    Raises BrokenCheckpoint, also if the state holds anything but tensors and plain values.
    """
    checkpoint_files.check_files(folder)
    # Computing the checksums takes as long as loading, and does not hold Python's lock.
    with ThreadPoolExecutor(1) as pool:
        problem = pool.submit(checkpoint_files.problem_with, folder)
        try:
            found = _load_tensors(folder / checkpoint_files.STATE, str(folder))
        except Exception:
            # It counts before any error of the loading: a damaged file fails in many ways.
            if text := problem.result():
                raise BrokenCheckpoint(text) from None
            raise
    if text := problem.result():
        # The error keeps this frame, and must not keep the state.
        found.clear()
        raise BrokenCheckpoint(text)
    return found


def newest(
    checkpoints: Path,
    job: TrainingContext,
    state: State,
    notice: Callable[[str], None],
    *,
    required: bool = False,
) -> None:
    """Set `state` to rank 0's newest intact checkpoint, and leave it unchanged if there is none.

    A collective. Raises UserError if the checkpoint does not fit, or if there is none and one is
    `required`.
    """
    found = read_newest(checkpoints, job.world, notice)
    if found is None:
        if required:
            raise UserError(
                "there is no intact checkpoint where rank 0 runs: resume on the machine that has "
                "the run"
            )
        return
    name, saved = found
    try:
        for text in _continue_from(saved, name, job, state):
            notice(text)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def read_newest(
    checkpoints: Path, world: World, notice: Callable[[str], None]
) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the state of rank 0's newest intact checkpoint, or None without one.

    A collective, only before a training attempt. Raises UserError, on every rank, if rank 0 cannot
    read the folder, or if the state is refused.
    """
    found: dict[str, Any] = {}
    if world.ranks.first:
        try:
            paths = checkpoint_files.newest_first(checkpoints)
            found = {"names": [path.name for path in paths]}
        except OSError as error:  # the others wait
            found = {"error": f"the checkpoints cannot be read: {error}"}
    found = world.share(found)
    if "error" in found:
        raise UserError(found["error"])
    for name in found["names"]:
        try:
            return name, read(checkpoints / name, world)
        except RefusedCheckpoint as error:
            text = f"{error}; to continue from the checkpoint before, delete this one"
            raise UserError(text) from error
        except BrokenCheckpoint as error:
            if world.ranks.first:
                notice(f"skipped a checkpoint: {error}")
    return None


def _continue_from(
    saved: dict[str, Any], name: str, job: TrainingContext, state: State
) -> Iterator[str]:
    """Set `state` to a checkpoint. Yield what it lacks or loses. A collective."""
    if job.experiment.train.schedule != "plateau" and saved.pop("lr_reductions", ()):
        yield f"{name}: without train.schedule=plateau, the learning rate is not reduced"
    goal = job.experiment.goal
    # Older checkpoints have no "goal".
    if saved.get("goal", [goal.metric, goal.mode]) != [goal.metric, goal.mode]:
        saved |= {"best": None, "evaluations_since_best": 0}
        yield f"{name} has another goal: no evaluation before it is the best {goal.metric}"
    apply(saved, job, state)
    if isinstance(state.average, AveragedWeights) and "ema" not in saved:
        yield f"{name} has no averaged weights: the average of train.ema starts there"
    if state.average is None and "ema" in saved:
        yield f"the averaged weights of {name} are dropped, because train.ema is not set"
    lists = job.batch_order.lists_before(state.step)
    # Older checkpoints have no "fingerprint".
    if saved.get("fingerprint", lists) != lists:
        yield (
            "this resume is not exact: batches() returned other lists than before for the same "
            "epoch: a setting that it reads has changed, or it must depend only on its arguments "
            "and draw from the generator"
        )
    if isinstance(job.train_loader, StreamLoader):
        had, has = saved["samples"], job.batch_order.samples
        if had != has:
            yield (
                f"an epoch of the stream had {had} samples, now it has {has}: train.epochs, the "
                "schedule, evaluations and at.epoch count by it; with divided = True, __len__ "
                "counts the samples of one rank"
            )
        streams, same_layout = saved.get("streams", []), saved.get("layout") == _layout(job)
        rank = job.world.ranks.rank
        inexact = job.train_loader.resume(streams, rank, same_layout=same_layout)
        if inexact:
            yield inexact


def apply(saved: dict[str, Any], job: TrainingContext, state: State) -> None:
    """Set the model, optimizer, scaler, random states and position. A collective.

    Raises UserError if `saved` does not fit the experiment.
    """
    missing = [name for name in _REQUIRED if name not in saved]
    if missing:
        raise UserError(
            f"the checkpoint holds no {', '.join(missing)}: it was not written by `rankzero "
            "train`, or by another version; start a new run instead"
        )
    # The length of a stream decides no order. If it divides itself, the ranks may round theirs up.
    is_stream = isinstance(job.train_loader, StreamLoader)
    for name, mine, text in (
        ("batch_size", job.batch_order.batch_size, "batch_size"),
        ("samples", saved["samples"] if is_stream else job.batch_order.samples, "samples"),
        ("lists", job.batch_order.list_count, "lists of batches() in an epoch:"),
        ("rest", job.batch_order.rest, "samples in a smaller last batch (train.drop_last):"),
    ):
        # Older checkpoints have neither "lists" nor "rest".
        if saved.get(name, 0) != mine:
            raise UserError(
                f"the checkpoint was trained with {text} {saved.get(name, 0)}, now it is {mine}: "
                "the data order would change; start a new run instead"
            )
    options = optimizers.options(state.optimizer)
    try:
        if state.average is not None and "ema" in saved:
            state.average.load(saved["ema"], saved.get("ema_rests", ()))
        job.strategy.load(saved)
        if state.average is not None and "ema" not in saved:
            state.average.restart()
        # Loading restores the options of before. Those that the user has changed since then win.
        optimizers.change_options(state.optimizer, options, saved.get("options", state.options))
        optimizers.place_states(state.optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"the checkpoint does not fit the experiment's model or optimizer: {error}"
        ) from error
    if job.precision.scaler is not None and saved["scaler"] is not None:
        job.precision.scaler.load_state_dict(saved["scaler"])
    state.step, state.best = saved["step"], saved["best"]
    state.evaluation_pending = saved.get("owed", False)
    state.evaluations_since_best = saved.get("evaluations_since_best", 0)
    for factor in saved.get("lr_reductions", ()):
        state.reduce_lr(factor)
    _set_random_states(saved, job, state)


def _set_random_states(saved: dict[str, Any], job: TrainingContext, state: State) -> None:
    layout = _layout(job)
    if saved.get("layout", layout) == layout and len(saved["randoms"]) == job.world.size:
        rng.restore(saved["randoms"][job.world.ranks.rank], job.world.device)
        # Older checkpoints have no "replica_randoms".
        replicas = saved.get("replica_randoms", ())
        rng.restore_replicas(replicas, job.experiment.train.strategy)
    else:
        # No saved random stream belongs to this rank. Ranks of one shard must draw the same.
        rng.seed_all(job.batch_order.seed, 1 + job.strategy.shard.rank, state.step)


def _layout(job: TrainingContext) -> str:
    return strategies.layout(job.experiment.train.strategy, job.world.size)


def read(path: Path, world: World) -> dict[str, Any]:
    """Return the state of rank 0's checkpoint, as `load` does. Collective.

    Each rank that has the same one at `path` reads that. If a rank has none, or a damaged copy,
    rank 0 sends the bytes. Raises BrokenCheckpoint, on every rank, if rank 0's is not usable.
    """
    state, error = None, None
    seen = _manifest_digest(path)
    if world.all(seen == world.share(seen)):
        try:
            state = load(path)
        except BrokenCheckpoint as raised:
            error = raised
        if world.all(state is not None):
            assert state is not None
            return state
    elif world.ranks.first and (text := checkpoint_files.problem_with(path)):
        error = BrokenCheckpoint(text)
    state = None
    problem = world.share(error and [str(error), isinstance(error, RefusedCheckpoint)])
    if problem is not None:
        text, is_refused = problem
        raise (RefusedCheckpoint if is_refused else BrokenCheckpoint)(text) from error
    content = (path / checkpoint_files.STATE).read_bytes() if world.ranks.first else b""
    return _load_tensors(io.BytesIO(world.broadcast(content)), path.name)


def _manifest_digest(checkpoint: Path) -> str | None:
    """Return what is equal for equal checkpoints, or None without a manifest here."""
    try:
        content = (checkpoint / checkpoint_files.MANIFEST).read_bytes()
    except OSError:
        return None
    return hashlib.sha256(content).hexdigest()


def _load_tensors(source: Path | io.BytesIO, name: str) -> dict[str, Any]:
    try:
        # weights_only makes torch refuse, and not execute, any other pickled object.
        state = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RefusedCheckpoint(
            f"{name} holds more than tensors and plain values, and is refused"
        ) from error
    found: dict[str, Any] = with_paths(state)
    return found
