"""Number formats: fp32, tf32, bf16, and fp16 with its loss scaler."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """How one run computes: enter `autocast` around every forward. Only fp16 has a `scaler`."""

    autocast: contextlib.AbstractContextManager[Any]
    scaler: torch.amp.GradScaler | None


def set_up(name: str, device: torch.device, *, keeps_casts: bool = True) -> Precision:
    """Return the precision `name` on `device`, and set this process's float32 arithmetic to match.

    fp32 means IEEE float32 throughout. `keeps_casts`: whether a weight that a forward uses twice is
    converted once.
    """
    # PyTorch's default lets convolutions use tf32 on recent GPUs. Then fp32 and tf32 runs would
    # compute the same, and a comparison between them would be void.
    # PyTorch has an older and a newer setting. torch.compile and torch.export read this older one,
    # and refuse a mixture.
    torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = name != "fp32"
    if name not in _AUTOCAST:
        return Precision(contextlib.nullcontext(), None)
    scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
    autocast = torch.autocast(device.type, dtype=_AUTOCAST[name], cache_enabled=keeps_casts)
    return Precision(autocast, scaler)
