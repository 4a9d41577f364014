"""What a search tries next, and what it confirms: it follows from the trials alone. Pure.

So an interrupted search goes on as if it had not been, and several machines that share a study agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rankzero.tuning.space import BATCH_INDEX, Space
from rankzero.tuning.trial import Trial

REPEAT = "same_as"  # a fact: the trial whose answer this one copied
CLOSE, NEAR = 0.1, 0.5  # relative
Parameters = Mapping[str, Any]


def guesses(space: Space) -> list[dict[str, Any]]:
    """Return what to try right after the reference: twice and four times its batch size, as the scaling rule has it."""
    own = space.reference_parameters()
    if BATCH_INDEX not in own:
        return []
    last = len(space.batch_sizes) - 1
    return [
        {**own, BATCH_INDEX: own[BATCH_INDEX] + more}
        for more in (1, 2)
        if own[BATCH_INDEX] + more <= last
    ]


def ended(trials: Sequence[Trial], abandoned: Collection[int]) -> list[Trial]:
    """Return the trials that count: with an answer of their own, or that failed for good."""
    known = [trial for trial in trials if trial.state in ("COMPLETE", "PRUNED", "FAIL")]
    return [trial for trial in known if trial.number not in abandoned and REPEAT not in trial.facts]


def running(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that some process is at."""
    return [trial for trial in trials if trial.state == "RUNNING"]


def upcoming(
    trials: Sequence[Trial], abandoned: Collection[int], first: Sequence[Parameters], space: Space
) -> Parameters | None:
    """Return what comes before the sampler's draws; None where it is the sampler's turn.

    What was interrupted, then what is to be tried `first`, then the neighbours of each new best.
    """
    known = ended(trials, abandoned)
    again = [trials[number].parameters for number in abandoned]
    whole = set(
        space.reference_parameters()
    )  # of what was killed while it was drawn, there is only a part
    plan = [*(parameters for parameters in again if set(parameters) == whole), *first]
    best = math.inf
    for trial in known:
        if trial.feasible and value(trial) < best:
            best = value(trial)
            plan += space.neighbours(trial.parameters) if trial is not known[0] else []
    tried = [trial.parameters for trial in (*known, *running(trials))]
    return next((parameters for parameters in plan if parameters not in tried), None)


def same(trials: Sequence[Trial], number: int) -> Trial | None:
    """Return another trial of the same configuration that has an answer or is about to: nothing is trained twice."""
    parameters = trials[number].parameters
    found = [trial for trial in trials if trial.number != number and trial.parameters == parameters]
    by_state = {
        state: [trial for trial in found if trial.state == state]
        for state in ("COMPLETE", "PRUNED", "RUNNING")
    }
    return next((trial for some in by_state.values() for trial in some), None)


def reference_trial(trials: Sequence[Trial], space: Space) -> Trial | None:
    """Return the completed trial of the user's own configuration."""
    wanted = space.reference_parameters()
    return next(
        (trial for trial in trials if trial.state == "COMPLETE" and trial.parameters == wanted),
        None,
    )


def challengers(trials: Sequence[Trial], space: Space, most: int) -> list[Trial]:
    """Return the best feasible trials that may be better than the reference, each configuration once."""
    ranked = sorted((trial for trial in trials if trial.feasible), key=value)
    reference = reference_trial(ranked, space)
    unlike = {repr(sorted(trial.parameters.items())): trial for trial in reversed(ranked)}
    found = [
        trial
        for trial in unlike.values()
        if reference is None or trial.parameters != reference.parameters
    ]
    if reference is not None:
        worst = worth_confirming(value(reference), value(ranked[0]))
        found = [trial for trial in found if value(trial) <= worst]
    return sorted(found, key=value)[:most]


def worth_confirming(reference: float, best: float) -> float:
    """Return the highest value that a trial may have and be worth a confirmation.

    A little worse than the reference, which luck may have done; and not far from the best. Values are times, negated
    speeds or negated qualities.
    """
    return min(reference + CLOSE * abs(reference), best + NEAR * abs(best))


def value(trial: Trial) -> float:
    """Return what the trial is ranked by: infinite where it has no answer."""
    return math.inf if trial.value is None else trial.value
