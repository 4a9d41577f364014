"""Copies of a state on the host."""

from __future__ import annotations

import collections
import contextlib
import enum
import io
import weakref
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankzero.errors import UserError
from rankzero.training.checkpoints import host_copy
from rankzero.training.checkpoints.host_memory import room_for


def on_gpu(number: int) -> type[torch.Tensor]:
    class OnGpu(torch.Tensor):
        device = property(lambda self: torch.device("cuda", number))

    return OnGpu


def test_pending_copy_waits_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event on one GPU's stream does not wait for the copies of another."""
    streams: dict[Any, mock.Mock] = collections.defaultdict(mock.Mock)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    state = {number: torch.zeros(1).as_subclass(on_gpu(number % 2)) for number in range(3)}
    host_copy.HostCopier().copy(state).wait()
    assert set(streams) == {torch.device("cuda", 0), torch.device("cuda", 1)}
    for stream in streams.values():
        stream.record_event.return_value.synchronize.assert_called_once_with()
    assert host_copy.HostCopier().copy({"x": torch.zeros(1)}).arrived == []


def test_copy_goes_to_ordinary_memory_if_none_can_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, make = [], torch.empty_like

    def empty_like(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    source = torch.arange(6.0).view(2, 3).t()
    copied = host_copy.HostCopier().copy({"x": source.as_subclass(on_gpu(0))}).state["x"]
    assert asked == [True, False]
    assert torch.equal(copied.as_subclass(torch.Tensor), source)
    assert copied.stride() == source.stride()


class _Mode(str, enum.Enum):  # noqa: UP042 — its str() is not its value
    MIN = "min"


def test_numbers_of_numpy_and_of_subclasses_become_plain() -> None:
    model = torch.nn.Linear(2, 1)
    betas = (numpy.float64(0.5), numpy.float64(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=numpy.float64(0.01))
    optimizer.param_groups[0]["mode"] = _Mode.MIN
    optimizer.param_groups[0]["eps"] = numpy.float32(0.5)
    state = {numpy.int64(3): optimizer.state_dict(), _Mode.MIN: numpy.bool_(True)}
    copied = host_copy.HostCopier().copy(state).wait()
    content = io.BytesIO()
    torch.save(copied, content)
    loaded = torch.load(io.BytesIO(content.getbuffer()), weights_only=True)
    group = loaded[3]["param_groups"][0]
    assert type(group["eps"]) is float
    assert (group["betas"], group["weight_decay"], group["mode"]) == ((0.5, 0.999), 0.01, "min")
    assert loaded["min"] is True


class Named(torch.Tensor):
    """As MONAI's MetaTensor: what is computed from a batch has its class, too."""


def test_tensors_of_a_subclass_become_plain() -> None:
    mean = torch.ones(3).as_subclass(Named) * 2
    copier, content = host_copy.HostCopier(), io.BytesIO()
    for _ in range(2):
        copied = copier.copy({"model": {"mean": mean}}).wait()
    assert type(mean) is Named and type(copied["model"]["mean"]) is torch.Tensor
    torch.save(copied, content)
    loaded = torch.load(io.BytesIO(content.getbuffer()), weights_only=True)
    assert loaded["model"]["mean"].tolist() == [2, 2, 2]


class Wrapping(torch.Tensor):
    """As quantized weights, of a class that PyTorch does not know as safe."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Wrapping:
        return cls(func(*(getattr(one, "inner", one) for one in args), **(kwargs or {})))


def test_a_tensor_that_could_not_be_loaded_again_is_refused() -> None:
    copier = host_copy.HostCopier()
    for _ in range(2):
        with pytest.raises(UserError, match=r"model.weight is a .*\.Wrapping, which could not be"):
            copier.copy({"model": {"weight": Wrapping(torch.ones(3))}})


def test_an_object_that_has_every_attribute_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model is a .*MagicMock, which could not be"):
        host_copy.HostCopier().copy({"model": mock.MagicMock()})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_of_a_tensor_is_refused(ranks: int) -> None:
    """The others save nothing, and each of them would load rank 0's part."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    refused = pytest.raises(UserError, match=r"^model\.w is a DTensor, .*full_state_dict=True")
    try:
        weight = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (ranks,)))
        with refused if ranks > 1 else contextlib.nullcontext():
            host_copy.HostCopier().copy({"model": {"w": weight}})
    finally:
        torch.distributed.destroy_process_group()


def test_prepared_memory_is_that_of_the_copy() -> None:
    copier, weights = host_copy.HostCopier(), torch.arange(5000.0)
    state = {"a": weights, "b": torch.ones(4, 5).t(), "c": torch.ones(3, dtype=torch.bfloat16)}
    size = sum(map(room_for, state.values()))
    copier.prepare(size, lambda: False, for_gpu=False)
    assert copier._memory is not None
    begin = copier._memory._address
    copied = copier.copy({**state, "d": {"w": torch.zeros(5000)}}).wait()
    assert all(torch.equal(copied[key], state[key]) for key in "abc")
    inside = {
        path[-1]
        for path, buffer in copier._buffers.items()
        if 0 <= buffer.data_ptr() - begin < size
    }
    # The transposed one is not contiguous, and there is no room for the last.
    assert inside == {"a", "c"} and copied["b"].stride() == state["b"].stride()


def test_buffer_of_a_key_that_is_gone_is_freed() -> None:
    copier = host_copy.HostCopier()
    first = weakref.ref(copier.copy({"epoch_1": torch.zeros(1)}).state["epoch_1"])
    copier.copy({"epoch_2": torch.zeros(1)})
    assert first() is None
