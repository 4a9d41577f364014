"""The final best model, logged to MLflow once, with a signature, so that `mlflow.pytorch.load_model` loads it."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from rankzero import config, experiment_file
from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.launch import signals
from rankzero.redaction.text import line_without_secrets, text_without_secrets
from rankzero.run_store.folder import RunFolder, write_atomically
from rankzero.tracking import delivery_status
from rankzero.training.checkpoints import files, manifest
from rankzero.training.data.loader import BatchLoader

NAME = "best_model"
MARK = "best_model.json"
LOOK_SECONDS, LEAVE_SECONDS = 0.1, 2.0
EXAMPLE_SAMPLES = 2  # more than one, so that the exporter does not take the batch for a constant


def in_new_process(
    folder: RunFolder,
    notice: Callable[[str], None],
    hurried: Callable[[], bool] = lambda: False,
    seconds: float = math.inf,
) -> None:
    """Log the run's best model from a process of its own; a failure is a notice, never the run's failure.

    Gives up as soon as somebody is `hurried`, and after so many `seconds`: its process is ended then.
    """
    context = multiprocessing.get_context("forkserver")
    problems = context.SimpleQueue()
    process = context.Process(target=_child, args=(str(folder.path), problems))
    until = time.monotonic() + seconds
    process.start()
    while (unfinished := process.is_alive()) and not hurried() and time.monotonic() < until:
        process.join(LOOK_SECONDS)
    _end(process)
    note(folder, late=unfinished)
    if unfinished:  # and may have left half a word: nothing is read of it
        why = "the command was told to stop" if hurried() else "it took too long"
        notice(
            f"the best model was not logged to MLflow: {why}; rankzero sync {folder.path.name} does it"
        )
    elif not problems.empty():
        notice(f"the best model was not logged to MLflow: {problems.get()}")
    elif process.exitcode:
        notice(
            f"the best model was not logged to MLflow: its process ended with {process.exitcode}"
        )


def note(folder: RunFolder, *, late: bool) -> None:
    """Leave word for `rankzero sync` that the best model is to be logged still, or take it away."""
    with contextlib.suppress(
        OSError
    ):  # a disk that is full or read-only: then sync is to be told the run's name
        if late:
            folder.late_model.touch()
        else:
            folder.late_model.unlink(missing_ok=True)


def _end(process: BaseProcess) -> None:
    """End a process, also one whose user's code does not hear SIGTERM."""
    process.terminate()
    process.join(LEAVE_SECONDS)
    process.kill()
    process.join(
        LEAVE_SECONDS
    )  # no longer: one that waits for a dead disk does not even hear SIGKILL


def best(folder: RunFolder) -> None:
    """Load the best checkpoint into a new model and log it to the run; again: nothing happens.

    A better one than was logged before takes its place.
    """
    from rankzero.mlflow_store.client import MlflowRuns, OpenRun
    from rankzero.training.checkpoints import mlflow_model

    identity, delivery = folder.identity, delivery_status.status(folder)
    experiment = experiment_of(folder)
    path = _best_checkpoint(folder, experiment)
    if delivery.run_id is None or delivery.experiment_id is None:
        raise RuntimeError("the run has not reached MLflow; rankzero sync does it")
    step, before = manifest.read(path).step, _logged(folder)
    if before is not None and before["step"] == step:
        return
    model = _loaded(experiment, path)
    tracker = MlflowRuns(identity.tracking_uri)
    run = OpenRun(delivery.run_id, delivery.experiment_id, {})
    source, _ = experiment_file.split(identity.experiment_file or "")
    model_id = mlflow_model.log_model(
        tracker,
        run,
        served(model),
        example_of(experiment, model),
        step=step,
        name=NAME,
        code_paths=[source],
        tags={"rankzero.step": str(step), "rankzero.model": "best"},
    )
    write_atomically(folder.path / MARK, json.dumps({"step": step, "model_id": model_id}))
    if before is not None:
        tracker.models.delete_checkpoint(before["model_id"])


def experiment_of(folder: RunFolder) -> Experiment:
    """Return the experiment of a run's file with the run's settings. Raises UserError."""
    reference = folder.identity.experiment_file
    if reference is None:
        raise UserError(
            f"{folder.path.name} was not started by `rankzero train`: its own program has its model"
        )
    if Path(reference).resolve().is_relative_to(folder.path.parent.parent.resolve()):
        raise UserError(f"{reference} lies among the runs: what came with a run is not executed")
    return config.override(experiment_file.load(reference)(), config.read_file(folder.config))


def load_best(folder: RunFolder) -> nn.Module:
    """Return the experiment's model with the weights of the best checkpoint, to evaluate. Raises UserError."""
    experiment = experiment_of(folder)
    path = _best_checkpoint(folder, experiment)
    try:
        return _loaded(experiment, path)
    except (RuntimeError, KeyError, manifest.BrokenCheckpoint) as error:
        raise UserError(
            f"{path} does not fit the experiment's model as its file is now: {error}"
        ) from error


def _best_checkpoint(folder: RunFolder, experiment: Experiment) -> Path:
    path = files.best(folder.checkpoints, experiment.goal)
    if path is None:
        raise UserError(f"{folder.path.name} has no checkpoint on this disk")
    return path


def _loaded(experiment: Experiment, path: Path) -> nn.Module:
    model: nn.Module = experiment.model()
    model.load_state_dict(files.load(path)["model"])
    return model.eval()


def served(model: nn.Module) -> nn.Module:
    """Return the part of a model that people will call: all of it, unless it says what (`Steps` does)."""
    part = getattr(model, "served", model)
    assert isinstance(part, nn.Module)
    return part


def example_of(experiment: Experiment, model: nn.Module) -> tuple[Tensor, ...]:
    """Return what `measure` feeds the model for a small batch; of a model with a `served` part, what that is fed.

    Raises ValueError for a model that takes anything but tensors, by position.
    """
    _, val_set = experiment.data()
    feed = BatchLoader(val_set, torch.device("cpu"), seed=0, workers=0, collate=experiment.collate)
    seen: list[tuple[Any, Any]] = []
    handle = served(model).register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    with handle, torch.no_grad():
        batch, _ = next(iter(feed.eval_batches(EXAMPLE_SAMPLES, 0, 1)))
        experiment.measure(model, batch)
    if not seen:
        raise ValueError(
            "its steps never call the module itself, self(x); only what they call can be logged"
        )
    args, kwargs = seen[0]
    if kwargs or not args or not all(isinstance(arg, Tensor) for arg in args):
        raise ValueError(
            f"measure() calls the model with {_kinds(args, kwargs)}; only models that take tensors, by "
            "position, are logged (train.log_model=false: none is)"
        )
    return tuple(args)


def _logged(folder: RunFolder) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder.path / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _kinds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*(type(arg).__name__ for arg in args), *kwargs]) or "nothing"


def _child(folder: str, problems: Any) -> None:
    signals.release()
    signal.signal(signal.SIGTERM, _leave)
    try:
        best(RunFolder(Path(folder)))
    except Exception as error:
        told = text_without_secrets(traceback.format_exc())
        (Path(folder) / "export.log").write_text(told, encoding="utf-8", errors="backslashreplace")
        problems.put(
            line_without_secrets(f"{type(error).__name__}: {error}")
        )  # what a pipe holds, whoever reads it


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End as an exception does: what was written to a temporary folder goes."""
    sys.exit(1)
