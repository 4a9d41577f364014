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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, RunRecord

log = logging.getLogger(__name__)


def log_model(
    tracker: MlflowRuns,
    run: RunRecord,
    model: Any,
    example: Any,
    *,
    step: int,
    name: str = "model",
    code_paths: Sequence[Path] = (),
    tags: Mapping[str, str] | None = None,
) -> str:
    """Save the model for inference, upload it, and return the logged model's id.

    `example`: a batch as the model takes it, a tensor or a tuple of tensors.
    """
    with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
        target = Path(folder) / "model"
        kind = _save(model, example, target, code_paths)
        return tracker.models.log_model(
            run, target, name, step, {"rankzero.format": kind, **(tags or {})}
        )


def _save(
    model: Any, example: Any, folder: Path, code_paths: Sequence[Path]
) -> Literal["pt2", "pickle"]:
    """Write the model into the new folder in MLflow's layout, and return the format."""
    from rankzero.mlflow_store.client.pytorch import save_pytorch

    model = copy.deepcopy(model).cpu().eval()
    inputs = []
    for tensor in example if isinstance(example, (tuple, list)) else (example,):
        tensor = tensor.detach().cpu()
        # torch.export takes a batch size of 1 for a constant.
        if tensor.ndim and len(tensor) == 1:
            tensor = tensor.repeat(2, *[1] * (tensor.ndim - 1))
        inputs.append(tensor)
    outputs = _array(model(*inputs))
    arrays = [_array(tensor) for tensor in inputs]
    try:
        # torch.export prints whole graphs.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            save_pytorch(model, folder, arrays, outputs, "pt2", ())
    except Exception as error:  # torch.export fails in as many ways as there are models
        first_line = (str(error).splitlines() or [repr(error)])[0]
        log.warning("the model cannot be traced, so it is pickled: %s", first_line)
        shutil.rmtree(folder, ignore_errors=True)
        save_pytorch(model, folder, arrays, outputs, "pickle", code_paths)
        return "pickle"
    return "pt2"


def _array(tensor: Any) -> Any:
    """Return a tensor as an array for the model's signature, or None if it is no tensor."""
    if not hasattr(tensor, "detach"):
        return None
    tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, which numpy has no type for
        return tensor.float().numpy()
