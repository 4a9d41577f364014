"""A PyTorch module in MLflow's layout. Imports torch when it is called."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def save_pytorch(
    model: Any, folder: Path, inputs: Sequence[Any], output: Any, kind: str, code: Sequence[Path]
) -> None:
    """Write the module in MLflow's layout, with a signature taken from the arrays.

    The first dimension of the arrays is any batch size. `kind` is pt2 or pickle.
    """
    # mlflow.pytorch.log_model would also download the history of each metric, and try out the
    # requirements in a new process.
    import mlflow.pytorch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    from rankzero.mlflow_store.client.mlflow_compat import requirements_unchecked

    with warnings.catch_warnings(), requirements_unchecked():
        # The warnings are about torch's own internals.
        warnings.simplefilter("ignore")
        mlflow.pytorch.save_model(
            model,
            str(folder),
            serialization_format=kind,
            signature=ModelSignature(
                Schema(_specs("input", inputs)),
                None if output is None else Schema(_specs("output", [output])),
            ),
            input_example=inputs[0] if len(inputs) == 1 else list(inputs),
            code_paths=[str(path) for path in code] or None,
            pip_requirements=[
                f"{name}=={version(name).partition('+')[0]}"
                for name in ("mlflow", "torch", "numpy")
            ],
        )


def _specs(name: str, arrays: Sequence[Any]) -> list[Any]:
    from mlflow.types import TensorSpec

    return [
        TensorSpec(array.dtype, (-1, *array.shape[1:]), f"{name}_{i}" if len(arrays) > 1 else None)
        for i, array in enumerate(arrays)
    ]
