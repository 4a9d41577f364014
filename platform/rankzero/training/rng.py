"""Seeds and random states: a checkpoint keeps every rank's, as bytes of a fixed length."""

from __future__ import annotations

import os
import random
import struct

import numpy as np
import torch
from torch import Tensor

from rankzero.training.data.order import mix

PYTHON = struct.Struct(
    "<625I?d"
)  # Mersenne Twister words and position; whether a gauss waits, and which
NUMPY = struct.Struct("<624IIId")  # likewise
CUDA_BYTES = 16  # Philox seed and offset


def seed_all(*numbers: int) -> None:
    """Seed PyTorch's generators, `random` and NumPy."""
    seed = mix(*numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def be_deterministic() -> None:
    """Refuse operations whose results vary from run to run."""
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS: one of the two reproducible settings
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def state(device: torch.device) -> Tensor:
    """Return this process's random states as bytes: 1-d uint8, as long on every rank."""
    cuda = (
        torch.cuda.get_rng_state(device)
        if device.type == "cuda"
        else torch.zeros(CUDA_BYTES, dtype=torch.uint8)
    )
    return torch.cat([torch.get_rng_state(), cuda, _bytes(_python_state()), _bytes(_numpy_state())])


def restore(states: Tensor, device: torch.device) -> None:
    """Set this process's generators to what `state` returned."""
    cpu, cuda, python, numpy = states.cpu().split(
        [len(states) - CUDA_BYTES - PYTHON.size - NUMPY.size, CUDA_BYTES, PYTHON.size, NUMPY.size]
    )
    torch.set_rng_state(cpu.clone())
    if (
        device.type == "cuda" and cuda.any()
    ):  # else they are a CPU's: the GPU's stays as it was seeded, by rank
        torch.cuda.set_rng_state(cuda.clone(), device)
    *words, waiting, gauss = PYTHON.unpack(bytes(python.tolist()))
    random.setstate((3, tuple(words), gauss if waiting else None))
    *keys, position, waiting, gauss = NUMPY.unpack(bytes(numpy.tolist()))
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, waiting, gauss))


def _bytes(packed: bytes) -> Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _python_state() -> bytes:
    _, words, gauss = random.getstate()
    return PYTHON.pack(*words, gauss is not None, gauss or 0.0)


def _numpy_state() -> bytes:
    _, keys, position, waiting, gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    return NUMPY.pack(*keys.tolist(), position, waiting, gauss)
