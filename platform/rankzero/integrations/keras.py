"""Keras: a callback, for ``model.fit(callbacks=[RankZeroCallback("my-experiment")])``.

Nothing here imports PyTorch before the first checkpoint: that costs some three seconds and 500 MB, once, on rank 0
alone. ``checkpoints=False`` does without, for those who keep Keras' own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rankzero.integrations.deferred_run import DeferredRun

try:
    import keras
except ImportError as error:
    raise ImportError(
        "rankzero.integrations.keras needs it: pip install rankzero[keras]"
    ) from error

LEFT = "fit was left before its end"


class RankZeroCallback(keras.callbacks.Callback):
    """Sends what `fit` logs to MLflow, a run for each `fit`. `options`: those of `rankzero.track` (name, goal…).

    ``train/loss`` is what Keras shows: the mean since the epoch began, at every batch; ``val/loss`` and the learning
    rate come at an epoch's end, with a checkpoint that `restore` reads. `params`: more than Keras tells its callbacks,
    such as the batch size. Where `fit` was not seen to end well, the run FAILED.
    """

    async_safe = (
        True  # else Keras would wait for every batch's loss, also where its backend can do without
    )

    def __init__(
        self,
        experiment: str = "keras",
        params: Mapping[str, Any] | None = None,
        *,
        checkpoints: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self._experiment, self._given, self._options = experiment, dict(params or {}), options
        self._checkpoints = checkpoints
        self._late = self._new_run()
        self._lock = threading.Lock()
        self._before = self._seen = 0

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Begin a run with what is known of the model and its optimizer as params."""
        self._late.give_up()  # a fit before, which an exception ended
        self._late = self._new_run()
        self._late.params({**_settings(self.model, self.params or {}), **self._given})
        self._before = self._seen = 0
        assert self._late.run is not None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Number the batches on from the last epoch; a `fit` with an `initial_epoch` goes on where it would be."""
        length = self._length()
        self._before = epoch * length if length else self._before + self._seen
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log what Keras has of the batch; it may call from threads of its own."""
        number = min(
            batch + 1, self._length() or batch + 1
        )  # several batches at a time may end behind the epoch
        with self._lock:
            self._seen = max(self._seen, number)
            values = {f"train/{name}": value for name, value in (logs or {}).items()}
            self._late.run.log(values, self._before + number)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log the learning rate and the validation's metrics, and keep a checkpoint."""
        run, step = self._late.run, self._before + self._seen
        run.log(_learning_rate(self.model), step)
        metrics = {
            f"val/{name[4:]}": value
            for name, value in (logs or {}).items()
            if name.startswith("val_")
        }
        weights = (
            _weights(self.model) if self._checkpoints else {}
        )  # where they are shared out, all workers must ask
        if weights and run.folder is not None:
            run.checkpoint(_tensors(weights), step, metrics)
        else:
            run.evaluated(metrics, step)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """End the run."""
        self._late.end()

    def _new_run(self) -> DeferredRun:
        return DeferredRun(self._experiment, RuntimeError(LEFT), **self._options)

    def _length(self) -> int | None:
        """Return the batches of an epoch, where they are known before it ends."""
        length: int | None = (self.params or {}).get("steps")
        return length


def restore(model: keras.Model, checkpoint: str | Path) -> None:
    """Give a built and compiled model the weights of a checkpoint (``…/checkpoints/step_…``), and its optimizer's.

    Raises BrokenCheckpoint where the folder is not intact, ValueError where it is not of such a model.
    """
    from rankzero.training.checkpoints.restore import load

    state = load(Path(checkpoint))
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    for group, variables in _variables(model).items():
        _assign(variables, list(state[group].values()), f"{group} of {checkpoint}")


def _assign(variables: list[Any], values: list[Any], what: str) -> None:
    shapes, found = (
        [tuple(variable.shape) for variable in variables],
        [tuple(value.shape) for value in values],
    )
    if shapes != found:
        raise ValueError(
            f"the {what} is another model's: its shapes are {found}, this one's {shapes}"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value.numpy())


def _variables(model: keras.Model) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    return {
        "model": list(model.weights),
        "optimizer": list(optimizer.variables if optimizer is not None else ()),
    }


def _weights(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Return copies as arrays, in Keras' order; the names begin with their places, so that none occurs twice."""
    return {group: _arrays(variables) for group, variables in _variables(model).items()}


def _arrays(variables: list[Any]) -> dict[str, Any]:
    named = {f"{place:04d}.{variable.path}": variable for place, variable in enumerate(variables)}
    return {name: keras.ops.convert_to_numpy(variable.value) for name, variable in named.items()}


def _tensors(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    import torch

    return {
        group: {name: torch.as_tensor(_known(array)) for name, array in arrays.items()}
        for group, arrays in groups.items()
    }


def _known(array: Any) -> Any:
    """Return an array of a kind that PyTorch reads: of NumPy's additions (bfloat16), its exact float32."""
    return array.astype("float32") if array.dtype.kind == "V" else array


def _learning_rate(model: keras.Model) -> dict[str, float]:
    optimizer = getattr(model, "optimizer", None)
    return (
        {}
        if optimizer is None
        else {"lr": float(keras.ops.convert_to_numpy(optimizer.learning_rate))}
    )


def _settings(model: keras.Model, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Keras tells of a training: the batch size is not among it."""
    optimizer = getattr(model, "optimizer", None)
    strategy = getattr(model, "distribute_strategy", None)
    found = {
        "model": model.name,
        "weights": model.count_params() if model.built else None,
        "epochs": params.get("epochs"),
        "steps_per_epoch": params.get("steps"),
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "strategy": None if strategy is None else type(strategy).__name__,
        "replicas": getattr(strategy, "num_replicas_in_sync", None),
        "optimizer": {} if optimizer is None else optimizer.get_config(),
    }
    return dict(_present(found))


def _present(found: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield what is known, in nested settings, too."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield name, dict(_present(value))
        elif value is not None:
            yield name, value
