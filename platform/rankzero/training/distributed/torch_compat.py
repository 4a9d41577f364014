"""The private names and message texts of torch.distributed that this package depends on.

Seen in PyTorch 2.15. tests/training/distributed/test_torch_compat.py fails once one is
gone.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist


def default_store() -> Any:
    """Return the key-value store of the default process group, or None if there is no group.

    Ranks exchange failures through it while their collectives hang. PyTorch has no public way to
    get it; a related request is https://github.com/pytorch/pytorch/issues/84468.
    """
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def set_timeout(timeout: datetime.timedelta) -> None:
    """Set how long later collectives of the default process group may take.

    ``torch.distributed.set_timeout`` is public since 2.15. It replaces ``_set_pg_timeout``, see
    https://github.com/pytorch/pytorch/pull/187387.
    """
    distributed: Any = dist.distributed_c10d
    change = getattr(distributed, "set_timeout", None) or distributed._set_pg_timeout
    change(timeout)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether `error` only shows that another rank has ended.

    NCCL and the stores raise a `DistError`. gloo raises a plain RuntimeError, and only its text
    says so, see https://github.com/pytorch/pytorch/issues/75512.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()
