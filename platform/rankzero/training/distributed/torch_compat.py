"""The private names and message texts of torch.distributed that this package depends on.

Seen in PyTorch 2.11 and 2.15. tests/training/distributed/test_torch_compat.py fails once one is
gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import os
import pickle
import tempfile
from collections.abc import Iterator, MutableMapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from rankzero.run_store import lock_files
from rankzero.training.checkpoints.host_copy import plain

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_PIPELINING = "torch.distributed.pipelining._utils"
# The names below rebuild a tensor without content, by which older versions send a shape.
_OBJECT_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"),
    ("torch.serialization", "_get_layout"),
}
_OBJECT_MODULES = {_PIPELINING, *(module for module, _ in _OBJECT_NAMES)}


def default_store() -> Any:
    """Return the key-value store of the default process group, or None if there is no group.

    Ranks exchange failures through it while their collectives hang. PyTorch has no public way to
    get it; a related request is https://github.com/pytorch/pytorch/issues/84468.
    """
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def release(replica: DistributedDataParallel) -> None:
    """Remove the hooks of a wrapper that is replaced, and free its buckets."""
    # Without the cyclic garbage collector, which does not see what `gc.freeze` froze.
    replica._remove_autograd_hooks()
    del replica.reducer, replica.logger


class _KeepsVersions(DistributedDataParallel):
    """DDP whose forward may follow another one before the backward.

    It gives all ranks the buffers of rank 0 before each forward, in place. Autograd then refuses
    the backward of the forward before, for the running statistics of a BatchNorm. These are no part
    of its gradient while it trains.
    """

    def _sync_buffers(self) -> None:
        ddp, autograd = cast(Any, super()), cast(Any, torch.autograd)
        ddp._assign_modules_buffers()
        with autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
            ddp._sync_buffers()


def ddp_class() -> type[DistributedDataParallel]:
    """Return DDP, as https://github.com/pytorch/pytorch/pull/175851 has made it.

    PyTorch 2.11 lacks that, and 2.15 has it.
    """
    names = DistributedDataParallel._sync_buffers.__code__.co_names
    keeps = "_unsafe_preserve_version_counter" in names
    return DistributedDataParallel if keeps else _KeepsVersions


def set_timeout(timeout: datetime.timedelta) -> None:
    """Set how long later collectives of the default process group may take.

    ``torch.distributed.set_timeout`` is public since 2.15. It replaces ``_set_pg_timeout``, see
    https://github.com/pytorch/pytorch/pull/187387.
    """
    distributed: Any = dist.distributed_c10d
    change = getattr(distributed, "set_timeout", None) or distributed._set_pg_timeout
    change(timeout)


@contextlib.contextmanager
def no_foreign_objects() -> Iterator[None]:
    """Let PyTorch's own parts accept only plain values and tensors from other ranks.

    They unpickle what arrives, and gloo does not check who sent it: another user of the machine
    could run code in this process.
    """
    # Late: it imports sympy and FSDP, half a second that most trainings need not spend.
    from torch.distributed.optim import zero_redundancy_optimizer

    distributed: Any = dist.distributed_c10d
    zero: Any = zero_redundancy_optimizer
    before = distributed._unpickler, zero._broadcast_object
    distributed._unpickler, zero._broadcast_object = _Unpickler, _broadcast_object
    try:
        yield
    finally:
        distributed._unpickler, zero._broadcast_object = before


@contextlib.contextmanager
def any_objects() -> Iterator[None]:
    """Within `no_foreign_objects`, let a user's own collectives accept any objects."""
    distributed: Any = dist.distributed_c10d
    before = distributed._unpickler
    distributed._unpickler = pickle.Unpickler  # noqa: S301 — PyTorch's own
    try:
        yield
    finally:
        distributed._unpickler = before


def _broadcast_object(obj: Any, src_rank: int, group: Any, device: torch.device) -> Any:
    """Do what PyTorch's function of this name does, but load no other objects."""
    content = io.BytesIO()
    if dist.get_rank() == src_rank:
        torch.save(tree_map(plain, obj), content)
    length = torch.tensor([content.tell()], device=device)
    dist.broadcast(length, src_rank, group)
    sent = torch.empty(int(length), dtype=torch.uint8, device=device)
    if dist.get_rank() == src_rank:
        sent.copy_(torch.frombuffer(content.getbuffer(), dtype=torch.uint8))
    dist.broadcast(sent, src_rank, group)
    if dist.get_rank() == src_rank:
        return obj
    received = io.BytesIO(sent.cpu().numpy().tobytes())
    return torch.load(received, map_location=device, weights_only=True)


class _Unpickler(pickle.Unpickler):  # noqa: S301 — this class is the restriction
    """Loads plain values, and the shapes that the stages of a pipeline send each other."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _OBJECT_MODULES else None
        is_metadata = dataclasses.is_dataclass(found) and module == _PIPELINING
        if is_metadata or isinstance(found, torch.dtype) or (module, name) in _OBJECT_NAMES:
            return found
        raise pickle.UnpicklingError(f"another rank sent a {module}.{name}, which is refused")


def keep_compiled_code_private(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch.compile keep its code where no other user can write, unless the user chose a place.

    By default it loads code from a folder in the shared temporary folder, under a name that anyone
    can guess, and does not check whose folder that is.
    """
    if _COMPILED not in environ:
        own = lock_files.own_temporary_folder()
        environ[_COMPILED] = str(own / "torchinductor" if own else tempfile.mkdtemp())


def is_lost_connection(error: BaseException) -> bool:
    """Return whether `error` only shows that another rank has ended.

    NCCL and the stores raise a `DistError`. gloo raises a plain RuntimeError, and only its text
    says so, see https://github.com/pytorch/pytorch/issues/75512.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
