"""The private names of torch.distributed that the package depends on still exist and still work."""

from __future__ import annotations

import datetime
import gc
import inspect
import io
import pickle
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import zero_redundancy_optimizer
from torch.nn.parallel import DistributedDataParallel

from rankzero.training.distributed import torch_compat
from rankzero.training.distributed.torch_compat import no_foreign_objects


def test_the_private_names_exist() -> None:
    names = vars(dist.distributed_c10d)
    assert "_get_default_store" in names, "default_store() needs another way to the store"
    assert "set_timeout" in names or "_set_pg_timeout" in names, "set_timeout() needs another way"


@pytest.mark.usefixtures("group")
def test_the_default_store_is_the_groups() -> None:
    store = torch_compat.default_store()
    store.compare_set("key", "", "first")
    store.compare_set("key", "", "second")
    assert store.check(["key"]) and store.get("key") == b"first"


def test_there_is_no_store_without_a_group() -> None:
    assert torch_compat.default_store() is None


@pytest.mark.usefixtures("group")
def test_the_timeout_reaches_the_groups_backend() -> None:
    torch_compat.set_timeout(datetime.timedelta(seconds=77))
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=77)


@pytest.mark.usefixtures("group")
def test_only_gloo_and_distributed_errors_are_lost_connections() -> None:
    assert torch_compat.is_lost_connection(dist.DistNetworkError("the peer is gone"))
    peer = "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer"
    assert torch_compat.is_lost_connection(RuntimeError(peer))
    assert not torch_compat.is_lost_connection(RuntimeError("shape mismatch"))
    assert not torch_compat.is_lost_connection(OSError("gloo"))


@pytest.mark.usefixtures("group")
def test_objects_of_other_ranks_run_no_code() -> None:
    found: list[object] = [None]
    dist.all_gather_object(found, print)  # PyTorch's own unpickler takes any function
    assert found == [print]
    with no_foreign_objects(), pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
        dist.all_gather_object(found, print)
    with no_foreign_objects(), torch_compat.any_objects():
        dist.all_gather_object(found, print)
    dist.all_gather_object(found, print)  # a user's own collectives are as before


@pytest.mark.usefixtures("group")
def test_an_optimizers_numbers_of_numpy_are_sent_as_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, *_: sent.append(tensor.clone()))
    state = {
        "param_groups": [{"weight_decay": numpy.float64(0.01), "betas": (numpy.float32(0.5),)}]
    }
    torch_compat._broadcast_object(state, 0, None, torch.device("cpu"))
    received = torch.load(io.BytesIO(sent[1].numpy().tobytes()), weights_only=True)
    assert received == {"param_groups": [{"weight_decay": 0.01, "betas": (0.5,)}]}


@pytest.mark.usefixtures("group")
def test_shapes_pass_between_the_stages_of_a_pipeline() -> None:
    found: list[object] = [None]
    shape = {
        "shape": torch.Size([2]),
        "dtype": torch.bfloat16,
        "of": [torch.empty(2, device="meta")],
    }
    with no_foreign_objects():
        dist.all_gather_object(found, shape)
    assert str(found) == str([shape])


def test_the_function_by_which_zero_gathers_its_state_is_replaced() -> None:
    before = zero_redundancy_optimizer._broadcast_object
    with no_foreign_objects():
        assert zero_redundancy_optimizer._broadcast_object is torch_compat._broadcast_object
    assert zero_redundancy_optimizer._broadcast_object is before
    assert list(inspect.signature(before).parameters) == ["obj", "src_rank", "group", "device"]


@pytest.mark.usefixtures("group")
def test_two_forwards_of_a_batch_norm_may_have_one_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_in_2_11(ddp: Any) -> None:
        ddp._assign_modules_buffers()
        for buffer in ddp.modules_buffers:  # what another rank than 0 receives
            buffer.copy_(buffer.clone())

    monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", as_in_2_11)
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (plain := DistributedDataParallel(nn.BatchNorm1d(3)))(x).add(plain(-x)).sum().backward()
    replica = torch_compat.ddp_class()(model := nn.BatchNorm1d(3))
    replica(x).add(replica(-x)).square().sum().backward()
    alone = nn.BatchNorm1d(3)
    alone(x).add(alone(-x)).square().sum().backward()
    torch.testing.assert_close(model.bias.grad, alone.bias.grad)
    assert alone.running_var is not None
    torch.testing.assert_close(model.running_var, alone.running_var)


@pytest.mark.usefixtures("group")
def test_a_released_wrapper_frees_its_hooks_and_buckets() -> None:
    """Also while the garbage collector does not run."""

    class Noted:
        pass

    def hook(noted: Noted, bucket: Any) -> Any:
        calls.append(noted)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # PyTorch compares the annotations themselves, and this file's are texts.
    hook.__annotations__ = {}

    calls: list[Noted] = []
    model, first, second = torch.nn.Linear(2, 2), Noted(), Noted()
    old = DistributedDataParallel(model)
    old.register_comm_hook(first, hook)
    old(torch.ones(1, 2)).sum().backward()
    alive = weakref.ref(first)
    gc.disable()
    try:
        torch_compat.release(old)
        assert calls == [first]
        calls.clear()
        # Only the reducer, which has the buckets, still holds the hook's state.
        old._comm_hooks.clear()
        del first
        assert alive() is None, "the old wrapper's reducer is still there"
        new = DistributedDataParallel(model)
        new.register_comm_hook(second, hook)
        new(torch.ones(1, 2)).sum().backward()
    finally:
        gc.enable()
    assert calls == [second]
