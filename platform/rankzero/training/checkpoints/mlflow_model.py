"""A trained model as others load it: ``mlflow.pytorch.load_model("models:/<id>")``, for batches of any size.

A traced graph (pt2) needs none of the user's code and runs none of it when loaded. A model that
cannot be traced is pickled, with the user's files beside it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, OpenRun

Format = Literal["pt2", "pickle"]

log = logging.getLogger(__name__)


def log_model(
    tracker: MlflowRuns,
    run: OpenRun,
    model: Any,
    example: Any,
    *,
    step: int,
    name: str = "model",
    code_paths: Sequence[Path] = (),
    tags: Mapping[str, str] | None = None,
) -> str:
    """Save the model for inference and upload it; return the logged model's id.

    `example`: a batch as the model takes it, a tensor or a tuple of tensors.
    """
    with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
        target = Path(folder) / "model"
        kind = save(model, example, target, code_paths)
        return tracker.models.log_model(
            run, target, name, step, {"rankzero.format": kind, **(tags or {})}
        )


def save(model: Any, example: Any, folder: Path, code_paths: Sequence[Path] = ()) -> Format:
    """Write the model into the new folder in MLflow's layout; return in which format."""
    from rankzero.mlflow_store.client.pytorch import save_pytorch

    model = copy.deepcopy(model).cpu().eval()
    inputs = tuple(
        _batch(tensor) for tensor in (example if isinstance(example, (tuple, list)) else (example,))
    )
    outputs = _array(model(*inputs))
    arrays = [_array(tensor) for tensor in inputs]
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):  # whole graphs
            save_pytorch(model, folder, arrays, outputs, "pt2", ())
    except Exception as error:  # torch.export gives up in as many ways as there are models
        log.warning(
            "the model cannot be traced, so it is pickled: %s",
            (str(error).splitlines() or [repr(error)])[0],
        )
        shutil.rmtree(folder, ignore_errors=True)
        save_pytorch(model, folder, arrays, outputs, "pickle", code_paths)
        return "pickle"
    return "pt2"


def _batch(tensor: Any) -> Any:
    """Return the tensor on the CPU as at least two samples: of one, torch.export takes the size for a constant."""
    tensor = tensor.detach().cpu()
    if tensor.ndim and len(tensor) == 1:
        tensor = tensor.repeat(2, *[1] * (tensor.ndim - 1))
    return tensor


def _array(tensor: Any) -> Any:
    """Return a tensor's numbers for the signature; None for an output of any other kind."""
    if not hasattr(tensor, "detach"):
        return None
    tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, which numpy has no type for
        return tensor.float().numpy()
