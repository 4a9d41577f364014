"""Loading processes: how they start and end, and what they share with their rank.

They start as PyTorch starts them, on Linux by a fork. So a data set may hold what no process can
send to another: lambdas, open files, thousands of tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import multiprocessing
import multiprocessing.queues
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rankzero.launch import failures, signals
from rankzero.launch.failures import DescribedError, Failure
from rankzero.run_store import lock_files
from rankzero.training.data.batch import map_tensors
from rankzero.training.data.device_copy import DeviceCopier

_MOST_WORKERS = 8
_PREFETCHED = 4  # batches for each loading process


def loader_workers(wanted: int | None, local_world_size: int, cores: int) -> int:
    """Return how many loading processes each rank gets: `wanted`, or what training leaves."""
    if wanted is not None:
        return wanted
    return max(0, min(_MOST_WORKERS, cores // local_world_size - 1))


def make_loader(
    batches: Any,
    device: torch.device,
    workers: int,
    *,
    keys: Iterable[Any] | None = None,
    persistent: bool = False,
) -> DataLoader[Any]:
    """Return a loader of `batches`: a data set of which each item is what `load` takes.

    `keys`: which items, in which order; None for an iterable data set.
    """
    context = None
    if workers:
        # PyTorch sends each tensor of a batch as an open file.
        lock_files.allow_many_files()
        # `multiprocessing.set_start_method` in the user's file chooses otherwise.
        if sys.platform == "linux" and multiprocessing.get_start_method(allow_none=True) is None:
            context = "fork"
    return DataLoader(
        batches,
        sampler=keys,
        batch_size=None,
        num_workers=workers,
        collate_fn=_Loaded,
        pin_memory=device.type == "cuda",
        prefetch_factor=_PREFETCHED if workers else None,
        persistent_workers=persistent and workers > 0,
        worker_init_fn=_begin,
        multiprocessing_context=context,
        # Without a generator of its own, starting to iterate draws a number from the model's.
        generator=torch.Generator(),
    )


def load(loader: DataLoader[Any], device: torch.device) -> Iterator[Any]:
    """Yield the items of a loader: each a batch, moved to `device`, and what comes with it.

    None is left out. A Failure of the user's code is raised.
    """
    # On Linux, only the rank's signals to stop reach loading processes. Elsewhere, `_obey` cannot
    # tell the rank's signal, which must end them.
    with signals.held_back() if sys.platform == "linux" else contextlib.nullcontext():
        items = iter(loader)
    copy = DeviceCopier(device)
    for loaded in items:
        item = loaded.item
        if isinstance(item, Failure):
            raise DescribedError(item)
        if item is not None:
            yield copy(item[0]), *item[1:]


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """An item of a loader. A `DataLoader` for a GPU calls `pin_memory`, in a thread of its own.

    PyTorch's own function refuses tensors that are on a GPU already, and skips dataclasses.
    """

    item: Any

    def pin_memory(self) -> _Loaded:
        """Return the batch with its tensors in memory from which a GPU copies by itself."""
        if self.item is None or isinstance(self.item, Failure):
            return self
        batch, *rest = self.item
        if hasattr(batch, "pin_memory") and not isinstance(batch, Tensor):
            return _Loaded((_pinned_by_itself(batch), *rest))
        pinned = map_tensors(
            batch,
            lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor,
            _pinned_by_itself,
        )
        return _Loaded((pinned, *rest))


def _pinned_by_itself(value: Any) -> Any:
    # Its tensors may be on a GPU, and only its class knows them.
    with contextlib.suppress(AttributeError, RuntimeError):
        return value.pin_memory()
    return value


def _begin(_worker: int) -> None:
    """Prepare a loading process. Called in it, before it loads anything."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    if sys.platform == "linux":
        _own_file_positions()
        threading.Thread(target=_obey, args=(rank.pid,), name="obey", daemon=True).start()
    threading.Thread(target=_end_with, args=(rank,), name="rank", daemon=True).start()
    sys.excepthook = functools.partial(_except_of_a_killed_rank, sys.excepthook)
    queue: Any = multiprocessing.queues.Queue  # its method is private, as in Python 3.11
    queue._on_queue_feeder_error = _send_error


def _send_error(queue: Any, error: Exception, unsent: Any) -> None:
    """Send the error of a batch that cannot be sent: multiprocessing would only print it."""
    if not isinstance(unsent, tuple) or not isinstance(unsent[-1], _Loaded):
        traceback.print_exception(error)
        return
    found = failures.describe(error, 0)
    text = (
        f"{found.reason}: a loading process cannot send this batch, a "
        f"{type(unsent[-1].item[0]).__name__}: return tensors and plain values from collate(), "
        "or set train.workers=0"
    )
    queue.put((*unsent[:-1], _Loaded(dataclasses.replace(found, reason=text))))


def _except_of_a_killed_rank(report: Any, kind: Any, error: BaseException, trace: Any) -> None:
    """Report an error, unless the rank was killed while it took a batch.

    The thread of multiprocessing that hands over tensors as open files reports its errors here.
    The batch's own errors reach the rank in another way.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        report(kind, error, trace)


def _own_file_positions() -> None:
    """Open the files again that the rank has open for reading.

    After a fork, processes share the position in a file: one would read where another has sought.
    """
    for name in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(name.name)
        # The descriptor of the listing itself is closed by now. Others may not be opened again.
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            is_read_only = flags & os.O_ACCMODE == os.O_RDONLY
            if not is_read_only or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                continue
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            mine = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.lseek(mine, position, os.SEEK_SET)
            os.dup2(mine, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(mine)


def _obey(rank: int | None) -> None:
    """End this process when its rank terminates it, and ignore what others send."""
    # The signal is blocked, so that a scheduler's SIGTERM to all processes keeps the data coming.
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)


def _end_with(rank: Any) -> None:
    """End this loading process when its rank ends, however the rank ends."""
    # PyTorch watches the parent process. If a fork server started this one, its parent is that
    # server, which lives as long as this process does.
    rank.join()
    os._exit(1)
