"""Metrics that an experiment derives from finished values, such as the perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from rankzero.errors import UserError
from rankzero.experiment import Experiment


def derived(
    experiment: Experiment, values: Mapping[str, float], vectors: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return what `derive` makes of `values`. Raises UserError if it is no number, or a known name.

    `vectors`: the quotients of each `Ratio` of vectors, on the host; `values` has their means.
    """
    # NumPy's numbers follow IEEE: a step without a positive sample must not end a training.
    given = {name: np.float64(value) for name, value in values.items()}
    with np.errstate(all="ignore"):
        found = experiment.derive({**given, **{name: one.numpy() for name, one in vectors.items()}})
    numbers = {}
    for name, value in found.items():
        if name in values:
            raise UserError(
                f"derive() returned {name!r}, which measure() returns: use another name"
            )
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"derive()[{name!r}] must be a number, got {value!r}") from None
    return numbers


def derived_columns(
    experiment: Experiment, columns: Mapping[str, list[float]], vectors: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return what `derive` makes of each step's values. A name that a step lacks has NaN there."""
    if type(experiment).derive is Experiment.derive:
        return {}
    steps = [
        derived(
            experiment,
            {name: column[step] for name, column in columns.items()},
            {name: quotients[step] for name, quotients in vectors.items()},
        )
        for step in range(len(next(iter(columns.values()))))
    ]
    names = dict.fromkeys(name for values in steps for name in values)
    return {name: [values.get(name, math.nan) for values in steps] for name in names}
