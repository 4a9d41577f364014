"""The private names of torch.distributed that the package depends on still exist and still work."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rankzero.training.distributed import torch_compat


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
