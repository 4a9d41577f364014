"""Copies to a GPU, by way of a stage. Here streams only note their order.

`benchmarks/gpu/checks.py` has the same on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rankzero.training.data import device_copy
from rankzero.training.data.device_copy import STAGED_BYTES, DeviceCopier, is_staged

CPU = torch.device("cpu")


class Stream:
    """Notes what it does and waits for."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order

    def wait_stream(self, other: Stream) -> None:
        self.order.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.order.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.order.append(f"{self.name} took the batch")
        return "the batch before"


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the streams do, in the order in which the host says so."""
    found: list[str] = []

    @contextlib.contextmanager
    def current(stream: Stream) -> Iterator[None]:
        found.append(f"{stream.name} copy")
        yield

    kernels = Stream("kernels", found)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("copies", found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: kernels)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(Tensor, "record_stream", lambda memory, stream: None)
    monkeypatch.setattr(device_copy, "is_staged", lambda tensor: tensor.nbytes >= STAGED_BYTES)
    return found


def copier() -> DeviceCopier:
    """Return a copier that takes the CPU for a GPU."""
    made = DeviceCopier(torch.device("cuda", 0))
    made._device = CPU
    return made


def test_batches_are_whole_and_keep_their_content(order: list[str]) -> None:
    copy, found = copier(), []
    sizes = [STAGED_BYTES, STAGED_BYTES * 4, STAGED_BYTES * 2, 8]
    for number, size in enumerate(sizes):
        x = torch.full((size // 8, 2), number, dtype=torch.float32)
        y = torch.full((size // 8,), -number, dtype=torch.int64)
        found.append(copy({"x": x, "pair": (y, "text")}))
    for number, batch in enumerate(found):
        (y, text), x = batch["pair"], batch["x"]
        assert x.shape == (sizes[number] // 8, 2) and x.dtype == torch.float32 and text == "text"
        assert x.unique().tolist() == [number] and y.unique().tolist() == [-number]
    assert order.count("copies copy") == 6


def test_a_copy_waits_for_the_batch_before_and_not_for_its_kernels(order: list[str]) -> None:
    copy, batch = copier(), [torch.zeros(STAGED_BYTES), torch.zeros(2)]
    copy(batch)
    # New memory: kernels of before may use it.
    assert order == [
        "copies waits for kernels",
        "copies copy",
        "kernels waits for copies",
        "kernels took the batch",
    ]
    order.clear()
    copy(batch)
    assert order == [
        "copies waits for the batch before",
        "copies copy",
        "kernels waits for copies",
        "kernels took the batch",
    ]


def test_small_batches_take_no_event(order: list[str]) -> None:
    copy = copier()
    for number in range(3):
        assert copy([torch.full((3,), number)])[0].tolist() == [number] * 3
    assert order == []


class Marked(Tensor):
    """A tensor with more than its bytes."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(STAGED_BYTES // 4 - 1),
        torch.zeros(STAGED_BYTES // 4),  # not in pinned memory
        torch.zeros(2, STAGED_BYTES).T,
        torch.zeros(STAGED_BYTES).to_sparse(),
        torch.zeros(STAGED_BYTES, requires_grad=True),
        torch.zeros(STAGED_BYTES).as_subclass(Marked),
    ],
)
def test_other_tensors_are_copied_as_pytorch_does(tensor: Tensor) -> None:
    assert not is_staged(tensor)


def test_on_a_cpu_nothing_is_staged() -> None:
    batch = [torch.zeros(STAGED_BYTES)]
    assert DeviceCopier(CPU)(batch)[0] is batch[0]
