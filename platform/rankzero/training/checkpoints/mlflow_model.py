"""A trained model for inference, which ``mlflow.pytorch.load_model("models:/<id>")`` loads.

A traced model (format pt2) needs none of the user's code and executes none when it is loaded. A
model that cannot be traced is pickled, together with the user's files.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rankzero.permanent_errors import lacks_memory_or_space

log = logging.getLogger(__name__)
_silencing = threading.Lock()
# Classes of data and of a training, by name, because several libraries have some of these.
_NOT_SERVED = {
    "DataLoader",
    "Dataset",
    "LightningDataModule",
    "Trainer",
    "TrainerStub",
}


@contextlib.contextmanager
def saved(model: Any, example: Any, code_paths: Sequence[Path] = ()) -> Iterator[tuple[Path, str]]:
    """Save the model for inference in a temporary folder. Yield its place, and its format.

    `example`: a batch as the model takes it, a tensor or a tuple of tensors. `code_paths`: the
    files that a pickled model needs.
    """
    with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
        target = Path(folder) / "model"
        yield target, _save(model, example, target, code_paths)


def save_traced(model: nn.Module, example: Sequence[Tensor], folder: Path) -> None:
    """Trace a copy of the model on the CPU, and write it into the new folder in MLflow's layout.

    Raises ValueError with the reason if it cannot be traced.
    """
    try:
        _save_traced(*_copied(model, example), folder)
    except Exception as error:  # torch.export fails in as many ways as there are models
        raise ValueError(f"it cannot be traced: {_first_line(error)}") from error


def _save(model: Any, example: Any, folder: Path, code_paths: Sequence[Path]) -> str:
    """Write the model into the new folder in MLflow's layout, and return the format."""
    from rankzero.mlflow_store.client.pytorch import save_pytorch

    inputs = example if isinstance(example, (tuple, list)) else (example,)
    copied, arrays, output = _copied(model, inputs)
    try:
        _save_traced(copied, arrays, output, folder)
    except Exception as error:
        if lacks_memory_or_space(error):
            raise
        log.warning("the model cannot be traced, so it is pickled: %s", _first_line(error))
        shutil.rmtree(folder, ignore_errors=True)
        save_pytorch(copied, folder, arrays, output, "pickle", code_paths)
        return "pickle"
    return "pt2"


def _copied(model: nn.Module, example: Sequence[Tensor]) -> tuple[nn.Module, list[Any], Any]:
    """Return a copy of the model on the CPU, a batch for it as arrays, and what it returns."""
    # A copy on its GPU might not fit there.
    own: dict[int, Any] = {
        id(one): nn.Parameter(_on_cpu(one), one.requires_grad) for one in model.parameters()
    }
    own |= {id(one): _on_cpu(one) for one in model.buffers()}
    inputs = [_on_cpu(tensor) for tensor in example]
    # torch.export takes a batch size of 1 for a constant.
    inputs = [
        tensor.repeat(2, *[1] * (tensor.ndim - 1)) if tensor.ndim and len(tensor) == 1 else tensor
        for tensor in inputs
    ]
    with torch.no_grad():
        try:
            copied = _without_data(model, own)
            output = copied(*inputs)
        except Exception:  # its forward may read the data set, for the names of classes
            copied = copy.deepcopy(model, own).cpu().eval()
            output = copied(*inputs)
    return copied, [_array(tensor) for tensor in inputs], _array(output)


def _without_data(model: nn.Module, own: Mapping[int, Any]) -> nn.Module:
    """Return a copy on the CPU without data sets, loaders and what else only a training needs.

    `own`: the copies of its tensors, by `id`.
    """
    memo, attributes = dict(own), list[tuple[str, str]]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_of_training(value):
                memo[id(value)] = None
                # Lightning's own properties read this one, and take None.
                if name != "_trainer":
                    attributes.append((path, name))
            elif isinstance(value, (dict, list, tuple)):
                inner = value.values() if isinstance(value, dict) else value
                memo.update((id(one), None) for one in inner if _is_of_training(one))
    copied = copy.deepcopy(model, memo).cpu().eval()
    for path, name in attributes:
        vars(copied.get_submodule(path)).pop(name, None)
    return copied


def _is_of_training(value: Any) -> bool:
    # RankZero puts a method of its own in the place of a LightningModule's `log`.
    if isinstance(value, MethodType):
        return type(value.__self__).__name__ == "LightningSteps"
    names = {parent.__name__ for parent in type(value).__mro__}
    return not isinstance(value, nn.Module) and not names.isdisjoint(_NOT_SERVED)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _save_traced(model: nn.Module, arrays: list[Any], output: Any, folder: Path) -> None:
    from rankzero.mlflow_store.client.pytorch import save_pytorch

    # torch.export prints whole graphs. The streams are the process's: one thread at a time.
    with (
        _silencing,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        save_pytorch(model, folder, arrays, output, "pt2", ())


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def _array(tensor: Any) -> Any:
    """Return a tensor as an array for the model's signature, or None if it is no tensor."""
    if not hasattr(tensor, "detach"):
        return None
    tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, which numpy has no type for
        return tensor.float().numpy()
