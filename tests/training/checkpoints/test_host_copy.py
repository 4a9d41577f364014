"""Copies of a state on the host."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rankzero.training.checkpoints import host_copy


def test_pending_copy_waits_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event on one GPU's stream does not wait for the copies of another."""
    waited: list[str] = []

    class Recorded:
        def record(self, stream: str) -> None:
            self.stream = stream

        def synchronize(self) -> None:
            waited.append(self.stream)

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: f"of {gpu}")
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert host_copy.PendingCopy("state", host_copy.record_events(gpus)).wait() == "state"
    assert waited == ["of cuda:0", "of cuda:1"]
    assert host_copy.HostCopier().copy({"x": torch.zeros(1)}).arrived == []
