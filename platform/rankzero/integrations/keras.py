"""A callback for Keras: ``model.fit(callbacks=[RankZeroCallback("my-experiment")])``.

Nothing here imports PyTorch before the first checkpoint. That import costs about three seconds and
500 MB, once, on rank 0 alone. ``checkpoints=False`` avoids it, for those who keep Keras' own
checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankzero.config import dotted
from rankzero.integrations.deferred_run import DeferredRun

try:
    import keras
except ImportError as error:
    raise ImportError("Keras is missing: pip install rankzero[keras]") from error


class RankZeroCallback(keras.callbacks.Callback):
    """Sends the metrics of `fit` to MLflow, one run for each `fit`; with a `name`, one for all.

    ``train/loss`` is the value that Keras shows: the mean since the epoch began, at every batch.
    ``val/loss`` and the learning rate come at the end of an epoch, with a checkpoint that `restore`
    reads. `params` adds params that Keras does not give its callbacks, such as the batch size. If
    `fit` does not report its end, the run FAILED.

    `options`: those of `rankzero.track` (name, goal…).
    """

    # Otherwise Keras would wait for every batch's loss, even if its backend does not need that.
    async_safe = True
    # Keras may report batches from several threads of its own. A callback with a lock of its own
    # could not be copied, as KerasTuner does for each trial.
    _lock = threading.Lock()

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
        self._run = DeferredRun(experiment, **options)
        self._before = self._seen = 0
        self._fits = self._begins = self._counts_on = False

    def set_model(self, model: keras.Model) -> None:
        """Note that a call of Keras begins: it calls this, but not for the validations of `fit`."""
        super().set_model(model)
        self._fits = False

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Start a run, with the settings of the model and its optimizer as params."""
        self._run.end_unreported()  # The `fit` before, if an exception ended it.
        self._run.end()
        self._counts_on = self._options.get("name") is not None and self._run.has_trained
        if not self._counts_on:
            self._run = DeferredRun(self._experiment, **self._options)
        self._run.add_params({**_settings(self.model, self.params or {}), **self._given})
        self._seen = 0
        self._fits = self._begins = True
        error = RuntimeError("fit was left before its end")
        # Only the first epoch's number says whether it continues.
        self._run.begin_training(1, call=self.params).unless_ended = error

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Continue the numbers of the batches, also from an `initial_epoch`."""
        if self._begins:
            self._begins, length = False, self._length()
            counts_on = self._counts_on or (epoch and not length)
            self._before = self._run.begin().highest_step if counts_on else epoch * (length or 0)
        else:
            self._before += self._seen
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log the metrics of the batch."""
        # Keras may run several batches as one call, whose number then lies behind the epoch's end.
        number = min(batch + 1, self._length() or batch + 1)
        with self._lock:
            self._seen = max(self._seen, number)
            values = {f"train/{name}": value for name, value in (logs or {}).items()}
            self._run.begin().log(values, self._before + number)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Log the learning rate and the validation metrics, and keep a checkpoint."""
        run, step = self._run.begin(), self._before + self._seen
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            run.log({"lr": float(keras.ops.convert_to_numpy(optimizer.learning_rate))}, step)
        metrics = {
            f"val/{name[4:]}": value
            for name, value in (logs or {}).items()
            if name.startswith("val_")
        }
        # All workers must read the weights: if they are sharded, the read is a collective.
        weights = _weights(self.model) if self._checkpoints else {}
        if weights and run.folder is not None:
            run.checkpoint(_tensors(weights), step, metrics)
        else:
            run.evaluated(metrics, step)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """End the run."""
        self._fits = False
        self._run.end()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Log what `evaluate` has measured. `on_epoch_end` gets the metrics of a validation."""
        if not self._fits:
            metrics = {f"val/{name}": value for name, value in (logs or {}).items()}
            self._run.evaluated(metrics, self._before + self._seen)
            self._run.end_if_over()

    def _length(self) -> int | None:
        """Return the batches of an epoch, or None if they are not known before it ends."""
        length: int | None = (self.params or {}).get("steps")
        return length


def restore(model: keras.Model, checkpoint: str | Path) -> None:
    """Load a checkpoint (``…/checkpoints/step_…``) into a built, compiled model and its optimizer.

    Raises BrokenCheckpoint if the folder is damaged, ValueError if it does not fit the model.
    """
    from rankzero.training.checkpoints.restore import load

    state = load(Path(checkpoint))
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    groups = _variables(model)
    for group, variables in groups.items():
        found = state[group].values()
        saved, own = [[tuple(one.shape) for one in side] for side in (found, variables)]
        if saved != own:
            raise ValueError(
                f"the {group} of {checkpoint} does not fit this model: its shapes are {saved}, the "
                f"model's {own}"
            )
    for group, variables in groups.items():
        for variable, value in zip(variables, state[group].values(), strict=True):
            variable.assign(value.numpy())


def _variables(model: keras.Model) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    return {"model": list(model.weights), "optimizer": list(getattr(optimizer, "variables", ()))}


def _weights(model: keras.Model) -> dict[str, dict[str, Any]]:
    """Return copies of all variables as arrays, in Keras' order."""
    # The index in the name keeps two variables with the same path apart.
    return {
        group: {
            # The `value` of a scalar is none to NumPy within the scope of a strategy.
            f"{index:04d}.{variable.path}": keras.ops.convert_to_numpy(variable)
            for index, variable in enumerate(variables)
        }
        for group, variables in _variables(model).items()
    }


def _tensors(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    import torch

    # PyTorch cannot read NumPy's added types, such as bfloat16 (kind V). float32 holds them
    # exactly.
    return {
        group: {
            name: torch.as_tensor(array.astype("float32") if array.dtype.kind == "V" else array)
            for name, array in arrays.items()
        }
        for group, arrays in groups.items()
    }


def _settings(model: keras.Model, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that Keras gives its callbacks. The batch size is not among them."""
    optimizer = getattr(model, "optimizer", None)
    strategy = getattr(model, "distribute_strategy", None)
    settings = {
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
    return {name: value for name, value in dotted(settings) if value is not None}
