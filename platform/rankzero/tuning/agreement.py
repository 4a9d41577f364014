"""The space that all processes of a study draw from: the leader stores it, the others check."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero import config, ranks
from rankzero.config.renamed import with_new_names
from rankzero.errors import UserError
from rankzero.redaction.text import settings_without_secrets
from rankzero.search_ranges import Choice, LogUniform
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.probe import grid
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.space import BATCH, FACTOR, Space, narrowed, only, row_name
from rankzero.tuning.study import Study

SPACE = "space"
"""A fact of a study: the ranges that are drawn from."""
_POLL_SECONDS = 0.5
# Settings that a trial does not have as the user's own, or that change no result.
_NOT_PART = {
    "train.test",
    "train.log_every",
    "train.checkpoints.save_every",
    "train.checkpoints.keep",
    "train.mlflow.log_model",
    "train.mlflow.log_pictures",
    "train.limits.hang_minutes",
}


def space_of_version(study: Study, space: Space, options: SearchOptions) -> Space:
    """Return the space without what the study's version does not know.

    A grid has only the ranges that the experiment's `search` names. One of an older version keeps
    all ranges, because its trials have them. It continues without settings of speed. Raises
    UserError for other numbers of devices, and for other settings than the study began with.
    """
    _check_began_alike(study, space, options)
    known = study.facts.get(SPACE, {"speed": {}, "lr_choice": False})
    if isinstance(space.factors, Choice) and "lr_choice" not in known:
        # An older version drew between the options. Optuna keeps a parameter's kind.
        factors = space.factors.options
        space = dataclasses.replace(space, factors=LogUniform(factors[0], factors[-1]))
    if "speed" not in known:
        return dataclasses.replace(space, knobs=())
    named = type(space.reference).search
    # A grid over all the rest would be too large to be finished.
    return only(space, named) if options.sampler == "grid" and named else space


def agree_on_space(
    study: Study,
    space: Space,
    measured: Sequence[ProbeResult],
    options: SearchOptions,
    speed: Mapping[str, Any] | None = None,
    *,
    rules_out: bool = True,
) -> Space:
    """Return the space that all processes draw from. The first leader stores it, for good.

    The probe map rules out batches that do not fit or are no faster, and slow precisions. A
    batch size that the experiment's `search` names stays if it is only no faster. A grid
    keeps all of its cells. `speed`: the settings that the probe decided on. `rules_out`: whether
    the map is whole.
    """
    if SPACE not in study.facts:
        if measured and rules_out and options.sampler != "grid":
            sizes = set(grid.fastest(measured))
            if BATCH in type(space.reference).search:
                # The map leaves out small sizes, and those above its knee. They may be better.
                unfit = min({one.batch_size for one in measured} - sizes, default=math.inf)
                sizes |= {size for size in space.batch_sizes if size < unfit}
            space = narrowed(space, sorted(sizes), grid.worth_searching(measured, space.precisions))
        space = dataclasses.replace(space, speed=speed or {})
        fact = {
            "batch_sizes": space.batch_sizes,
            "precisions": space.precisions,
            "signature": _signature(space, options),
            "speed": dict(space.speed),
            "micro_batches": _fitting(measured, space.reference.train.strategy),
            "lr_choice": isinstance(space.factors, Choice),
            "devices": space.devices,
            "machines": space.machines,
            "device": space.device,
            "settings": _settings(space, options),
        }
        study.note(SPACE, fact)
    _check_began_alike(study, space, options)
    found, fact = _stored_space(study, space), study.facts[SPACE]
    _check_sizes(study, found)
    # An older version had a narrower range of the learning rate, and noted no device. Helpers have
    # this range, too, and the device of the process that leads now.
    news = {} if "speed" in fact else {"signature": _signature(found, options)}
    if news or fact.get("device") != space.device:
        study.note(SPACE, {**fact, **news, "device": space.device})
    return found


def _fitting(measured: Sequence[ProbeResult], strategy: str) -> dict[str, int]:
    """Return the largest micro-batch that fits, by row of the map, where larger ones do not."""
    fits = dict[str, int]()
    for one in measured:
        if one.status == "ok":
            name = row_name(one.devices, one.precision)
            fits[name] = max(one.micro_batch, fits.get(name, 0))
    # The map accumulates only if a rank's whole share does not fit.
    limited = {
        row_name(one.devices, one.precision)
        for one in measured
        if one.status == "out of memory"
        or one.micro_batch < one.batch_size // ranks.shards(strategy, one.devices)
    }
    # A pipeline does not accumulate: its micro-batches decide how long stages wait for each other.
    return {name: size for name, size in fits.items() if name in limited and strategy != "pp"}


def check_space(study: Study, space: Space, options: SearchOptions) -> Space:
    """Return the space that the leader stored. Raises UserError if this process has another."""
    found, fact = _stored_space(study, space), study.facts[SPACE]
    # A study of an older version has no device.
    agreed = f"{fact['signature']} on {fact.get('device', space.device)}"
    if (own := f"{_signature(found, options)} on {space.device}") != agreed:
        raise UserError(
            f"study {study.name} searches {agreed}, this command {own}: all processes that share "
            "a study need the same experiment, settings, --nproc and --objective, and the same "
            "kind of device"
        )
    # The leader may have stored them after this process began.
    _check_began_alike(study, space, options)
    return found


def _stored_space(study: Study, space: Space) -> Space:
    fact = study.facts[SPACE]
    found = narrowed(space, fact["batch_sizes"], fact["precisions"])
    # A study of an older version decided on none, and stored no micro-batches.
    found = dataclasses.replace(
        found, speed=fact.get("speed", {}), micro_batches=fact.get("micro_batches", {})
    )
    study.draw_from(found.parameters())
    return found


def _check_sizes(study: Study, found: Space) -> None:
    # Trials store the index of their batch size, so the stored list must stay.
    fact, name = study.facts[SPACE], repr(FACTOR)
    wanted = _sizes_text(fact["batch_sizes"], fact["precisions"], name in fact["signature"])
    given = _sizes_text(found.batch_sizes, found.precisions, FACTOR in found.parameters())
    if wanted != given:
        raise UserError(
            f"study {study.name} searches {wanted}, and this command {given}: give the same "
            "settings, --knobs and --sampler on the same kind of device, or --new"
        )


def _sizes_text(sizes: Sequence[int], precisions: Sequence[str], has_lr: bool) -> str:
    rates = "several learning rates" if has_lr else "one learning rate"
    return f"the batch sizes {', '.join(map(str, sizes))} in {'/'.join(precisions)} with {rates}"


def _check_began_alike(study: Study, space: Space, options: SearchOptions) -> None:
    """Raise UserError for other numbers of devices and other settings than the study began with."""
    if (fact := study.facts.get(SPACE)) is None:
        return
    # Older versions stored neither. They had one number of devices, which could change.
    stored = with_new_names(fact.get("settings", {}))
    own = _settings(space, options) if stored else {}
    # A setting that only one of them has is new in the file, or in another version.
    compared = (one for one in {**stored, **own} if one in stored.keys() & own or "[" in one)
    changed = [one for one in compared if stored.get(one) != own.get(one)]
    wanted, given = ([f"{key}={of.get(key, 'nothing')}" for key in changed] for of in (stored, own))
    devices, machines = fact.get("devices", space.devices[:1]), fact.get("machines", 1)
    if (tuple(devices), machines) != (space.devices, space.machines):
        wanted.append(options_of(devices, machines))
        given.append(options_of(space.devices, space.machines))
    if wanted:
        raise UserError(
            f"study {study.name} began with {', '.join(wanted)}, and this command has "
            f"{', '.join(given)}: give {', '.join(wanted)}, or --new, or another --name"
        )


def _settings(space: Space, options: SearchOptions) -> dict[str, str]:
    """Return what must stay as long as a study is searched, as texts by name."""
    rendered = settings_without_secrets(config.rendered(space.reference))
    ranges = {**type(space.reference).search, **space.extras}
    return {
        "--objective": options.objective,
        "--tolerance": str(options.tolerance),
        "--trial-minutes": str(options.trial_minutes),
        # The same data may lie in other folders of other machines.
        **{
            key: text
            for key, text in rendered.items()
            if key not in _NOT_PART and not text.startswith(("/", "~"))
        },
        **{f"search[{key!r}]": repr(range_) for key, range_ in ranges.items()},
    }


def options_of(devices: Sequence[int], machines: int) -> str:
    """Return the options that give a trial one of these numbers of devices on its machines."""
    counts = ",".join(str(count // machines) for count in devices)
    return f"--nproc {counts}" + (f" --nnodes {machines}" if machines > 1 else "")


def await_facts(study: Study, names: Sequence[str]) -> bool:
    """Wait until the leader has stored these facts; return False if it died before."""
    while not all(name in study.facts for name in names):
        if not study.members.has_leader():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _signature(space: Space, options: SearchOptions) -> str:
    """Return the parts of a search that must be equal in all processes."""
    # Studies store this text, so its form must stay.
    wanted = options.objective, options.tolerance, options.trial_minutes
    return repr((wanted, space.reference.goal, sorted(space.parameters().items())))
