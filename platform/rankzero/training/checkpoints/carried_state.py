"""Finds what training carries from batch to batch outside of checkpoints: a hidden state, a count.

A resume within an epoch begins without it, so it is not exact, and nothing else would show that. A
helper that `measure` changes is lost in each resume, so every attempt looks for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankzero.training.job import State, TrainingContext

# Checkpoints have the first three, but for buffers that are not persistent. `LightningSteps` clears
# the last one before each batch.
_HARMLESS = ("_parameters", "_buffers", "_modules", "_logged")
# PyTorch's wrappers count batches for themselves. `fully_shard` gives the user's classes a
# `__module__` of PyTorch, so that tells nothing.
_COUNTING = ("DistributedDataParallel", "OptimizedModule")
# A table of millions of numbers would take seconds.
_MOST_LEAVES = 10_000
_CARRIED = (
    "changes with each batch, and no checkpoint has it for every rank: if the next batch depends "
    "on it, this resume within an epoch is not exact; see 'What does not fit' in "
    "docs/experiments.md"
)
_HELPER = (
    "is changed by measure(), and no checkpoint has it: a resume begins with its first weights; a "
    "network that measure() changes belongs in the model, with requires_grad_(False)"
)
_Seen = dict[str, list[tuple[Tensor | None, Any]]]
"""By attribute, its tensors, and for each a value that changes when it is written to. Its numbers
are one such value."""


def watch(
    batches: Iterator[Any], job: TrainingContext, state: State, notice: Callable[[str], None]
) -> Iterator[Any]:
    """Return `batches`. `notice` names what a resume does not bring back, after two steps."""
    is_within = state.step % job.batch_order.steps_per_epoch > 0
    looks = [(lambda: _helpers(job), _HELPER)] if job.helpers else []
    looks += [(lambda: _attributes(job, state.model), _CARRIED)] if is_within else []
    return _watched(batches, job.batch_order.accumulation, looks, notice) if looks else batches


def _watched(
    batches: Iterator[Any],
    of_a_step: int,
    looks: Sequence[tuple[Callable[[], _Seen], str]],
    notice: Callable[[str], None],
) -> Iterator[Any]:
    # A tensor that is made once, such as a table of positions, exists after the first step.
    # No name here holds a batch, which would stay in memory while the next one is copied.
    yield from itertools.islice(batches, of_a_step)
    before = [look() for look, _ in looks]
    yield from itertools.islice(batches, of_a_step)
    for look, text in looks:
        names = _changed(before.pop(0), look())
        if names:
            notice(f"{', '.join(names)} {text}")
    yield from batches


def _changed(before: _Seen, now: _Seen) -> list[str]:
    found = []
    for name, seen in before.items():
        pairs = zip(seen, now.get(name, ()), strict=False)
        if any(one is not other or old != new for (one, old), (other, new) in pairs):
            found.append(name)
    return found


def _is_carried(leaf: Any) -> bool:
    # A tensor with a gradient is a result of a step.
    return isinstance(leaf, Tensor) and not leaf.requires_grad


def _attributes(job: TrainingContext, model: nn.Module) -> _Seen:
    """Return the tensors and numbers in plain attributes, and in buffers that are not saved."""
    holders: dict[str, Any] = {"experiment": job.experiment, "model": model}
    holders |= {f"model.{name}": module for name, module in model.named_modules() if name}
    found: _Seen = {}
    for holder, owner in holders.items():
        saves_more = getattr(type(owner), "get_extra_state", None) is not nn.Module.get_extra_state
        if isinstance(owner, nn.Module) and saves_more and job.world.size == 1:
            continue  # A process alone saves what `get_extra_state` has.
        unsaved = getattr(owner, "_non_persistent_buffers_set", ())
        kept = {name: owner._buffers.get(name) for name in unsaved}
        for name, value in {**vars(owner), **kept}.items():
            every = () if name in _HARMLESS else pytree.tree_iter(value)
            leaves = list(itertools.islice(every, _MOST_LEAVES))
            seen = [(one, _version(one)) for one in leaves if _is_carried(one)]
            # A NaN equals nothing.
            numbers = [one for one in leaves if isinstance(one, (int, float)) and one == one]
            if numbers and type(owner).__name__ not in _COUNTING:
                seen.append((None, hash(tuple(numbers))))
            if seen:
                found[f"{holder}.{name}"] = seen
    return found


def _helpers(job: TrainingContext) -> _Seen:
    """Return the values of the helpers' parameters and of what their state_dict() has."""
    # Not their identity: a table of positions is made again for a longer text.
    return {
        f"helpers()[{name!r}]": [
            (None, _written(one)) for one in (*helper.parameters(), *helper.state_dict().values())
        ]
        for name, helper in job.helpers.items()
    }


def _written(value: Any) -> tuple[int, str]:
    # A write through `.data`, as in MoCo and DINO, counts as none. So compare values, too.
    try:
        corner = value[(0,) * (value.dim() - 1)] if value.numel() else value
        return _version(value), str(corner.flatten()[:8].tolist())
    except Exception:  # A sparse tensor has no corner, and a look ends no training.
        return 0, ""


def _version(tensor: Tensor) -> int:
    # A tensor of `torch.inference_mode` does not count its changes.
    return 0 if tensor.is_inference() else tensor._version
