"""Loading processes: how they start, what they share with their rank, and how they end."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import socket
import subprocess
import sys
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils import pin_memory

from rankzero.errors import UserError
from rankzero.launch import agent, failures
from rankzero.launch.failures import DescribedError, FailureKind
from rankzero.launch.signals import SignalForwarder
from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import BatchOrder
from rankzero.training.data.processes import loader_workers, make_loader
from support import awkward
from support.paths import SUPPORT

CPU = torch.device("cpu")


def feed(dataset: Any, workers: int, collate: Any = default_collate) -> BatchLoader:
    return BatchLoader(dataset, CPU, seed=3, workers=workers, collate=collate)


def test_ranks_load_what_cannot_be_sent_between_processes(tmp_path: Path) -> None:
    """A lambda, a local class, an open file, 400 tensors; and a scheduler signals all processes."""
    with SignalForwarder() as signals:
        result = agent.run(
            agent.Topology(2), awkward.load, str(tmp_path), tmp_path / "logs", signals
        )
    assert result == agent.LaunchResult("FINISHED")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    values = [value for one in found for value in one["values"]]
    assert sorted(values) == [2 * number + 1000 for number in range(400)]
    assert not any(one["stopped"] for one in found)


def test_each_loading_process_has_its_own_position_in_an_open_file(tmp_path: Path) -> None:
    dataset = awkward.Filed(96, tmp_path / "numbers")
    with dataset.reading as file:
        file.seek(80)
        batches = feed(dataset, workers=2).train_batches(BatchOrder(96, 8, 8, 1, 3), 0, 0, 12)
        assert sorted(value for batch in batches for value in batch.tolist()) == list(range(96))
        assert file.tell() == 80


class Handed(Dataset[Any]):
    """Its items say where this process hands over open files."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        address = reduction.DupFd(1)._id[0]
        return torch.tensor(list(address.encode()))


def test_a_loading_process_is_silent_if_its_rank_is_killed_while_it_takes_a_batch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    batches = feed(Handed(), workers=1).train_batches(BatchOrder(8, 1, 1, 1, 3), 0, 0, 8)
    address = bytes(next(batches)[0].tolist()).decode()
    # A rank that is killed leaves a connection with an unread challenge: the first one here.
    connections = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for connection in connections:
        connection.connect(address)
    connections[0].close()
    # The thread answers one after the other.
    assert connections[1].recv(4)
    connections[1].close()
    assert len(list(batches)) == 7
    assert capfd.readouterr().err == ""


def test_batches_of_many_tensors_get_enough_open_files() -> None:
    class Parts(Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return [torch.tensor([index])] * 40

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        loader = feed(Parts(), 1, collate=lambda samples: [t.clone() for s in samples for t in s])
        batches = list(loader.train_batches(BatchOrder(64, 8, 8, 1, 3), 0, 0, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [len(batch) for batch in batches] == [320] * 8


class Broken(Dataset[Any]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise self.error
        return index


class Unsendable(Exception):
    """Made of two values, so that no process can unpickle it."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_sample_is_one_line_with_the_users_line(workers: int) -> None:
    order = BatchOrder(20, 5, 5, 1, 3)

    def failure(error: Exception) -> failures.Failure:
        with pytest.raises(DescribedError) as caught:
            list(feed(Broken(error), workers).train_batches(order, 0, 0, 4))
        return failures.describe(caught.value, 2)

    found = failure(KeyError("label"))
    line = Broken.__getitem__.__code__.co_firstlineno + 2
    assert found.reason == (
        f"KeyError: 'label' ({__file__}, line {line}, in __getitem__): sample 7 of the training set"
    )
    assert found.rank == 2 and found.error.count("Traceback") == 1
    assert failure(Unsendable("this", "that")).reason.startswith("Unsendable: this and that (")
    assert failure(MemoryError()).kind == FailureKind.OUT_OF_HOST_MEMORY
    mendable = failure(UserError("no labels: run make_labels.py"))
    assert mendable.kind == FailureKind.USER_ERROR
    assert mendable.reason == "no labels: run make_labels.py: sample 7 of the training set"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_collate_names_its_line_and_samples(workers: int) -> None:
    def collate(samples: list[int]) -> Any:
        raise ValueError("shapes differ")

    with pytest.raises(DescribedError) as caught:
        list(feed(list(range(4)), workers, collate).eval_batches(2, 0, 1))
    pattern = r"ValueError: shapes differ \(.*test_processes.py, line \d+, in collate\): "
    pattern += r"collate\(\) of samples 0, 1 of the validation set"
    assert re.fullmatch(pattern, str(caught.value))


def test_a_batch_that_cannot_be_sent_is_an_error_with_its_cause() -> None:
    weight = nn.Parameter(torch.ones(3))
    batches = feed([1.0] * 4, 1, lambda samples: weight * 2).eval_batches(2, 0, 1)
    with pytest.raises(DescribedError, match=r"Cowardly refusing .*: .* batch, a Tensor: return"):
        next(batches)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


class OnGpu:
    """Moves and pins itself, as a graph of PyTorch Geometric does."""

    def to(self, device: torch.device) -> OnGpu:
        return self

    def pin_memory(self) -> OnGpu:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")


@pytest.mark.parametrize("graph", [OnGpu(), nn.utils.rnn.pack_sequence([torch.zeros(2)])])
def test_what_is_on_a_gpu_is_not_pinned_and_all_else_is(
    monkeypatch: pytest.MonkeyPatch, graph: Any
) -> None:
    # This machine may have no GPU. PyTorch calls its function for what a loader yields.
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: torch.full_like(tensor, 7))
    gpu, failed = torch.zeros(2, device="meta"), failures.Failure(0.0, 0, "no sample", "")
    batch = Pair(torch.zeros(2), {"there": gpu, "here": [torch.zeros(2), "text"], "graph": graph})
    loader = make_loader([(batch, 2), failed, None, (graph, 1)], CPU, 0)
    items = [pin_memory.pin_memory(loaded).item for loaded in loader]
    (found, samples), alone = items[0], items[3][0]
    assert found.x.tolist() == [7, 7] and samples == 2 and found.y["there"] is gpu
    assert found.y["here"][0].tolist() == [7, 7] and found.y["here"][1] == "text"
    assert items[1:3] == [failed, None]
    for one in (found.y["graph"], alone):
        assert one is graph if isinstance(graph, OnGpu) else one.data.tolist() == [7, 7]


def test_loading_processes_use_the_cores_that_training_leaves() -> None:
    assert [loader_workers(None, ranks, cores=16) for ranks in (1, 2, 4, 16)] == [8, 7, 3, 0]
    assert loader_workers(5, 16, cores=16) == 5


def test_a_rank_that_ends_in_an_epoch_does_not_wait_for_its_loading_processes() -> None:
    program = SUPPORT / "loading.py"
    done = subprocess.run(
        [sys.executable, program, "default", "ends"], stdout=subprocess.PIPE, timeout=60, check=True
    )
    pids = [int(word) for word in done.stdout.split()]
    assert pids and not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("method", ["default", "forkserver", "fork", "spawn"])
def test_loading_processes_end_with_a_killed_rank(method: str) -> None:
    """A fork server is their parent if the user chose one, and lives on as long as they do."""
    program = SUPPORT / "loading.py"
    with subprocess.Popen([sys.executable, program, method], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        loading = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(loading) == 2
        rank.kill()
    _, alive = psutil.wait_procs(loading, timeout=20)
    for one in alive:
        one.kill()
    assert not alive
