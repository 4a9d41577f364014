"""`RankZeroCallback` beside the callbacks of each `fit`, and in the place of Keras' CSVLogger."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
from keras.src.callbacks.callback_list import CallbackList

from frameworks.contracts import recorded
from rankzero.integrations.keras import RankZeroCallback

_WITH_CALLBACKS = "callback|steps_count|steps_per_epoch|stop_loop|epochs_and_steps"

NOT_APPLICABLE = {
    rf"trainer_test\.py(?!.*({_WITH_CALLBACKS}))": "has no callback",
}


class StandIn(RankZeroCallback):
    """The adapter with CSVLogger's arguments. At its end it writes what its journal holds."""

    def __init__(self, filename: str, separator: str = ",", append: bool = False) -> None:
        super().__init__("contracts", checkpoints=False)
        self.file, self.separator, self.is_new = Path(filename), separator, not append

    def on_train_end(self, logs: Any = None) -> None:
        folder = self._run.begin().folder
        assert folder is not None
        super().on_train_end(logs)
        rows = recorded.read(folder).rows
        # Each epoch ends with its learning rate.
        epochs = [row for row in rows.values() if "lr" in row]
        names = [name for name in {n: 0 for row in epochs for n in row} if name != "lr"]
        with self.file.open("w" if self.is_new else "a") as file:
            writer = csv.writer(file, delimiter=self.separator)
            if self.is_new:
                own = (name.replace("train/", "").replace("val/", "val_") for name in names)
                writer.writerow(["epoch", *own])
            for number, row in enumerate(epochs):
                writer.writerow([number, *(row.get(name, "NA") for name in names)])
        self.is_new = False


_init = CallbackList.__init__


def _with_adapter(self: CallbackList, callbacks: Any = None, *rest: Any, **options: Any) -> None:
    given = list(keras.tree.flatten(callbacks)) if callbacks else []
    if not any(isinstance(callback, RankZeroCallback) for callback in given):
        given.append(RankZeroCallback("contracts"))
    _init(self, given, *rest, **options)


CallbackList.__init__ = _with_adapter
keras.src.callbacks.CSVLogger = StandIn
# The suite imports it for another backend than TensorFlow.
sys.modules.setdefault("jax", ModuleType("jax"))


def adapt(module: ModuleType) -> None:
    """Replace nothing: all is replaced before."""


def check(folder: Path) -> None:
    """No batch of a `fit` is counted twice."""
    steps = recorded.steps(folder, "train/loss")
    assert steps == sorted(set(steps)), steps
