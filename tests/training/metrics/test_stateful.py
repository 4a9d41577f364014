"""The objects of metrics(), on one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.training.distributed.world import World
from rankzero.training.metrics.stateful import StatefulMetrics, without_stateful

ALONE = World(Ranks(), torch.device("cpu"))


class Seen:
    """Computes what it is given."""

    def __init__(self, result: Any = 0.0) -> None:
        self.updates: list[Any] = []
        self.result = result

    def update(self, *args: Any) -> None:
        self.updates.append(args)

    def compute(self) -> Any:
        return self.result


def test_update_gets_all_samples_at_once() -> None:
    one = Seen({"low": torch.tensor(0.25), "high": 1})
    metrics = StatefulMetrics({"one": one, "two": Seen(2)}, ALONE, 1)
    for rows in (torch.arange(3), torch.arange(3, 5)):
        metrics.update({"one": (rows, rows > 1), "two": (rows,)}, len(rows))
    assert metrics.compute([5], 0) == {"one/low": 0.25, "one/high": 1.0, "two": 2.0}
    ((rows, above),) = one.updates
    assert rows.tolist() == [0, 1, 2, 3, 4] and above.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (torch.ones(2), "must be the tuple of arguments of update(), because metrics() has an"),
        ((torch.ones(3),), "must get tensors with 2 rows, one for each sample of the batch, got"),
        ((["a", "b"],), "got <class 'list'>; an object of torchmetrics may get anything"),
    ],
)
def test_wrong_arguments_are_refused(args: Any, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        StatefulMetrics({"one": Seen()}, ALONE, 1).update({"one": args}, 2)


def test_missing_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="measure\\(\\)\\['one'\\] must be the tuple"):
        StatefulMetrics({"one": Seen()}, ALONE, 1).update({}, 2)


def test_result_that_is_no_number_is_refused() -> None:
    metrics = StatefulMetrics({"one": Seen(torch.ones(3))}, ALONE, 1)
    metrics.update({"one": (torch.ones(2),)}, 2)
    with pytest.raises(UserError, match=re.escape("a number or {name: number}, got tensor")):
        metrics.compute([2], 0)


def test_training_ignores_the_arguments() -> None:
    def measure(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": batch, "one": (batch,)}

    assert without_stateful(measure, ()) is measure, "at no cost"
    measured, model = without_stateful(measure, ["one"]), torch.nn.Identity()
    assert measured(model.train(), 1) == {"loss": 1}
    assert measured(model.eval(), 1) == {"loss": 1, "one": (1,)}
