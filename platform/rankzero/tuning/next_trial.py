"""Which configurations a search tries next, and which it confirms. Pure.

All of it follows from the study's trials alone. So an interrupted search continues as if it had
not been interrupted, and several machines that share a study agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankzero.tuning.space import BATCH_INDEX, Space
from rankzero.tuning.trial import Trial

REPEAT = "same_as"
"""A fact of a trial: the number of the trial that it copied its result from."""
_CLOSE, _NEAR = 0.1, 0.5  # relative
Parameters = Mapping[str, Any]


def guesses(space: Space) -> list[dict[str, Any]]:
    """Return the first trials after the reference: two and four times its batch size."""
    # They come before the sampler has a model, and a small batch is the most common mistake.
    own = space.sped_up(space.reference_parameters())
    if BATCH_INDEX not in own:
        return []
    larger = range(own[BATCH_INDEX] + 1, len(space.batch_sizes))
    return [{**own, BATCH_INDEX: index} for index in larger[:2]]


def ended(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that count: those with a result of their own, and those that failed."""
    known = [trial for trial in trials if trial.state in ("COMPLETE", "PRUNED", "FAIL")]
    return [trial for trial in known if not trial.abandoned and REPEAT not in trial.facts]


def running(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that a process runs now."""
    return [trial for trial in trials if trial.state == "RUNNING"]


def taken(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that the budget has paid for."""
    return [*ended(trials), *running(trials)]


def upcoming(
    trials: Sequence[Trial], first: Sequence[Parameters], space: Space
) -> Parameters | None:
    """Return the parameters to try next, or None if the sampler shall draw them.

    In order: interrupted trials, those in `first`, the neighbours of each new best trial.
    """
    known = ended(trials)
    interrupted = [trial.parameters for trial in trials if trial.abandoned]
    # A process that was killed while it drew a trial left only some of its parameters.
    names = set(space.parameters())
    plan = [*(parameters for parameters in interrupted if set(parameters) == names), *first]
    best = math.inf
    for trial in known:
        if trial.feasible and trial.rank < best:
            best = trial.rank
            # The reference is the first, and its neighbours are among the guesses.
            plan += space.neighbours(trial.parameters) if trial is not known[0] else []
    # Abandoned trials are not among these, so their parameters come again.
    tried = [trial.parameters for trial in taken(trials)]
    return next((parameters for parameters in plan if parameters not in tried), None)


def twin(trials: Sequence[Trial], number: int) -> Trial | None:
    """Return another trial of the same configuration with a result, or that runs; or None."""
    order, parameters = ("COMPLETE", "PRUNED", "RUNNING"), trials[number].parameters
    alike = [
        one
        for one in trials
        if one.number != number and one.parameters == parameters and one.state in order
    ]
    return min(alike, key=lambda one: order.index(one.state), default=None)


def reference_trial(trials: Sequence[Trial], space: Space) -> Trial | None:
    """Return the complete trial of the user's own configuration, or None."""
    wanted = space.reference_parameters()
    found = (one for one in trials if one.state == "COMPLETE" and one.parameters == wanted)
    return next(found, None)


def best_value(trials: Sequence[Trial]) -> float | None:
    """Return the lowest value of a feasible trial, or None."""
    return min((one.rank for one in trials if one.feasible), default=None)


def challengers(trials: Sequence[Trial], space: Space, most: int) -> list[Trial]:
    """Return the best feasible trials that may beat the reference, each configuration once."""
    ranked = sorted((trial for trial in trials if trial.feasible), key=lambda one: one.rank)
    reference, worst, tried = reference_trial(ranked, space), math.inf, list[Parameters]()
    if reference is not None:
        # A little worse than the reference may be bad luck. But far from the best is too far.
        # Values are times, negated speeds or negated qualities, so the slack takes their size.
        own, best = reference.rank, ranked[0].rank
        worst = min(own + _CLOSE * abs(own), best + _NEAR * abs(best))
        tried.append(reference.parameters)
    found = []
    for trial in ranked:
        if trial.rank <= worst and trial.parameters not in tried:
            tried.append(trial.parameters)
            found.append(trial)
    return found[:most]
