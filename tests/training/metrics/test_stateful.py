"""The objects of metrics(), on one process."""

from __future__ import annotations

import re
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from rankzero.training.metrics.stateful import StatefulMetrics, without_stateful
from support.training import tiny

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


def test_an_object_that_metrics_returns_again_is_reset() -> None:
    one = Seen()
    one.reset = one.updates.clear  # type: ignore[attr-defined]
    one.update(torch.ones(2))
    StatefulMetrics({"one": one}, ALONE, 1)
    assert not one.updates


def test_an_object_may_hold_a_list_that_holds_itself() -> None:
    one: Any = Seen()
    one.held = []
    one.held.append(one.held)
    StatefulMetrics({"one": one}, ALONE, 1)


def test_a_column_of_the_outputs_does_not_keep_them_all() -> None:
    one = Seen()
    metrics = StatefulMetrics({"one": one}, ALONE, 1)
    logits = torch.rand(2, 50_000)
    kept, column = weakref.ref(logits), logits[:, 7].tolist()
    metrics.update({"one": (logits[:, 7], torch.ones(2))}, 2)
    del logits
    assert kept() is None
    metrics.compute([2], 0)
    assert one.updates[0][0].tolist() == column


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (torch.ones(2), "must be the tuple of arguments of update(), because metrics() has an"),
        (None, "must be the tuple of arguments"),  # as without the name
        ((torch.ones(3),), "must get tensors with 2 rows, one for each sample of the batch, got"),
        ((torch.ones(3),), "got shape (3,): let collate() keep every sample; an object"),
        ((["a", "b"],), "got <class 'list'>: let collate() keep"),
    ],
)
def test_wrong_arguments_are_refused(args: Any, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        StatefulMetrics({"one": Seen()}, ALONE, 1).update({"one": args}, 2)


class OnGpu(Tensor):
    """A tensor that says it is on a GPU, until it is moved."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    picked: ClassVar[list[Any]] = []

    def to(self, device: torch.device) -> Tensor:  # type: ignore[override]
        assert device.type == "cpu"
        return self.as_subclass(Tensor)

    def __getitem__(self, rows: Any) -> Tensor:
        self.picked.append(rows)
        return super().__getitem__(rows)


@pytest.mark.parametrize("rank", [0, 1])
def test_update_gets_all_ranks_samples_where_measure_left_them(rank: int) -> None:
    class Two(World):
        def gather(self, values: Tensor) -> Tensor:
            return torch.stack([values, values]).as_subclass(OnGpu)

        def share(self, value: Any, source: int = 0) -> Any:
            del source
            return value

    OnGpu.picked.clear()
    one = Seen()
    metrics = StatefulMetrics({"one": one}, Two(Ranks(rank, 2), torch.device("cpu")), 2)
    metrics.update({"one": (torch.tensor([1.0, 2.0]),)}, 2)
    metrics.compute([2, 2], 0)
    assert not OnGpu.picked, "the rows of all ranks, where they were gathered"
    updates = [[args.tolist(), args.device.type] for (args,) in one.updates]
    assert updates == ([[[1.0, 1.0, 2.0, 2.0], "cpu"]] if rank == 0 else [])


def test_what_one_rank_computes_asks_no_other_rank() -> None:
    class OfLibrary(nn.Module):
        """As torchmetrics' objects: `compute` gathers the states if this is true."""

        distributed_available_fn = staticmethod(lambda: True)

    class Wrapper(Seen):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

    one, two = OfLibrary(), OfLibrary()
    StatefulMetrics({"one": Wrapper(one), "two": Wrapper({"in": [nn.Sequential(two)]})}, ALONE, 2)
    assert not one.distributed_available_fn() and not two.distributed_available_fn()


def test_rows_of_several_widths_are_refused() -> None:
    metrics = StatefulMetrics({"bleu": Seen()}, ALONE, 1)
    metrics.update({"bleu": (torch.ones(2, 17), torch.ones(2))}, 2)
    says = re.escape("measure()['bleu']: rows of shape (17,) and (15,): pad them to one width")
    with pytest.raises(UserError, match=says):
        metrics.update({"bleu": (torch.ones(3, 15), torch.ones(3))}, 3)


def test_rows_of_another_width_on_another_rank_are_refused() -> None:
    """One of width 1 would be repeated without a word."""

    class Two(World):
        def share(self, value: Any, source: int = 0) -> Any:
            del source
            return [["float32", [17]]] if isinstance(value, list) else value

        def gather(self, values: Tensor) -> Tensor:
            return torch.stack([values, values])

    metrics = StatefulMetrics({"bleu": Seen()}, Two(Ranks(1, 2), torch.device("cpu")), 2)
    metrics.update({"bleu": (torch.ones(2, 1),)}, 2)
    with pytest.raises(UserError, match=re.escape("rows of shape (17,) and (1,): pad them")):
        metrics.compute([2, 2], 0)
    metrics = StatefulMetrics({"bleu": Seen()}, Two(Ranks(1, 2), torch.device("cpu")), 2)
    metrics.update({"bleu": (torch.ones(2, 17),)}, 2)
    metrics.compute([2, 2], 0)


def test_result_that_is_no_number_is_refused() -> None:
    metrics = StatefulMetrics({"one": Seen(torch.ones(3))}, ALONE, 1)
    metrics.update({"one": (torch.ones(2),)}, 2)
    with pytest.raises(UserError, match=re.escape("a number or {name: number}, got tensor")):
        metrics.compute([2], 0)


def test_objects_that_draw_numbers_at_the_start_change_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment, calls = tiny(), 0

    def metrics(self: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return {"fid": torch.rand(1)}

    build(experiment, ALONE)
    first = torch.rand(1)
    monkeypatch.setattr(type(experiment), "metrics", metrics)
    build(experiment, ALONE)
    assert torch.rand(1) == first and calls == 1


def test_training_ignores_the_arguments() -> None:
    def measure(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": batch, "one": (batch,)}

    assert without_stateful(measure, ()) is measure, "at no cost"
    measured, model = without_stateful(measure, ["one"]), torch.nn.Identity()
    assert measured(model.train(), 1) == {"loss": 1}
    assert measured(model.eval(), 1) == {"loss": 1, "one": (1,)}
