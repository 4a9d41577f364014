"""What the pieces share: the GPU's name and driver."""

from __future__ import annotations

import subprocess

import torch


def device() -> dict[str, str]:
    """Return the GPU, its driver, and the versions that a figure depends on."""
    if not torch.cuda.is_available():
        return {"gpu": "none: this was a trial on the CPU"}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "gpu": said,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
