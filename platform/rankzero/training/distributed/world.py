"""The processes that train together. Besides `strategies`, the only file that talks through torch.distributed."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankzero.launch import rendezvous
from rankzero.ranks import Ranks

PIECE_BYTES = (
    64 << 20
)  # what is sent at a time: a checkpoint may be larger than what a GPU has left
FAILURE_KEY = "rankzero/failure"
SETUP_TIMEOUT = datetime.timedelta(
    minutes=30
)  # of a collective that no watchdog watches: another may load data meanwhile
TRAINING_TIMEOUT = datetime.timedelta(days=1)  # where one does: it ends what hangs, and names it
FAILURE_SECONDS = 2.0  # what a failing peer gets to say why


@dataclasses.dataclass(frozen=True)
class World:
    """This process, its device and its way to the others. A world of one has no process group."""

    ranks: Ranks
    device: torch.device

    @property
    def size(self) -> int:
        return self.ranks.world_size

    @property
    def is_distributed(self) -> bool:
        """Tell whether there is anybody to talk to."""
        return self.size > 1

    def now(self) -> float:
        """Return the clock once the device has done all that it was given: a kernel that is launched has not run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` over all ranks, in place; every rank gets the same bits. A collective."""
        if self.is_distributed:
            dist.all_reduce(values)
        return values

    def ranks_that_differ(self, values: Tensor) -> list[int]:
        """Return the ranks whose `values` (1-d) are not bit for bit rank 0's. A collective."""
        if not self.is_distributed:
            return []
        found = self.gather(values)
        return [int(rank) for rank in (found != found[0]).any(dim=1).nonzero().flatten()]

    def gather(self, values: Tensor) -> Tensor:
        """Return every rank's `values` (1-d, equally long) as [world size, length]. A collective."""
        if not self.is_distributed:
            return values.unsqueeze(0)
        mine = values.to(self.device)
        gathered = mine.new_empty(self.size * len(mine))
        dist.all_gather_into_tensor(gathered, mine)
        return gathered.view(self.size, -1).to(values.device)

    def broadcast(self, content: bytes, source: int = 0) -> bytes:
        """Return one rank's `content` on every rank, through little of its device. A collective, not for the loop."""
        if not self.is_distributed:
            return content
        length = torch.tensor([len(content)], device=self.device)
        dist.broadcast(length, source)
        whole = bytearray()
        while len(whole) < int(length):
            piece = content[len(whole) : len(whole) + PIECE_BYTES]
            whole += self._broadcast_piece(
                piece, min(PIECE_BYTES, int(length) - len(whole)), source
            )
        return bytes(whole)

    def _broadcast_piece(self, piece: bytes, length: int, source: int) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8, device=self.device)
        if self.ranks.rank == source:
            buffer.copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        dist.broadcast(buffer, source)
        return buffer.cpu().numpy().tobytes()

    def all(self, answer: bool) -> bool:
        """Tell whether every rank says yes. A collective, for start-up only."""
        return (
            int(self.sum(torch.tensor([answer], dtype=torch.int64, device=self.device)))
            == self.size
        )

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give every rank rank 0's buffers (running statistics). A collective."""
        if self.is_distributed:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def report_failure(self, failure: dict[str, object]) -> None:
        """Leave word of this rank's failure where the other ranks can find it; the first word stays."""
        with contextlib.suppress(Exception):  # the store may be gone with the node that held it
            store = _store()
            if store is not None:
                store.compare_set(FAILURE_KEY, "", json.dumps(failure))

    def extend_timeouts(self) -> None:
        """Let collectives wait for long: NCCL's own limit would end who waits before the watchdog ends who hangs."""
        if self.is_distributed:
            distributed: Any = dist.distributed_c10d
            change = (
                getattr(distributed, "set_timeout", None) or distributed._set_pg_timeout
            )  # PyTorch before 2.15
            change(TRAINING_TIMEOUT)

    def first_failure(self) -> dict[str, object] | None:
        """Return the failure that another rank reported, waiting a moment for it; None if none did."""
        with contextlib.suppress(Exception):
            store = _store()
            deadline = time.monotonic() + FAILURE_SECONDS
            while store is not None and time.monotonic() < deadline:
                if store.check([FAILURE_KEY]):
                    found: dict[str, object] = json.loads(store.get(FAILURE_KEY))
                    return found
                time.sleep(0.1)
        return None


@contextlib.contextmanager
def join(ranks: Ranks, device: torch.device) -> Iterator[World]:
    """Join the job's other processes for the duration of the block. All ranks must enter it."""
    world = World(ranks, device)
    if not world.is_distributed:
        yield world
        return
    on_gpu = device.type == "cuda"
    if rendezvous.is_one_machine(ranks):
        rendezvous.keep_gloo_on_loopback()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=rendezvous.on_loopback(ranks, SETUP_TIMEOUT),
        rank=ranks.rank,
        world_size=ranks.world_size,
        device_id=device if on_gpu else None,
        timeout=SETUP_TIMEOUT,
    )
    yield world
    # Only after success: a rank that failed must end, not wait for collectives that its peers will never enter.
    dist.barrier()  # leaving while a peer still talks makes gloo abort the process (seen with PyTorch 2.15)
    dist.destroy_process_group()


def process_group_ranks() -> Ranks | None:
    """Return this process's place in the process group that the user's script has joined; None where it is alone.

    A group does not say who shares a machine: it is taken for one machine's.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, local_rank=rank, local_world_size=size)


def is_lost_connection(error: BaseException) -> bool:
    """Tell whether `error` is what a rank sees of another's end, and not a failure of its own."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _store() -> Any:
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
