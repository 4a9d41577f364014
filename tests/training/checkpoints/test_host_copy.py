"""Copies of a state on the host."""

from __future__ import annotations

import contextlib
import enum
import io

import numpy
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


def test_prepared_buffers_are_those_of_the_copy() -> None:
    copier, weights = host_copy.HostCopier(), torch.arange(5000.0)
    state = {"model": {"w": weights, "b": torch.ones(3, dtype=torch.bfloat16), "n": weights[0]}}
    copier.prepare(state, lambda: False)
    prepared = {path: buffer.data_ptr() for path, buffer in copier._buffers.items()}
    copied = copier.copy(state).wait()["model"]
    assert len(prepared) == 3 and prepared["model", "w"] == copied["w"].data_ptr()
    assert torch.equal(copied["w"], weights) and torch.equal(copied["b"], state["model"]["b"])
    assert {path: buffer.data_ptr() for path, buffer in copier._buffers.items()} == prepared


def test_preparation_ends_once_it_is_hurried() -> None:
    copier, state = (
        host_copy.HostCopier(),
        {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)},
    )
    asked = iter([False, True, True])
    copier.prepare(state, lambda: next(asked))
    assert list(copier._buffers) == [("a",)]
    assert set(copier.copy(state).wait()) == {"a", "b", "c"}
