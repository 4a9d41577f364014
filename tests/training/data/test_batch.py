"""Batches as trees: moved, counted and divided."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.training.data.batch import rows_of, samples_in, to_device

CPU = torch.device("cpu")


def test_nested_batches_are_moved_and_counted() -> None:
    batch = {"x": [torch.zeros(4, 2), "text"], "y": (torch.zeros(4),)}
    assert samples_in(batch) == 4
    moved = to_device(batch, CPU)
    assert moved["x"][1] == "text" and isinstance(moved["y"], tuple)
    assert samples_in("nothing") == 0


class Encoded(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers make them."""


class Graph:
    """No tensor, but can be moved as one."""

    def __init__(self, device: str = "nowhere") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(device.type)


def test_objects_with_a_method_to_are_moved() -> None:
    meta = torch.device("meta")
    encoded = Encoded(ids=torch.zeros(3, 2), graph=Graph(), texts=["a"])
    text = Encoded(ids=torch.zeros(3, 2), texts=["a"])
    moved = to_device(encoded, meta)
    assert (
        isinstance(moved, Encoded)
        and moved["ids"].device == meta
        and moved["graph"].device == "meta"
    )
    assert encoded["ids"].device == CPU and moved["texts"] == ["a"]
    assert rows_of(text, torch.tensor([2]))["ids"].shape == (1, 2) and samples_in(encoded) == 3
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert to_device(packed, CPU).data.tolist() == [1.0, 1.0, 1.0]


class Locked(Mapping[str, Any]):
    """A mapping that moves itself, as a TensorDict does."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, name: str) -> Tensor:
        return self.x

    def __iter__(self) -> Iterator[str]:
        return iter("x")

    def __len__(self) -> int:
        return 1

    def to(self, device: torch.device) -> Locked:
        return Locked(self.x.to(device))


def test_a_mapping_that_moves_itself_is_moved_whole() -> None:
    moved = to_device(Locked(torch.zeros(3)), torch.device("meta"))
    assert isinstance(moved, Locked) and moved.x.is_meta and samples_in(moved) == 3


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A batch as detection has it. Its `__init__` takes other arguments than its fields."""

    corners: list[Tensor]
    images: dataclasses.InitVar[Tensor]
    pixels: Tensor = dataclasses.field(init=False)

    def __post_init__(self, images: Tensor) -> None:
        object.__setattr__(self, "pixels", images / 255)


@attrs.define
class Pair:
    left: Tensor
    rest: Any


def test_dataclasses_and_attrs_classes_are_trees() -> None:
    meta = torch.device("meta")
    boxes = Boxes([torch.zeros(2, 4), torch.zeros(5, 4)], torch.full((3, 1), 255.0))
    pair = Pair(torch.zeros(3), {"boxes": boxes, "name": "a"})
    moved = to_device(pair, meta)
    assert isinstance(moved, Pair) and moved.left.device == meta and moved.rest["name"] == "a"
    inner = moved.rest["boxes"]
    assert isinstance(inner, Boxes) and inner.pixels.device == meta
    assert [corners.device for corners in inner.corners] == [meta, meta]
    assert pair.left.device == boxes.pixels.device == CPU
    assert samples_in(pair) == 3 and rows_of(pair.left, torch.tensor([0])).shape == (1,)
    assert rows_of(Pair(torch.arange(3), None), torch.tensor([2])).left.tolist() == [2]


@dataclasses.dataclass
class Moving:
    """A batch that moves itself, as many users write it."""

    x: Tensor

    def to(self, device: torch.device) -> Moving:
        return Moving(self.x.to(device))


def test_the_samples_of_a_batch_that_moves_itself_are_counted() -> None:
    assert samples_in(Moving(torch.zeros(5, 2))) == 5


def test_a_batch_that_only_its_class_can_divide_is_refused_by_a_pipeline() -> None:
    with pytest.raises(UserError, match=r"cannot divide a Graph: .* train\.strategy=ddp"):
        rows_of({"graph": Graph()}, torch.tensor([0]))
