"""What the pieces share: the GPU's name and driver, and the environment of their commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent


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


def environment() -> dict[str, str]:
    """Return the environment in which a workload and the harness can be imported."""
    path = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
