"""Models that a program logs: traced into the run's folder at once, uploaded by the courier."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from rankzero.events import ModelLogged
from rankzero.mlflow_store import limits
from rankzero.run_store import disk
from rankzero.run_store.folder import RunFolder
from rankzero.training.checkpoints import mlflow_model


def keep(folder: RunFolder, model: Any, name: str, example: Any, step: int) -> ModelLogged:
    """Trace the model, and keep it in MLflow's layout. Raises ValueError if it cannot be."""
    limits.check_model_name(name)
    module = _whole(model)
    _import_mlflow()
    inputs = example if isinstance(example, (tuple, list)) else (example,)
    tensors = tuple(torch.as_tensor(one) for one in inputs)
    now = time.time()
    target = folder.models / f"step_{max(step, 0):08d}_{time.time_ns()}"
    folder.models.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.models, prefix=".tmp-") as aside:
        mlflow_model.save_traced(module, tensors, Path(aside, "model"))
        Path(aside, "model").rename(target)
    # The journal names it next, and the courier may upload it after a power loss.
    disk.sync_all(target.rglob("*"), folder.path)
    return ModelLogged(now, step, f"{folder.models.name}/{target.name}", name)


def _whole(model: Any) -> nn.Module:
    """Return the module that the wrappers of DDP and of torch.compile hold. Raises ValueError."""
    while isinstance(model, (DistributedDataParallel, DataParallel)) or hasattr(model, "_orig_mod"):
        model = getattr(model, "_orig_mod", None) or model.module
    if not isinstance(model, nn.Module):
        raise ValueError(f"{type(model).__name__} is no module of PyTorch")
    # Rank 0 alone cannot trace it: the others would have to gather the weights with it. Only a
    # DTensor has a full_tensor, and FSDP's first version has no DTensors.
    kinds = {type(part).__name__ for part in model.modules()}
    if "FullyShardedDataParallel" in kinds or any(
        hasattr(weight, "full_tensor") for weight in model.parameters()
    ):
        raise ValueError("its weights are divided among the ranks: load them into a whole model")
    return model


def _import_mlflow() -> None:
    """Import mlflow with our settings, and take these back: the user's own calls read them."""
    before = set(os.environ)
    from rankzero.mlflow_store.client import mlflow_compat

    for name in mlflow_compat.ENVIRONMENT.keys() - before:
        os.environ.pop(name, None)
