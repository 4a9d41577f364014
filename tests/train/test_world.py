"""The way to the other processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rankzero.tracking.ranks import Ranks
from rankzero.train import launch, world
from rankzero.train.launch import Nodes
from rankzero.train.world import World
from train.two_ranks import waits


@pytest.mark.parametrize("content", [b"", b"12345", b"1234567890", b"12345678901"])
def test_what_is_large_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    wire: list[Tensor] = []
    monkeypatch.setattr(world, "PIECE_BYTES", 5)
    sender, receiver = (World(Ranks(rank, 2), torch.device("cpu")) for rank in (0, 1))
    monkeypatch.setattr(dist, "broadcast", lambda buffer, source: wire.append(buffer.clone()))
    assert sender.broadcast(content) == content
    assert all(len(piece) <= 5 for piece in wire)
    monkeypatch.setattr(dist, "broadcast", lambda buffer, source: buffer.copy_(wire.pop(0)))
    assert receiver.broadcast(b"") == content and not wire


def test_who_waits_is_not_ended_by_the_process_group_before_the_watchdog_names_who_hangs(tmp_path: Path) -> None:
    launch.run(Nodes(2), waits, tmp_path, tmp_path / "logs")
    assert [float((tmp_path / str(rank)).read_text()) for rank in (0, 1)] == [86400, 86400]
