"""From samples to a batch, in a loading process or in the rank: seeds, `collate`, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.failures import Failure
from rankzero.training.data.draws import GENERATORS
from rankzero.training.data.order import Choose, mix

Collate = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class BatchMaker:
    """Makes batches of samples. `collate` draws by seed, number and rank alone."""

    collate: Collate
    seed: int
    rank: int
    """The part of the data that is read: ranks with the same part draw the same."""
    training: bool

    def make(self, number: int, samples: list[Any], seed: Callable[[int], None]) -> Any:
        """Return the batch with this number, counted from the start of the run.

        `seed` seeds the generators.
        """
        seed(mix(self.seed, number, self.rank, self.training))
        return self.collate(samples)

    def failure(self, error: Exception, where: str, note: str = "") -> Failure:
        """Return what the user's code raised `where`, as the rank reports it."""
        found = failures.describe(error, self.rank)
        role = "training" if self.training else "validation"
        return dataclasses.replace(found, reason=f"{found.reason}: {where} of the {role} set{note}")


def batch_maker(collate: Collate, seed: int, rank: int, *, training: bool) -> BatchMaker:
    """Return what makes batches by the user's `collate`, which may ask whether it trains."""
    with contextlib.suppress(ValueError, TypeError):  # a function in C may have no signature
        if "training" in inspect.signature(collate).parameters:
            collate = functools.partial(collate, training=training)
    return BatchMaker(collate, seed, rank, training)


def chosen_by(experiment: Experiment, dataset: Any) -> Choose | None:
    """Return the experiment's `batches` as a function of epoch and generator; None: not written."""
    if type(experiment).batches is Experiment.batches:
        return None

    def choose(epoch: int, generator: torch.Generator) -> Sequence[Sequence[int]] | None:
        # The model draws from the global generators, so their state must not depend on the order.
        with preserved_rng():
            seed_all(generator.initial_seed())
            chosen = experiment.batches(dataset, epoch, generator)
            # A sampler draws while it is read.
            return chosen if chosen is None else list(chosen)

    return choose


def seed_all(seed: int) -> None:
    """Seed this process's generators, but not those of the GPUs: the model draws from them."""
    for generator in GENERATORS:
        generator.seed(seed)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore this process's generators after the block: the model draws from them too."""
    states = [(each, each.get()) for each in GENERATORS]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set(state)
