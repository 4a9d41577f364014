"""The data sets that an experiment returns: one to train on, one or several to evaluate."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from rankzero.errors import UserError
from rankzero.events import DataDescribed
from rankzero.experiment import Experiment, Goal, Train
from rankzero.training.data import stream
from rankzero.training.data.order import (
    BatchOrder,
    check_same_lengths,
    make_batch_order,
    make_stream_order,
)
from rankzero.training.data.samples import chosen_by
from rankzero.training.data.stream import is_empty, is_stream, length_of
from rankzero.training.distributed.world import World


def load(experiment: Experiment) -> tuple[Any, dict[str, Any]]:
    """Return the training set, and the validation sets by the group of their metrics, or none.

    Raises UserError if one is unusable, or if the goal belongs to none of several sets.
    """
    data = experiment.data()
    try:
        train_set, validation = data
        val_sets = {} if validation is None else by_group("val", validation)
        lengths = length_of(train_set), {group: length_of(one) for group, one in val_sets.items()}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data() must return two data sets (training, validation), each with a length or "
            f"an iterator: {error}"
        ) from error
    is_mapping_empty = validation is not None and not val_sets
    if is_mapping_empty or any(map(is_empty, (train_set, *val_sets.values()))):
        sizes = [f"{context(group)} set {size}" for group, size in lengths[1].items()]
        found = " and ".join(sizes) or "mapping of validation sets none"
        raise UserError(
            f"data() returned an empty data set: the training set has {lengths[0]} samples, "
            f"the {found}"
        )
    if validation is None:
        _refuse_evaluations(experiment)
        return train_set, val_sets
    goal = experiment.goal.metric
    if not any(goal.startswith(f"{group}/") for group in val_sets):
        possible = " or ".join(goal.replace("val", group, 1) for group in val_sets)
        raise UserError(
            f"the goal is {goal!r}, but data() returns several validation sets: "
            f"set goal.metric to {possible}"
        )
    return train_set, val_sets


def _refuse_evaluations(experiment: Experiment) -> None:
    """Raise UserError if a setting needs a validation set."""
    train = experiment.train
    needs = {
        "goal": experiment.goal != Goal(),
        "train.eval_every": train.eval_every is not None,
        "train.patience": train.patience is not None,
        "train.schedule=plateau": train.schedule == "plateau",
        "train.limits.stop_at_target": train.limits.stop_at_target,
    }
    found = [setting for setting, is_set in needs.items() if is_set]
    if found:
        raise UserError(
            "data() returns no validation set, and these settings need one: "
            f"{', '.join(found)}; return one, or leave them out"
        )


def by_group(kind: Literal["val", "test"], data: Any) -> dict[str, Any]:
    """Return data sets by the group of their metrics: ``val``, or ``val/near`` and ``val/far``.

    `data`: a data set, or a mapping of names to data sets. Raises UserError for an illegal name.
    """
    # A map-style data set may be a dictionary, too. Its keys are numbers.
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        return {kind: data}
    for name in data:
        if not name or "/" in name:
            raise UserError(f"a {kind} set is called {name!r}: use a name without '/'")
    return {f"{kind}/{name}": one for name, one in data.items()}


def context(group: str) -> str:
    """Return the use of a group's data set, as people read it: ``validation/near``."""
    return group.replace("val", "validation", 1) if group.startswith("val") else group


def check_same(world: World, method: str, sets: Mapping[str, Any], train: Train) -> None:
    """Raise UserError if names or lengths differ between ranks, or if a stream is unusable.

    Collective. Ranks with other data would train on other batches, or wait for each other without
    end.
    """
    for name, one in sets.items():
        if is_stream(one):
            stream.check(name, one, is_distributed=world.is_distributed, train=train)
    names = zlib.crc32(json.dumps(list(sets)).encode())
    differing = world.ranks_that_differ(torch.tensor([names]))
    if differing:
        raise UserError(
            f"{method} returned data sets of other names on rank {', '.join(map(str, differing))} "
            f"than on rank 0, which has {', '.join(sets) or 'none'}: return the same on every rank"
        )
    if not sets:
        return
    lengths = world.gather(torch.tensor([length_of(one) for one in sets.values()]))
    for number, (name, one) in enumerate(sets.items()):
        if not stream.counts_a_share(one):
            check_same_lengths(name, lengths[:, number].tolist(), method)


def differing(
    world: World, described: Sequence[DataDescribed], data: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a notice if the digest of a data set is not the same on every rank. Collective.

    A stream that divides itself may have another length on each rank.
    """
    digests = world.gather(torch.tensor([zlib.crc32(one.digest.encode()) for one in described]))
    differs = (digests != digests[0]).any(dim=0)
    others = [one.context for one, is_other in zip(described, differs, strict=True) if is_other]
    if names := [use for use in others if not stream.counts_a_share(data[use])]:
        yield (
            f"data() differs between ranks ({', '.join(names)}): samples train twice or never, "
            "or leak into the validation, unless only paths or a rank's own attributes differ; "
            "shuffle and split with a seed, such as self.train.seed, and sort lists of files"
        )


def batch_order(experiment: Experiment, world: World, train_set: Any, shards: int) -> BatchOrder:
    """Return how the training set is cut into steps and divided among `shards`. Collective.

    Raises UserError if that is impossible.
    """
    choose = chosen_by(experiment, train_set)
    if is_stream(train_set):
        if choose is not None and choose(0, torch.Generator()) is not None:
            raise UserError("batches() chooses by index, but the training set is a stream")
        samples = length_of(train_set)
        if stream.counts_a_share(train_set):
            samples = int(world.gather(torch.tensor([samples])).sum())
        return make_stream_order(experiment.train, samples, shards)
    order = make_batch_order(experiment.train, len(train_set), shards, choose)
    if experiment.lockstep and order.rest % shards:
        raise UserError(
            f"train.drop_last=false leaves a batch of {order.rest} samples, which the processes "
            "cannot share evenly, and measure() talks to other ranks (lockstep): leave it out"
        )
    check_same_batches(world, order, 0)
    return order


def check_same_batches(world: World, order: BatchOrder, step: int) -> None:
    """Raise UserError if a finished step's epoch has other lists than on rank 0. Collective."""
    if order.lists is None:
        return
    differing = world.ranks_that_differ(torch.tensor(order.lists_before(step)))
    if differing:
        raise UserError(
            f"batches() returned other lists on rank {', '.join(map(str, differing))} than on rank "
            "0: let it depend only on its arguments, and draw from the generator"
        )
