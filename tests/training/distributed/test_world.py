"""Collectives, and their timeouts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.events import RunEnded
from rankzero.launch import agent, rendezvous
from rankzero.launch.agent import Topology
from rankzero.launch.request import make_folder, request_for
from rankzero.launch.signals import SignalForwarder
from rankzero.ranks import Ranks
from rankzero.run_store.folder import Identity
from rankzero.training.distributed.world import World, agreed_device, join, world_of_process_group
from support.runs import of_kind
from support.two_ranks import LAYERED, layered, waits


@pytest.mark.parametrize(
    ("config", "bound", "current", "environ", "device"),
    [
        # "cuda:nccl" is also that of a group without a named backend, which is "undefined".
        ("cuda:nccl", None, 0, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "cuda:1"),
        ("cuda:nccl", None, 0, {}, "cuda:3"),
        ("cuda:nccl", None, 2, {}, "cuda:2"),
        ("cuda:nccl", torch.device("cuda", 1), 0, {}, "cuda:1"),
        ("cpu:gloo", None, 2, {}, "cpu"),
        ("cpu:gloo,cuda:gloo", None, 2, {}, "cpu"),
        ("cuda:nccl,cpu:gloo", None, 2, {}, "cpu"),
    ],
)
def test_ranks_of_a_users_group_have_a_device_each_that_its_backends_take(
    config: str,
    bound: torch.device | None,
    current: int,
    environ: dict[str, str],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    facts: dict[str, Any] = {"is_initialized": True, "get_rank": 3, "get_world_size": 4}
    facts |= {"get_backend": "undefined", "get_backend_config": config}
    for name, fact in facts.items():
        monkeypatch.setattr(dist, name, lambda fact=fact: fact)
    monkeypatch.setattr(
        dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    world = world_of_process_group()
    assert world is not None and world.device == torch.device(device) and world.ranks.rank == 3


@pytest.mark.parametrize("content", [b"", b"12345", b"1234567890", b"12345678901"])
def test_large_content_is_broadcast_in_pieces(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    wire: list[Tensor] = []
    sender, receiver = (World(Ranks(rank, 2), torch.device("cpu")) for rank in (0, 1))
    monkeypatch.setattr(dist, "broadcast", lambda buffer, source: wire.append(buffer.clone()))
    assert sender.broadcast(content, piece_bytes=5) == content
    assert all(len(piece) <= 5 for piece in wire)
    monkeypatch.setattr(dist, "broadcast", lambda buffer, source: buffer.copy_(wire.pop(0)))
    assert receiver.broadcast(b"", piece_bytes=5) == content and not wire


def test_values_on_the_host_are_summed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", summed.append)
    # A device without memory stands for a GPU.
    device = torch.device("meta")
    found = World(Ranks(0, 2), device).sum(torch.ones(3))
    (taken,) = summed
    assert taken.device == found.device == device, "NCCL refuses it"
    alone = torch.ones(3)
    assert World(Ranks(), device).sum(alone) is alone and len(summed) == 1


def test_a_rank_alone_does_not_ask_its_device_for_agreement() -> None:
    # A device without memory gives no answers.
    alone = World(Ranks(), torch.device("meta"))
    assert alone.all(True) and not alone.all(False)


def chosen(*choices: str | Exception) -> list[str]:
    """Return what each rank gets, or its error. `choices`: of each rank; a device, or an error."""
    store, found = dist.HashStore(), [""] * len(choices)

    def choose(ranks: Ranks) -> torch.device:
        choice = choices[ranks.rank]
        if isinstance(choice, Exception):
            raise choice
        return torch.device(choice)

    def rank(number: int) -> None:
        try:
            found[number] = str(agreed_device(store, Ranks(number, len(choices)), choose))
        except UserError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=rank, args=(one,)) for one in range(len(choices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_ranks_of_several_machines_agree_on_their_kind_of_device() -> None:
    assert chosen("cuda:0", "cuda:1") == ["cuda:0", "cuda:1"]
    for error in (differ := chosen("cuda:0", "cuda:1", "cpu")):
        assert error.startswith("rank 0 on cuda and rank 2 on cpu cannot train together: let every")
    assert len(differ) == 3


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_without_a_device_ends_the_others_at_once(broken: int) -> None:
    choices: list[str | Exception] = ["cuda:0", "cuda:0"]
    choices[broken] = UserError("the driver is too old")
    found = chosen(*choices)
    assert found[broken] == "the driver is too old"
    assert found[1 - broken] == f"rank {broken} has no device: the driver is too old"


def test_buffers_of_any_strides_are_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    wire: list[Tensor] = []

    def module(value: float) -> nn.Module:
        made, images = nn.Module(), torch.full((2, 3, 4, 4), value)
        made.register_buffer("plain", torch.full((4, 6), value))
        made.register_buffer("turned", torch.full((4, 6), value).t())
        made.register_buffer("gaps", torch.full((4, 6), value)[:, ::2])
        made.register_buffer("images", images.to(memory_format=torch.channels_last))
        made.register_buffer("expanded", torch.full((1,), value).expand(3))
        return made

    def send(tensor: Tensor, source: int) -> None:
        assert source == 0 and tensor.is_contiguous(), "NCCL refuses it"
        wire.append(tensor.clone())

    sender, receiver = (World(Ranks(rank, 2), torch.device("cpu")) for rank in (0, 1))
    monkeypatch.setattr(dist, "broadcast", send)
    sender.broadcast_buffers(module(1.0))
    received = module(2.0)
    strides = [one.stride() for one in received.buffers()]
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: tensor.copy_(wire.pop(0)))
    receiver.broadcast_buffers(received)
    values = {name: one.unique().tolist() for name, one in received.named_buffers()}
    assert values.pop("expanded") == [2.0] and set(map(tuple, values.values())) == {(1.0,)}
    assert [one.stride() for one in received.buffers()] == strides and not wire


def test_several_gpus_without_nccl_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous.use_folder(str(tmp_path), environment := dict[str, str]())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with (
        pytest.raises(UserError, match=r"2 processes on GPUs need a PyTorch .* NCCL: .* --nproc 1"),
        join(Ranks(0, 2), lambda _: torch.device("cuda", 0)),
    ):
        pass


@pytest.mark.parametrize(("strategy", "groups"), [("fsdp", 1), ("pp", 2)])
def test_collectives_wait_longer_than_the_watchdog_and_the_peak_is_of_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, groups: int
) -> None:
    monkeypatch.setenv("RANKZERO_DELIVERY_GRACE_SECONDS", "0")
    identity = Identity(
        "waits", "0" * 32, "hangs", "http://127.0.0.1:9", experiment_file=str(LAYERED)
    )
    request = request_for(
        make_folder(tmp_path, identity), layered(train__strategy=strategy, train__steps=2), {}
    )
    with SignalForwarder() as signals:
        result = agent.run(Topology(2), waits, request, tmp_path / "logs", signals)
    assert result.status == "FINISHED", result
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert [seconds for seconds, *_ in found] == [[86400] * groups] * 2
    (end,) = of_kind(tmp_path / "waits", RunEnded)
    assert end.metrics["peak_memory_megabytes"] > found[0][1] + 100, found
