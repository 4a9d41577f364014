"""Finds what a model carries from batch to batch outside of checkpoints, such as an LSTM's state.

A resume within an epoch begins without it, so it is not exact, and nothing else would show that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankzero.training.job import State, TrainingContext

# Checkpoints have the first three. `LightningSteps` clears the last one before each batch.
_HARMLESS = ("_parameters", "_buffers", "_modules", "_logged")
_Seen = dict[str, list[tuple[Tensor, int]]]
"""By attribute, its tensors and how often each was written to."""


def watch(
    batches: Iterator[Any], job: TrainingContext, state: State, notice: Callable[[str], None]
) -> Iterator[Any]:
    """Return `batches`. After a resume within an epoch, `notice` names what the model carries."""
    if not state.step % job.batch_order.steps_per_epoch:
        return batches
    return _watched(batches, lambda: _tensors(job, state.model), notice)


def _watched(
    batches: Iterator[Any], look: Callable[[], _Seen], notice: Callable[[str], None]
) -> Iterator[Any]:
    # A tensor that is made once, such as a table of positions, exists after the first batch.
    # No name here holds a batch, which would stay in memory while the next one is copied.
    yield from itertools.islice(batches, 1)
    seen = [look()]
    yield from itertools.islice(batches, 1)
    names = _changed(seen.pop(), look())
    if names:
        notice(
            f"{', '.join(names)} changes with each batch, and no checkpoint has it for "
            "every rank: if the next batch depends on it, this resume within an epoch is "
            "not exact; see 'What does not fit' in docs/experiments.md"
        )
    yield from batches


def _changed(before: _Seen, now: _Seen) -> list[str]:
    found = []
    for name, seen in before.items():
        pairs = zip(seen, now.get(name, ()), strict=False)
        if any(one is not other or old != new for (one, old), (other, new) in pairs):
            found.append(name)
    return found


def _tensors(job: TrainingContext, model: nn.Module) -> _Seen:
    """Return the tensors that the experiment and the modules have as plain attributes.

    Tensors with a gradient are results of a step. A process alone saves what `get_extra_state` has.
    """
    holders: dict[str, Any] = {"experiment": job.experiment, "model": model}
    holders |= {f"model.{name}": module for name, module in model.named_modules() if name}
    found: _Seen = {}
    for holder, owner in holders.items():
        saves_more = getattr(type(owner), "get_extra_state", None) is not nn.Module.get_extra_state
        if isinstance(owner, nn.Module) and saves_more and job.world.size == 1:
            continue
        for name, value in vars(owner).items():
            leaves = () if name in _HARMLESS else pytree.tree_leaves(value)
            tensors = [one for one in leaves if isinstance(one, Tensor) and not one.requires_grad]
            if tensors:
                found[f"{holder}.{name}"] = [
                    # A tensor of `torch.inference_mode` does not count its changes.
                    (one, 0 if one.is_inference() else one._version)
                    for one in tensors
                ]
    return found
