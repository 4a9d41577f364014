"""Seeds and random states. A checkpoint stores every rank's states as bytes of a fixed length."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rankzero.training.data.order import mix

# Both generators are Mersenne Twisters: 624 words, the position, and maybe a second Gaussian number
# that the generator has drawn and not yet returned. Python counts the position among the words.
_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<624IIId")
_CUDA_BYTES = 16  # Philox: seed and offset


def seed_all(*numbers: int) -> None:
    """Seed PyTorch's generators, `random` and NumPy with a mixture of `numbers`."""
    seed = mix(*numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def state(device: torch.device) -> Tensor:
    """Return this process's random states as bytes: 1-d uint8, equally long on every rank."""
    cuda = torch.zeros(_CUDA_BYTES, dtype=torch.uint8)
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)
    _, words, gauss = random.getstate()
    python = _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
    _, keys, position, has_gauss, second_gauss = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    numpy = _NUMPY.pack(*keys.tolist(), position, has_gauss, second_gauss)
    packed = torch.frombuffer(bytearray(python + numpy), dtype=torch.uint8)
    return torch.cat([torch.get_rng_state(), cuda, packed])


def restore(states: Tensor, device: torch.device) -> None:
    """Set this process's generators to what `state` returned."""
    rest = _CUDA_BYTES + _PYTHON.size + _NUMPY.size
    cpu, cuda, python, numpy = states.cpu().split(
        [len(states) - rest, _CUDA_BYTES, _PYTHON.size, _NUMPY.size]
    )
    torch.set_rng_state(cpu.clone())
    # All zeros: the states come from a CPU. The GPU's generator keeps its seed, which differs by
    # rank.
    if device.type == "cuda" and cuda.any():
        torch.cuda.set_rng_state(cuda.clone(), device)
    *words, has_gauss, gauss = _PYTHON.unpack(bytes(python.tolist()))
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    *keys, position, has_gauss, gauss = _NUMPY.unpack(bytes(numpy.tolist()))
    keys_array = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", keys_array, position, has_gauss, gauss))


def states_of_replicas(strategy: str) -> list[Tensor]:
    """Return the states of the GPUs after the first, on which DataParallel has replicas."""
    count = torch.cuda.device_count() if strategy == "dp" else 0
    return [torch.cuda.get_rng_state(index) for index in range(1, count)]


def restore_replicas(states: Sequence[Tensor], strategy: str) -> None:
    """Set the GPUs to what `states_of_replicas` returned, if there are as many as then."""
    if strategy == "dp" and 1 + len(states) == torch.cuda.device_count():
        for index, one in enumerate(states, 1):
            torch.cuda.set_rng_state(one, index)
