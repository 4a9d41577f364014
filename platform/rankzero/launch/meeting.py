"""How the machines of a run meet, and which is the first: the one that has the run.

torchrun orders machines by their addresses, as text. Rank 0 writes the run, its settings count, and
it loads the checkpoints. So each round of torchrun's rendezvous is numbered again here (decision
76). Imports PyTorch, which takes a second: import it inside functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)

from rankzero.launch import torch_compat
from rankzero.launch.machines import Machines
from rankzero.run_store import checkpoint_files
from rankzero.run_store.folder import RunFolder

dist: Any = torch.distributed  # its type stubs lack the stores
_JOB = "rankzero/job"
_LAST = 1 << 30  # the number of a machine whose launcher gives none


@dataclasses.dataclass(frozen=True)
class Part:
    """A machine's part of the run before a round. The machines exchange it as JSON."""

    run: str = ""
    """The run that its command asks for, as ``uuid name``; empty for a trial."""
    step: int = -1
    """Its newest checkpoint's step; 0 with a journal alone, -1 with nothing."""
    trained: str = ""
    """The run of the round before; empty before its first one."""
    was_first: bool = False
    """Whether the machine was the first in that round."""
    number: int = _LAST
    """Its number, if the launcher gives one. The machine that serves the rendezvous has 0."""


def order(parts: Sequence[Part]) -> list[int]:
    """Return the machines' indices, the first machine's first. Pure.

    Raises RendezvousError if they have trained a run that none of them has any more.
    """
    trained = dict(part.trained.split(" ", 1) for part in parts if part.trained)
    have_it = [
        part.run.split(" ")[0] in trained and (part.was_first or part.step >= 0) for part in parts
    ]
    if trained and not any(have_it):
        names = " and ".join(sorted(trained.values()))
        raise RendezvousError(
            f"the one that has the run {names} is gone: when it is back, `rankzero resume` "
            "continues the run"
        )

    def place(index: int) -> tuple[bool, int, bool, int]:
        part = parts[index]
        return not have_it[index], -part.step, not part.was_first, part.number

    return sorted(range(len(parts)), key=place)


def handler_of(
    parameters: RendezvousParameters,
    machines: Machines,
    folder: RunFolder | None = None,
    notice: Callable[[str], object] = lambda _: None,
) -> Meeting:
    """Connect this machine to the rendezvous. Raises RendezvousError, also if another job has it.

    `folder`: the run's, as this machine's command knows it. `notice` gets a line if this machine is
    one too many.
    """
    backend, store = create_backend(parameters)
    owner = store.compare_set(_JOB, "", machines.job).decode()
    if owner != machines.job:
        raise RendezvousError(
            f"{owner!r} trains at {machines.endpoint}: give this training another port in "
            f"--rdzv-endpoint, or --rdzv-id {owner} to help that one"
        )
    watched: Any = _WatchedBackend(backend, machines, notice)
    handler = create_handler(store, watched, parameters)
    watched.handler = weakref.ref(handler)
    return Meeting(handler, store, machines, folder)


class Meeting:
    """torchrun's rendezvous, in which the machine that has the run is the first."""

    def __init__(
        self, handler: RendezvousHandler, store: Any, machines: Machines, folder: RunFolder | None
    ) -> None:
        self._handler, self._store, self._machines = handler, store, machines
        self._folder = folder
        # As the workers' request has it. A worker may replace it on the disk by the first one's.
        asked = folder.identity if folder else None
        self._part = Part(
            run=f"{asked.uuid} {asked.name}" if asked else "",
            number=_LAST if machines.number is None else machines.number,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines; return this one's number among them."""
        found = self._handler.next_rendezvous()
        store = dist.PrefixStore("rankzero", found.store)
        mine = dataclasses.replace(self._part, step=_newest_step(self._folder))
        try:
            store.set(f"part/{found.rank}", json.dumps(dataclasses.asdict(mine)))
            texts = [store.get(f"part/{rank}") for rank in range(found.world_size)]
            parts = [Part(**json.loads(text)) for text in texts]
            places = order(parts)
            rank = places.index(found.rank)
            info = RendezvousStoreInfo.build(rank, store, self._machines.address)
        except RuntimeError as error:
            raise RendezvousConnectionError(f"one of them went away: {error}") from error
        self._part = dataclasses.replace(
            self._part, trained=parts[places[0]].run, was_first=rank == 0
        )
        return RendezvousInfo(found.store, rank, found.world_size, info)

    def shutdown(self) -> bool:
        """Leave the rendezvous, which ends it for all. Its port is free for another job.

        A machine too many ends nothing.
        """
        if torch_compat.is_spare(self._handler):
            return False
        has_closed = self._handler.shutdown()
        if has_closed:
            # The store may be gone with the machine that served it.
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_JOB, self._machines.job, "")
        return has_closed

    def __getattr__(self, name: str) -> Any:
        """Return what the agent asks of torchrun's own handler."""
        return getattr(self._handler, name)


class _WatchedBackend:
    """torchrun's backend, which says once that this machine is one too many.

    A machine that waits reads the state about once a second.
    """

    def __init__(
        self, backend: RendezvousBackend, machines: Machines, notice: Callable[[str], object]
    ) -> None:
        self._backend, self._machines, self._notice = backend, machines, notice
        self.name, self._has_said_so = backend.name, False
        # Weak: in a cycle, the store and its port would outlive the launch.
        self.handler: Callable[[], Any] = lambda: None

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state of the rendezvous."""
        with self._as_spare():
            return self._backend.get_state()

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Set the state of the rendezvous, if it is still the one that `token` stands for."""
        with self._as_spare():
            return self._backend.set_state(state, token)

    @contextlib.contextmanager
    def _as_spare(self) -> Iterator[None]:
        """Say once that this machine is one too many, if it is. It loses nothing with the store."""
        is_spare = torch_compat.is_spare(self.handler())
        if is_spare and not self._has_said_so:
            self._has_said_so = True
            self._notice(
                f"{self._machines.most} machines train {self._machines.job} already: this one "
                "waits, in case one of them is lost. Another training needs its own --rdzv-id and "
                "port"
            )
        try:
            yield
        except RendezvousConnectionError as error:
            if is_spare:
                raise RendezvousGracefulExitError(str(error)) from error
            raise


def _newest_step(folder: RunFolder | None) -> int:
    if folder is None:
        return -1
    saved = [one.step for one in checkpoint_files.known(folder.checkpoints).values()]
    return max(saved, default=0 if folder.events.exists() else -1)
