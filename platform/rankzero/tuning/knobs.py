"""The knobs that a search turns. Some are trained; the probe decides those of speed. Pure."""

from __future__ import annotations

import dataclasses

from rankzero.errors import UserError
from rankzero.search_ranges import Choice
from rankzero.tuning.probe.speed_knobs import EXACT
from rankzero.tuning.space import BATCH, LR, PRECISION, Space, only
from rankzero.tuning.trials.describe import ExperimentDescription

_COMPRESSION = "ddp.compression"
TRAINED = ("batch", "lr", "precision", _COMPRESSION)
"""Knobs that change the arithmetic."""
MEASURED = (
    *("workers", "compile", "recompute", "channels_last"),
    *("strategy", "ddp.bucket_mb", "micro_batch"),
)
"""Knobs that change only the speed."""


def parse(text: str) -> tuple[str, ...]:
    """Return the knobs of a list such as ``batch,workers``, in one order. Raises UserError."""
    wanted, known = {name.strip() for name in text.split(",")}, (*TRAINED, *MEASURED)
    if unknown := sorted(wanted - set(known)):
        raise UserError(f"--knobs: no knob is called {unknown[0]!r}: use {', '.join(known)}")
    return tuple(name for name in known if name in wanted)


def defaults(described: ExperimentDescription, space: Space) -> tuple[str, ...]:
    """Return the knobs that usually pay on this machine."""
    found = ["batch", "lr", "precision"]
    found += ["workers"] if described.loads else []
    # On a CPU, both rarely gain. The memory that recomputing saves is seldom worth its arithmetic.
    if described.gpus and space.reference.train.strategy in (*EXACT, "single"):
        found += ["compile", *(["channels_last"] if described.images else [])]
    return tuple(found)


def turned(space: Space, names: tuple[str, ...]) -> Space:
    """Return the space with only these knobs. Raises UserError if one makes no sense.

    The experiment's own ranges stay. A knob that is one of them is trained.
    """
    train, extras, processes = space.reference.train, dict(space.extras), min(space.devices)
    own = {"batch": BATCH, "precision": PRECISION, "lr": LR}
    trained = {*type(space.reference).search, *(own[name] for name in names if name in own)}
    if _COMPRESSION in names:
        if processes == 1 or train.strategy not in ("ddp", "zero1"):
            text = f"--knobs {_COMPRESSION} needs processes with train.strategy=ddp or zero1"
            raise UserError(f"{text}, not {processes} with {train.strategy}: leave it out")
        extras.setdefault(f"train.{_COMPRESSION}", Choice("none", "bf16"))
    measured = (name for name in names if name in MEASURED and f"train.{name}" not in extras)
    return dataclasses.replace(only(space, trained), extras=extras, knobs=tuple(measured))
