"""The final best model, logged to MLflow once, with a signature, so that `mlflow.pytorch.load_model` loads it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankzero import config, experiment_file
from rankzero.experiment import Experiment
from rankzero.tracking.journal import RunFolder
from rankzero.train import checkpoint
from rankzero.train.feed import Feed

NAME = "best_model"
EXAMPLE_SAMPLES = 2  # more than one, so that the exporter does not take the batch for a constant


def in_new_process(folder: RunFolder, notice: Callable[[str], None]) -> None:
    """Log the run's best model from a process of its own; a failure is a notice, never the run's failure."""
    context = multiprocessing.get_context("forkserver")
    problems = context.SimpleQueue()
    process = context.Process(target=_child, args=(str(folder.path), problems))
    process.start()
    process.join()
    if not problems.empty():
        notice(f"the best model was not logged to MLflow: {problems.get()}")
    elif process.exitcode:
        notice(f"the best model was not logged to MLflow: its process ended with {process.exitcode}")


def best(folder: RunFolder) -> None:
    """Load the best checkpoint into a new model and log it to the run."""
    from rankzero.tracking import mlflow as tracking
    from rankzero.tracking import progress

    identity = folder.identity
    experiment = config.from_yaml(experiment_file.load(identity.experiment_file or ""), folder.config.read_text())
    path = checkpoint.best(folder.checkpoints, experiment.goal)
    run_id = progress.load(progress.path_of(folder, 0)).run_id
    if path is None or run_id is None:
        raise RuntimeError("no checkpoint" if path is None else "the run has not reached MLflow; rankzero sync does it")
    model = experiment.model()
    model.load_state_dict(checkpoint.load(path)["model"])
    model.eval()
    example, output = example_of(experiment, model)
    tracking.Tracker(identity.tracking_uri).log_model(run_id, model, example, output, NAME)


def example_of(experiment: Experiment, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return what `measure` feeds the model for a small batch, and what comes out.

    Raises ValueError for a model that takes or returns anything but one tensor.
    """
    _, val_set = experiment.data()
    feed = Feed(val_set, torch.device("cpu"), seed=0, workers=0, collate=experiment.collate)
    seen: list[tuple[Any, Any]] = []
    handle = model.register_forward_hook(
        lambda _module, args, kwargs, output: seen.append(((args, kwargs), output)), with_kwargs=True
    )
    with handle, torch.no_grad():
        experiment.measure(model, next(iter(feed.evaluate(EXAMPLE_SAMPLES, 0, 1))))
    (args, kwargs), output = seen[0]
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        raise ValueError(f"the model takes {_kinds(args, kwargs)} and returns {type(output).__name__}; only models "
                         "from one tensor to one tensor are logged")
    return args[0], output


def _kinds(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return ", ".join([*(type(arg).__name__ for arg in args), *kwargs]) or "nothing"


def _child(folder: str, problems: Any) -> None:
    try:
        best(RunFolder(Path(folder)))
    except Exception as error:
        (Path(folder) / "export.log").write_text(traceback.format_exc())
        problems.put(f"{type(error).__name__}: {error}")
