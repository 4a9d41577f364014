"""Seeds of samples: before each one, the generators that the data set draws from are seeded.

To seed all three costs 20 µs a sample, and to keep their states for the model 300 µs a batch. Most
data sets draw from one generator or from none, and pay for that alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

T = TypeVar("T")
# The state of NumPy's MT19937: 624 words and a position.
_NUMPY_BYTES = 625 * 4
_numpy: Any = np.random  # its types lack get_bit_generator


@dataclasses.dataclass(frozen=True)
class _CpuGenerator:
    """One of this process's global generators."""

    seed: Callable[[int], object]
    mark: Callable[[], Any]
    """Returns a value that each draw changes. It is cheap."""
    rewind: Callable[[Any], object]
    """Takes draws back, given an earlier mark."""
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _torch_bytes() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _set_torch_bytes(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)


def _numpy_address() -> int:
    return int(_numpy.get_bit_generator().ctypes.state_address)


def _numpy_bytes() -> bytes:
    return ctypes.string_at(_numpy_address(), _NUMPY_BYTES)


def _set_numpy_bytes(state: bytes) -> None:
    # This also drops the second normal number of a pair, which the bytes do not have.
    np.random.seed(0)
    ctypes.memmove(_numpy_address(), state, _NUMPY_BYTES)


_TORCH = _CpuGenerator(
    torch.default_generator.manual_seed,
    *(_torch_bytes, _set_torch_bytes, _torch_bytes, _set_torch_bytes),
)
_PYTHON = _CpuGenerator(
    random.seed, *(random.getstate, random.setstate, random.getstate, random.setstate)
)
# NumPy takes 130 µs to return its state, because it copies word by word.
_NUMPY = _CpuGenerator(
    _seed_numpy, _numpy_bytes, _set_numpy_bytes, np.random.get_state, np.random.set_state
)
GENERATORS = (_TORCH, _PYTHON, _NUMPY)


class SeededDraws:
    """Runs code that loads a batch, and calls `seed` before each sample.

    The first batch shows which generators the code draws from. The others are then left alone. If
    the code draws from one of them later, that batch is loaded again with that one seeded too. So
    every draw depends on the seed alone. In the rank, the generators have the same states after a
    batch as before, because the model draws from them too.
    """

    def __init__(self, generators: Sequence[_CpuGenerator] = GENERATORS) -> None:
        self._generators = generators
        self.seeded = set(generators)
        """The generators that something has drawn from; all of them until the first batch ends."""
        self._drawn: set[_CpuGenerator] = set()
        self._learns = True
        self._marks: dict[_CpuGenerator, Any] = {}

    def __reduce__(self) -> Any:
        # A loading process that is spawned has generators of its own.
        return SeededDraws, ()

    def seed(self, seed: int) -> None:
        """Seed the generators that the code draws from."""
        if self._learns:
            self._note()
        for generator in self.seeded:
            generator.seed(seed)
        if self._learns:
            self._marks = {each: each.mark() for each in self._generators}

    def run(self, load: Callable[[], T]) -> T:
        """Return what `load` returns. It may run twice, and must then do the same."""
        others = {each: each.mark() for each in self._generators if each not in self.seeded}
        # In a loading process there is no model.
        keeps = get_worker_info() is None
        states = [(each, each.get()) for each in self.seeded if keeps]
        try:
            found = load()
            if self._learns:
                self._note()
        finally:
            drawn = [each for each, mark in others.items() if each.mark() != mark]
            for each in drawn:
                each.rewind(others[each])
            for each, state in states:
                each.set(state)
        if self._learns:
            self.seeded, self._learns, self._marks = self._drawn, False, {}
        if not drawn:
            return found
        self.seeded.update(drawn)
        return self.run(load)

    def _note(self) -> None:
        self._drawn.update(each for each, mark in self._marks.items() if each.mark() != mark)
