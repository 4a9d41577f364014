"""The processes that train together, and their collectives.

Strategies have collectives of their own. All others are here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankzero.errors import UserError
from rankzero.launch import failures, rendezvous
from rankzero.launch.failures import Failure
from rankzero.ranks import Ranks, detect
from rankzero.redaction.text import text_without_secrets
from rankzero.run_store import lock_files
from rankzero.training.distributed import torch_compat

# A checkpoint may be larger than the free memory of a GPU, so it is sent in pieces.
_PIECE_BYTES = 64 << 20
# Before the watchdog starts, a rank may wait for another that loads its data.
_SETUP_TIMEOUT = datetime.timedelta(minutes=30)
# Afterwards the watchdog ends a rank that hangs, and names it.
TRAINING_TIMEOUT = datetime.timedelta(days=1)
# How long a failing peer may take to report why.
_FAILURE_SECONDS = 2.0
# Between two looks for a peer's failure.
LOOK_SECONDS = 1.0
# For a rank that still starts its GPU while another one has failed to.
_LAST_LOOK = datetime.timedelta(seconds=30)
_FAILURE_KEY, _DEVICE_KEY = "rankzero/failure", "rankzero/device"
_AGREEMENT_KEY, _AGREED = "rankzero/devices", "agreed"


@dataclasses.dataclass(frozen=True)
class World:
    """This process, its device, and the other ranks. A world of one has no process group."""

    ranks: Ranks
    device: torch.device
    clock: Callable[[], float] = time.perf_counter

    @property
    def size(self) -> int:
        return self.ranks.world_size

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.size > 1

    def now(self) -> float:
        """Return the time in seconds once the device has done all that was launched on it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def sum(self, values: Tensor) -> Tensor:
        """Return `values` added over all ranks, the same bits on each, and change them. Collective.

        Values on the host are moved to the device. NCCL takes no others.
        """
        if self.is_distributed:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return every rank's `values` (1-d, equally long) as [world size, length]. Collective."""
        if not self.is_distributed:
            return values.unsqueeze(0)
        mine = values.to(self.device)
        gathered = mine.new_empty(self.size * len(mine))
        dist.all_gather_into_tensor(gathered, mine)
        return gathered.view(self.size, -1).to(values.device)

    def highest(self, *mine: float) -> list[float]:
        """Return the largest of each number over all ranks. Collective, not for each report."""
        largest: list[float] = self.gather(torch.tensor(mine, dtype=torch.float64)).amax(0).tolist()
        return largest

    def all(self, answer: bool) -> bool:
        """Return whether every rank's `answer` is true. Collective, not for each step."""
        # Alone, no question to the device: it would wait for all of its work.
        if not self.is_distributed:
            return answer
        answers = torch.tensor([answer], dtype=torch.int64, device=self.device)
        return int(self.sum(answers)) == self.size

    def ranks_that_differ(self, values: Tensor) -> list[int]:
        """Return the ranks whose `values` (1-d) are not bit for bit rank 0's. Collective."""
        if not self.is_distributed:
            return []
        found = self.gather(values)
        return [int(rank) for rank in (found != found[0]).any(dim=1).nonzero().flatten()]

    def local_processes(self) -> dict[int, int]:
        """Return the process ids of this node's ranks, by rank. Collective, for start-up only."""
        processes = self.gather(torch.tensor([os.getpid()])).flatten().tolist()
        first = self.ranks.rank - self.ranks.local_rank
        local = range(first, min(first + self.ranks.local_world_size, self.size))
        return {rank: processes[rank] for rank in local}

    def share(self, value: Any, source: int = 0) -> Any:
        """Return one rank's `value`, of which JSON is made, on every rank. As `broadcast`."""
        return json.loads(self.broadcast(json.dumps(value).encode(), source))

    def broadcast(
        self, content: bytes, source: int = 0, *, piece_bytes: int = _PIECE_BYTES
    ) -> bytes:
        """Return one rank's `content` on every rank. Collective, too slow for the loop."""
        if not self.is_distributed:
            return content
        length = torch.tensor([len(content)], device=self.device)
        dist.broadcast(length, source)
        received = bytearray()
        while len(received) < int(length):
            size = min(piece_bytes, int(length) - len(received))
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            if self.ranks.rank == source:
                piece = bytearray(content[len(received) : len(received) + size])
                buffer.copy_(torch.frombuffer(piece, dtype=torch.uint8))
            dist.broadcast(buffer, source)
            received += buffer.cpu().numpy().tobytes()
        return bytes(received)

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give every rank rank 0's buffers (running statistics). Collective."""
        for buffer in module.buffers() if self.is_distributed else ():
            # Nothing can write into an expanded tensor in place, so no training changes it.
            if any(s == 0 and n > 1 for s, n in zip(buffer.stride(), buffer.shape, strict=True)):
                continue
            # NCCL refuses a tensor with gaps.
            sent = buffer.contiguous()
            dist.broadcast(sent, 0)
            if sent is not buffer:
                buffer.copy_(sent)

    def extend_timeouts(self) -> None:
        """Let later collectives take long, once a watchdog runs."""
        # With its own shorter limit, NCCL would end the ranks that wait before the watchdog ends
        # the one that hangs.
        if self.is_distributed:
            torch_compat.set_timeout(TRAINING_TIMEOUT)

    def report_failure(self, failure: Failure) -> None:
        """Store this rank's failure where the other ranks can find it. The first one stays."""
        # The store may be gone with the node that served it. The rank fails anyway.
        with contextlib.suppress(Exception):
            store = torch_compat.default_store()
            if store is not None:
                store.compare_set(_FAILURE_KEY, "", json.dumps(dataclasses.asdict(failure)))
        if self.device.type == "cuda" and self.ranks.node_count > 1:
            # The end of this rank may let NCCL kill others. They look for the reason until then.
            time.sleep(2 * LOOK_SECONDS)

    def failure_reader(self) -> Callable[[], Failure | None] | None:
        """Return what gets the first failure of any rank, for one other thread; None if alone."""
        store = torch_compat.default_store() if self.is_distributed else None
        if store is None:
            return None
        # A connection of its own: a thread that waits for an answer keeps the others out.
        with contextlib.suppress(Exception):  # no more sockets: only the reason would be missing
            return functools.partial(_failure_in, store.clone())
        return None

    def first_failure(self) -> Failure | None:
        """Return the failure that another rank reported, after a short wait, or None."""
        # As above: without the store, this rank reports its own failure.
        with contextlib.suppress(Exception):
            store = torch_compat.default_store()
            deadline = time.monotonic() + _FAILURE_SECONDS
            while store is not None and time.monotonic() < deadline:
                if (found := _failure_in(store)) is not None:
                    return found
                time.sleep(0.1)
        return None


