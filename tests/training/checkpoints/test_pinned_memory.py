"""Page-locked memory, without a GPU: CUDA's two functions are stand-ins.

benchmarks/gpu/checkpoints.py calls the real ones.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankzero.training.checkpoints.host_copy import HostCopier, kind_of
from rankzero.training.checkpoints.pinned_memory import Kind, PinnedMemory


class Cuda:
    """CUDA's runtime, which refuses with `status`."""

    def __init__(self, status: int) -> None:
        self.status, self.locked = status, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0 and address % 4096 == 0
        if not self.status:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture(params=[0, 2], ids=["takes it", "has no memory"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda(request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(torch.Size)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@st.composite
def kinds_of_tensors(draw: st.DrawFn) -> Kind:
    one = torch.empty(draw(SHAPES), dtype=draw(DTYPES))
    if one.dim() == 4 and draw(st.booleans()):
        one = one.to(memory_format=torch.channels_last)
    found = kind_of(one)
    assert found is not None
    return found._replace(device="cuda")


@given(st.lists(kinds_of_tensors(), max_size=6))
def test_each_tensor_has_memory_of_its_own(kinds: list[Kind]) -> None:
    memory = PinnedMemory(kinds)
    memory.touch(lambda: False)
    tensors = list(memory.tensors())
    assert [Kind(one.shape, one.stride(), one.dtype, "cuda") for one in tensors] == kinds
    for number, one in enumerate(tensors):
        one.copy_(torch.full_like(one, number % 2))
    for number, one in enumerate(tensors):
        assert (one == number % 2).all()
        # A checkpoint's file has a tensor's own bytes, and not those of its neighbours.
        assert one.untyped_storage().nbytes() == one.nbytes
        file = io.BytesIO()
        torch.save(one, file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=True), one)


def test_touching_ends_once_it_is_hurried() -> None:
    asked: list[Any] = []
    memory = PinnedMemory([Kind(torch.Size([1 << 23]), (1,), torch.float32, "cuda")])
    memory.touch(lambda: bool(asked.append(0)) or len(asked) == 2)
    assert len(asked) == 2
    assert next(memory.tensors()).shape == (1 << 23,)


def test_memory_is_locked_once_and_given_back(cuda: Cuda) -> None:
    copier, kind = HostCopier(), Kind(torch.Size([3]), (1,), torch.float32, "cuda")
    copier.prepare([kind], lambda: False)
    assert not cuda.locked  # not in the thread
    state = {"a": torch.ones(3)}
    first = copier.copy(state).wait()
    assert len(cuda.locked) == (1 if cuda.status == 0 else 0)
    # What CUDA refuses is not kept: buffers of the same size follow.
    assert (copier._pinned is None) == (cuda.status != 0)
    assert torch.equal(copier.copy(state).wait()["a"], first["a"])
    copier.close()
    assert not cuda.locked and torch.equal(first["a"], torch.ones(3))
    copier.close()


def test_copier_without_a_gpu_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("there is no GPU"))
    copier = HostCopier()
    copier.prepare([Kind(torch.Size([3]), (1,), torch.float32, "cpu")], lambda: False)
    assert torch.equal(copier.copy({"a": torch.ones(3)}).wait()["a"], torch.ones(3))
    copier.close()
