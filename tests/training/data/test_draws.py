"""The generators of a data set: seeded where it draws from them, and otherwise left alone."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rankzero.training.data.draws import GENERATORS, SeededDraws

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "numpy": np.random.rand,
    "numpy's normal": np.random.standard_normal,
}


def states() -> list[Any]:
    return [*map(str, (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))]


def batches(draw: Callable[[int], object], count: int = 3) -> list[list[object]]:
    """Return what `draw` returns for the samples of a few batches of two."""
    draws = SeededDraws()

    def load(number: int) -> list[object]:
        found = []
        for sample in (2 * number, 2 * number + 1):
            draws.seed(100 + sample)
            found.append(draw(sample))
        return found

    return [draws.run(lambda number=number: load(number)) for number in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_draws_by_its_seed_alone_and_the_model_by_its_own(name: str) -> None:
    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    np.random.standard_normal()  # NumPy keeps a second one for the next call
    before = states()
    first = batches(lambda _: DRAWS[name]())
    assert states() == before
    torch.rand(5), random.random(), np.random.rand(5)
    assert batches(lambda _: DRAWS[name]()) == first
    assert len({value for batch in first for value in batch}) == 6


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_that_is_needed_later_is_seeded_from_that_batch_on(name: str) -> None:
    always = batches(lambda sample: DRAWS[name]())
    before = states()
    rarely = batches(lambda sample: DRAWS[name]() if sample == 3 else None)
    assert rarely == [[None, None], [None, always[1][1]], [None, None]]
    assert states() == before


def test_only_what_is_drawn_from_is_seeded_and_kept() -> None:
    used: list[str] = []
    watched = [
        GENERATORS[0].__class__(
            seed=lambda seed, each=each: (used.append("seed"), each.seed(seed)),  # type: ignore[misc]
            mark=each.mark,
            rewind=each.rewind,
            get=lambda each=each: (used.append("get"), each.get())[1],  # type: ignore[misc]
            set=lambda state, each=each: (used.append("set"), each.set(state)),  # type: ignore[misc]
        )
        for each in GENERATORS
    ]
    draws = SeededDraws(watched)
    for expected in (["get"] * 3 + ["seed"] * 3 + ["set"] * 3, ["get", "seed", "set"]):
        draws.run(lambda: (draws.seed(1), torch.rand(2)))
        assert used == expected
        used.clear()


def test_the_model_keeps_its_state_if_loading_raises() -> None:
    draws, before = SeededDraws(), states()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            draws.run(lambda: (draws.seed(1), torch.rand(2), random.random(), 1 / 0))
        assert states() == before


def test_a_spawned_loading_process_seeds_generators_of_its_own() -> None:
    draws = SeededDraws()
    draws.run(lambda: draws.seed(1))
    sent = pickle.loads(pickle.dumps(draws))
    assert sent.run(lambda: (sent.seed(1), random.random())) == (
        None,
        batches_of_one(random.random),
    )


def batches_of_one(draw: Callable[[], float]) -> float:
    draws = SeededDraws()
    return draws.run(lambda: (draws.seed(1), draw())[1])
