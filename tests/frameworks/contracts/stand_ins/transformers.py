"""`RankZeroCallback` among the default callbacks of every `Trainer` of the suite."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from transformers import trainer

from frameworks.contracts import recorded
from rankzero.integrations.transformers import RankZeroCallback

NOT_APPLICABLE = {
    r"SwanLab|Kubeflow": "another service's callback",
    r"TrainerState|TrainerControl|CallbackHandler|EarlyStopping|Exportable": "has no Trainer",
}

trainer.DEFAULT_CALLBACKS.append(RankZeroCallback)


def adapt(module: ModuleType) -> None:
    """Replace nothing: the suite compares with the list of default callbacks."""


def check(folder: Path) -> None:
    """A run has its params, and its trainings have ended."""
    params, rows = recorded.read(folder)
    assert "learning_rate" in params and rows, params
    trained = [row for row in rows.values() if "summary/runtime" in row]
    assert recorded.ends(folder) == [("FINISHED", "finished")] * len(trained)
