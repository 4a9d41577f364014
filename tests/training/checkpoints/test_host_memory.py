"""Memory for the first copies, without a GPU: CUDA's two functions are stand-ins.

benchmarks/gpu/checkpoints.py calls the real ones.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rankzero.training.checkpoints.host_copy import HostCopier
from rankzero.training.checkpoints.host_memory import HostMemory, room_for


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
def made_tensors(draw: st.DrawFn) -> Tensor:
    one = torch.empty(draw(SHAPES), dtype=draw(DTYPES))
    is_last = one.dim() == 4 and draw(st.booleans())
    return one.to(memory_format=torch.channels_last) if is_last else one


@given(st.lists(made_tensors(), max_size=6))
def test_each_tensor_has_memory_of_its_own(sources: list[Tensor]) -> None:
    memory = HostMemory(sum(map(room_for, sources)), for_gpu=True)
    memory.touch(lambda: False)
    tensors = []
    for source in sources:
        one = memory.take(source)
        assert (one is None) == (not source.numel())
        if one is not None:
            assert (one.shape, one.stride()) == (source.shape, source.stride())
            assert one.dtype == source.dtype
            tensors.append(one)
    assert memory.take(torch.ones(1)) is None, "there is no more"
    for number, one in enumerate(tensors):
        one.copy_(torch.full_like(one, number % 2))
    for number, one in enumerate(tensors):
        assert (one == number % 2).all()
        # A checkpoint's file has a tensor's own bytes, and not those of its neighbours.
        assert one.untyped_storage().nbytes() == one.nbytes
        file = io.BytesIO()
        torch.save(one, file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=True), one)


def test_only_plain_tensors_without_gaps_have_room() -> None:
    class Own(Tensor):
        pass

    odd = torch.ones(3).as_subclass(Own), torch.ones(3).to_sparse(), torch.ones(2, 3).t()
    odd = (*odd, torch.ones(1).expand(5), torch.ones(2, device="meta"))
    assert [room_for(one) for one in odd] == [0] * 5
    assert room_for(torch.nn.Parameter(torch.ones(65))) == 512
    assert room_for(torch.tensor(1)) == 256


def test_touching_ends_once_it_is_hurried() -> None:
    asked: list[Any] = []
    memory = HostMemory(4 << 23, for_gpu=True)
    memory.touch(lambda: bool(asked.append(0)) or len(asked) == 2)
    assert len(asked) == 2
    assert memory.take(torch.empty(1 << 23)) is not None


def test_memory_is_locked_once_and_given_back(cuda: Cuda) -> None:
    copier = HostCopier()
    copier.prepare(256, lambda: False, for_gpu=True)
    assert not cuda.locked  # not in the thread
    state = {"a": torch.ones(3)}
    first = copier.copy(state).wait()
    assert len(cuda.locked) == (1 if cuda.status == 0 else 0)
    # What CUDA refuses is not kept: buffers of the same size follow.
    assert (copier._memory is None) == (cuda.status != 0)
    assert torch.equal(copier.copy(state).wait()["a"], first["a"])
    copier.close()
    assert not cuda.locked and torch.equal(first["a"], torch.ones(3))
    copier.close()


def test_copier_without_a_gpu_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("there is no GPU"))
    copier = HostCopier()
    copier.prepare(256, lambda: False, for_gpu=False)
    assert torch.equal(copier.copy({"a": torch.ones(3)}).wait()["a"], torch.ones(3))
    copier.close()