def _failure_in(store: Any) -> Failure | None:
    if not store.check([_FAILURE_KEY]):
        return None
    return failures.parse(json.loads(store.get(_FAILURE_KEY)))


@contextlib.contextmanager
def join(ranks: Ranks, choose: Callable[[Ranks], torch.device]) -> Iterator[World]:
    """Join the job's other processes for the duration of the block. Collective.

    `choose`: returns this rank's device. Raises UserError, as `agreed_device` does.
    """
    if ranks.world_size == 1:
        yield World(ranks, choose(ranks))
        return
    if rendezvous.is_one_machine():
        rendezvous.keep_gloo_on_loopback()
        device, store = choose(ranks), rendezvous.private_store(ranks, _SETUP_TIMEOUT)
    else:
        lock_files.allow_many_files()  # rank 0 serves two connections of each rank
        store = rendezvous.shared_store(ranks, _SETUP_TIMEOUT)
        try:
            device = agreed_device(store, ranks, choose)
        except Exception:
            if ranks.first:
                # Its process serves the store. So it ends after the others have read the reason.
                every = [f"{_DEVICE_KEY}/{rank}" for rank in range(ranks.world_size)]
                with contextlib.suppress(Exception):
                    store.wait(every, _LAST_LOOK)
                time.sleep(LOOK_SECONDS)
            raise
    on_gpu = device.type == "cuda"
    if on_gpu and not dist.is_nccl_available():
        raise UserError(
            f"{ranks.world_size} processes on GPUs need a PyTorch that is built with NCCL: install "
            "one, or use --nproc 1"
        )
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device_id=device if on_gpu else None,
        timeout=_SETUP_TIMEOUT,
    )
    yield World(ranks, device)
    # Only after success: a rank that failed must end, and not wait for peers that are gone.
    # Leaving while a peer still talks makes gloo abort the process (seen with PyTorch 2.15).
    dist.barrier()
    dist.destroy_process_group()


def agreed_device(store: Any, ranks: Ranks, pick: Callable[[Ranks], torch.device]) -> torch.device:
    """Return this rank's device. Raises UserError on every rank if one has none, or another kind.

    NCCL would wait for such a rank without a limit. Collective, but of the store alone.
    """
    try:
        device = pick(ranks)
    except Exception as error:
        why = f"rank {ranks.rank} has no device: {failures.reason(error)}"
        store.compare_set(_AGREEMENT_KEY, "", text_without_secrets(why))
        store.set(f"{_DEVICE_KEY}/{ranks.rank}", "")
        raise
    store.set(f"{_DEVICE_KEY}/{ranks.rank}", device.type)
    if ranks.first:
        kinds = [store.get(f"{_DEVICE_KEY}/{rank}").decode() for rank in range(ranks.world_size)]
        first = {kind: kinds.index(kind) for kind in kinds}
        differ = " and ".join(f"rank {rank} on {kind}" for kind, rank in first.items())
        why = (
            f"{differ} cannot train together: let every machine have GPUs that work, or set "
            "CUDA_VISIBLE_DEVICES= on each to train on the CPU"
        )
        store.compare_set(_AGREEMENT_KEY, "", why if len(first) > 1 else _AGREED)
    found = store.get(_AGREEMENT_KEY).decode()
    if found != _AGREED:
        raise UserError(found)
    return device


def process_group_ranks() -> Ranks | None:
    """Return this process's place in the process group of the user's script, or None if alone.

    A group does not know who shares a machine. It counts as one machine's.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, local_rank=rank, local_world_size=size)


def world_of_process_group() -> World | None:
    """Return the world of the process group of the user's script, or None if this rank is alone."""
    found = process_group_ranks()
    if found is None:
        return None
    # As in "cuda:nccl". On a machine with GPUs, a group without a named backend takes only theirs.
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    if "cpu" in kinds:
        return World(found, torch.device("cpu"))
    launched = detect()
    local = launched.local_rank if launched.world_size > 1 else found.rank
    return World(found, _own_gpu(kinds[0], local))


def _own_gpu(kind: str, local_rank: int) -> torch.device:
    """Return the GPU of this rank of a user's script: NCCL refuses one that two ranks share."""
    assert dist.group.WORLD is not None
    if (bound := dist.group.WORLD.bound_device_id) is not None:
        return bound
    gpus = torch.get_device_module(kind)
    # A script that gives a device to each call, as in PyTorch's tutorials, sets none.
    return torch.device(kind, gpus.current_device() or local_rank % gpus.device_count())
