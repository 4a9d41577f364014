"""The device of a rank, and its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rankzero.errors import UserError
from rankzero.ranks import Ranks
from rankzero.telemetry.host import core_count
from rankzero.training.distributed.device import choose, describe, set_threads
from rankzero.training.distributed.world import World


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("text", "count"), [("3", 3), ("5,2", 5), ("0", 1), (" 4 ", 4)])
def test_number_of_threads_is_that_of_openmps_first_level(
    monkeypatch: pytest.MonkeyPatch, text: str, count: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    set_threads(Ranks())
    assert torch.get_num_threads() == count


@pytest.mark.parametrize("text", [None, "", "all", ",2"])
def test_ranks_share_the_cores_if_no_number_is_set(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", text)
    torch.set_num_threads(7)
    set_threads(Ranks(0, 1, local_rank=0, local_world_size=1))
    assert torch.get_num_threads() == core_count()


@pytest.mark.parametrize(
    ("cuda", "hip", "tags"),
    [("13.2", None, {"rankzero.cuda": "13.2"}), (None, "6.4", {"rankzero.rocm": "6.4"})],
)
def test_a_pytorch_without_nccl_is_described(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None, tags: dict[str, str]
) -> None:
    def version() -> None:
        raise AttributeError("module 'torch._C' has no attribute '_nccl_version'")

    monkeypatch.setattr(torch.cuda.nccl, "version", version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L4")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = describe(World(Ranks(), torch.device("cuda", 0)))
    assert found["rankzero.gpu"] == "NVIDIA L4" and "rankzero.nccl" not in found
    versions = {"rankzero.cuda", "rankzero.rocm"} & found.keys()
    assert {name: found[name] for name in versions} == tags


def test_gpus_that_pytorch_cannot_use_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old.\nPlease update it")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    # The count comes from the driver's own library.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(
        UserError, match=r"machine's 8 GPUs, .* system is too old; .* CUDA_VISIBLE_DEVICES= to"
    ):
        choose(Ranks())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose(Ranks()).type == "cpu"
