"""Which configurations a search tries next, and which it confirms. Pure.

All of it follows from the study's trials alone. So an interrupted search continues as if it had
not been interrupted, and several machines that share a study agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rankzero.confidence import pooled_deviation
from rankzero.search_ranges import Choice, Integer, Range
from rankzero.tuning.learning_curve import CurvePoint
from rankzero.tuning.objective import MEMORY, QUALITY
from rankzero.tuning.space import BATCH_INDEX, FACTOR, IN_STEPS, PRECISION, SPEED, Space
from rankzero.tuning.trial import Trial, Trials

_CLOSE, _NEAR, _SLOW = 0.1, 0.5, 2.0  # relative, relative, times the best
_MOST_RANKED = 100  # trials that are looked at for challengers
_ALIKE = 2.0  # ratio of learning rates
_MOST_EARLIER = 3
_FASTER, _NEAR_MISS, _MOST_MISSES = 1.5, 0.25, 2  # times, gap to the quality, trials
SEEDS = "seeds"
"""A fact of a trial: on how many seeds it was trained."""
_STEP_TO_A_FIRST = 8.0  # of the learning rate, until a trial reaches the quality
Parameters = Mapping[str, Any]
_Item = TypeVar("_Item")


def from_earlier(
    space: Space, earlier: Trials, winner: int | None = None, batch_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the parameters of the best earlier trials, in this space, the best first.

    `winner`: the number of the trial that the earlier study confirmed. The reference is left out.
    `batch_size`: the earlier reference's, which searched numbers of steps belong to.
    """
    confirmed = [] if winner is None else [earlier[winner]]
    found = list[dict[str, Any]]()
    for trial in itertools.chain(confirmed, earlier.ranked()):
        if not (trial.feasible and trial.counts):
            continue
        parameters = _in_space(space, trial, batch_size)
        if parameters not in (*found, space.sped_up(space.reference_parameters())):
            found.append(parameters)
        if len(found) == _MOST_EARLIER:
            break
    return found


def _in_space(space: Space, trial: Trial, own_batch: int | None) -> dict[str, Any]:
    """Return a trial's parameters with this space's scale. The reference has what it lacks."""
    ranges, facts = space.parameters(), trial.facts
    found = space.sped_up(space.reference_parameters())
    given = {PRECISION: facts["precision"], **trial.parameters}
    ratio = (own_batch or space.reference.train.batch_size) / space.reference.train.batch_size
    given |= {key: max(1, round(given[key] * ratio)) for key in IN_STEPS if given.get(key)}
    for name in ranges.keys() & given.keys() - {BATCH_INDEX, FACTOR, SPEED}:
        for value in _legal(ranges[name], given[name]):
            found[name] = value
    batch_size = facts["batch_size"]
    if BATCH_INDEX in ranges:
        distances = [abs(math.log(one / batch_size)) for one in space.batch_sizes]
        found[BATCH_INDEX] = distances.index(min(distances))
    if FACTOR in ranges:
        found[FACTOR] = space.nearest_factor(facts["lr"] / space.scaled_lr(batch_size))
    return found


def _legal(range_: Range, value: Any) -> list[Any]:
    """Return the value as the range has it, or nothing if it lies outside."""
    if isinstance(range_, Choice):
        # A study stores a tuple as a list.
        plain = tuple(value) if isinstance(value, list) else value
        return [option for option in range_.options if option in (plain, value)][:1]
    kinds = int if isinstance(range_, Integer) else (int, float)
    return [value] if isinstance(value, kinds) and range_.low <= value <= range_.high else []


def guesses(space: Space) -> list[dict[str, Any]]:
    """Return the first trials after the reference: two and four times its batch size.

    Then its own on the other numbers of devices.
    """
    # They come before the sampler has a model, and a small batch is the most common mistake.
    own = space.sped_up(space.reference_parameters())
    larger = range(own.get(BATCH_INDEX, len(space.batch_sizes)) + 1, len(space.batch_sizes))
    others = [space.on(count, own) for count in space.devices[1:]]
    return [*({**own, BATCH_INDEX: index} for index in larger[:2]), *others]


def ended(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that count: those with a result of their own, and those that failed."""
    return [trial for trial in trials if trial.counts]


def running(trials: Trials) -> list[Trial]:
    """Return the trials that a process runs now."""
    return [trials[number] for number in trials.open if trials[number].state == "RUNNING"]


def upcoming(
    trials: Trials,
    first: Sequence[Parameters],
    space: Space,
    *,
    earlier: Sequence[Parameters] = (),
    is_speed: bool = False,
) -> Parameters | None:
    """Return the parameters to try next, or None if the sampler shall draw them.

    In order: interrupted trials, the best of an `earlier` study, those in `first`, those around the
    best so far. While no trial reaches the quality, other learning rates come before `first`: they
    are the likelier cause.
    `is_speed`: the objective is a speed, which no learning rate changes.
    """
    if (again := interrupted(trials, space)) is not None:
        return again
    plan = list(earlier)
    best = leading(trials)
    around = _around_the_best(trials, space, is_speed=is_speed)
    if best is not None and best.feasible:
        plan += [*_with_its_lr(first, trials, best), *around]
    else:
        plan += [*around, *first]
    # The user may have removed a range from `search` since. No trial can have its parameter.
    names = set(space.parameters())
    return _first_untried([one for one in plan if set(one) <= names], trials)


def interrupted(trials: Trials, space: Space) -> Parameters | None:
    """Return the parameters of an interrupted trial that no other trial has, or None."""
    # A process that was killed while it drew a trial left only some of its parameters.
    names = set(space.parameters())
    lost = [trials[number].parameters for number in sorted(trials.abandoned)]
    return _first_untried([one for one in lost if set(one) == names], trials)


def _first_untried(plan: Sequence[Parameters], trials: Trials) -> Parameters | None:
    # Abandoned trials are not taken, so their parameters come again.
    return next((parameters for parameters in plan if not trials.is_taken(parameters)), None)


def _with_its_lr(first: Sequence[Parameters], trials: Trials, best: Trial) -> list[Parameters]:
    """Return the guesses, with the best trial's learning rate if the reference's own was bad."""
    own = next(one for one in trials if one.counts)
    if own.feasible or FACTOR not in best.parameters:
        return list(first)
    return [{**parameters, FACTOR: best.parameters[FACTOR]} for parameters in first]


def _around_the_best(trials: Trials, space: Space, *, is_speed: bool) -> list[Parameters]:
    """Return the configurations around the best trial, or on the way to a first good one."""
    best, tried = leading(trials), trials.factors
    if best is None:
        # The learning rate is too high if all diverged. It does not change the memory.
        lowest = tried[0] if tried else 0.0
        known = (one for one in trials if one.counts and not one.constraints.get(MEMORY))
        diverged = next(known, None)
        own = {**diverged.parameters, FACTOR: lowest} if tried and diverged else {}
        further = space.further_lrs(own, tried, _STEP_TO_A_FIRST)
        return [space.sped_up(one) for one in further if one[FACTOR] < lowest]
    # The reference lacks the settings of speed.
    own = space.sped_up(best.parameters)
    closer = space.closer_lrs(own, tried)
    if not best.feasible:
        return [*space.further_lrs(own, tried, _STEP_TO_A_FIRST), *closer]
    if is_speed:
        return list(space.neighbours(own))
    misses = _fast_misses(trials, space, best)
    changed = [one for miss in misses for one in space.changes(miss)]
    return [*space.further_lrs(own, tried), *changed, *space.neighbours(own), *closer]


def _fast_misses(trials: Trials, space: Space, best: Trial) -> list[Parameters]:
    """Return the parameters of two much faster trials that missed the quality by least.

    They take less time than the best trial, and another setting may be all that they need.
    """
    faster = itertools.takewhile(lambda one: _FASTER * one.rank < best.rank, trials.misses())
    near = [one for one in faster if one.counts and one.constraints[QUALITY] < _NEAR_MISS]
    near.sort(key=lambda one: one.constraints[QUALITY])
    return [space.sped_up(one.parameters) for one in near[:_MOST_MISSES]]


def leading(trials: Trials) -> Trial | None:
    """Return the best feasible trial; without one, the complete trial nearest to the quality."""
    best = next((one for one in trials.ranked() if one.counts), None)
    if best is None or best.feasible:
        return best
    # The value of a miss is mostly its time, and a short training is not near for that.
    misses = (one for one in trials.misses() if one.counts)
    # Without a value, such as NaN throughout, it has a gap of 1. In old studies others have more.
    return min(misses, key=lambda one: ("best" not in one.facts, one.constraints[QUALITY]))


def nearest_curve(trials: Trials) -> tuple[list[CurvePoint], int]:
    """Return the curve and the batch size of the trial nearest to the quality.

    The curve is empty once a trial has reached the quality.
    """
    best = leading(trials)
    if best is None or best.feasible:
        return [], 1
    return [CurvePoint(*point) for point in best.facts.get("curve", ())], best.facts["batch_size"]


def twin(trials: Trials, number: int) -> Trial | None:
    """Return another trial of the same configuration with a result, or that runs; or None."""
    order = ("COMPLETE", "PRUNED", "RUNNING")
    found = trials.alike(trials[number].parameters)
    alike = [one for one in found if one.number != number and one.state in order]
    return min(alike, key=lambda one: order.index(one.state), default=None)


def reference_trial(trials: Trials, space: Space) -> Trial | None:
    """Return the ended trial of the user's own configuration, or None.

    One that diverged counts if the goal has a target: other configurations may reach it.
    """
    states = ["COMPLETE"] if space.reference.goal.target is None else ["COMPLETE", "PRUNED"]
    own = [one for one in trials.alike(space.reference_parameters()) if one.state in states]
    return min(own, key=lambda one: states.index(one.state), default=None)


def best_value(trials: Trials) -> float | None:
    """Return the lowest value of a feasible trial, or None."""
    return min((one.rank for one in trials.fastest.values()), default=None)


def noise(trials: Trials) -> float | None:
    """Return by how much a configuration's value varies among seeds, as a logarithm.

    None as long as no trial was trained on several seeds.
    """
    logs = [[math.log(value) for value in values] for values in trials.values.values()]
    return pooled_deviation(logs)[0] if logs else None


def is_uneven(trials: Trials) -> bool:
    """Return whether a trial did well on one seed, and missed the quality on another."""
    return any(one.facts.get(SEEDS, 1) > 1 and not one.feasible for one in ended(trials))


def time_to_beat(trials: Trials, space: Space, devices: int) -> float | None:
    """Return the value below which a trial on so many devices may be of use, or None.

    Above it, a finished trial is as fast and takes no more device-seconds.
    """
    return min(
        (
            one.rank * max(1.0, space.devices_of(one.parameters) / devices)
            for one in trials.fastest.values()
        ),
        default=None,
    )


def front(found: Iterable[_Item], both: Callable[[_Item], tuple[float, float]]) -> list[_Item]:
    """Return the Pareto front by the first value; both that `both` returns are to be small."""
    kept, least = list[_Item](), math.inf
    for one in sorted(found, key=both):
        if both(one)[1] < least:
            least = both(one)[1]
            kept.append(one)
    return kept


def challengers(trials: Trials, space: Space, most: int) -> list[Trial]:
    """Return the best feasible trials that may beat the reference. Those that are alike come last.

    First the fastest, then those that are slower and take fewer device-seconds, from the cheapest.
    """
    # Values are times if there are several numbers of devices.
    fastest = trials.fastest.values()
    best, *cheaper = front(
        fastest, lambda one: (one.rank, one.rank * space.devices_of(one.parameters))
    ) or (None,)
    if best is None:
        return []
    own = [one for one in trials.alike(space.reference_parameters()) if one.feasible]
    # Values are times, negated speeds or negated qualities, so the slack takes their size.
    worst = best.rank * _SLOW if best.rank > 0 else best.rank / _SLOW
    if own:
        # A little worse than the reference may be bad luck. But far from the best is too far.
        least = min(one.rank for one in own)
        worst = min(least + _CLOSE * abs(least), best.rank + _NEAR * abs(best.rank))
    ranked = itertools.islice(trials.ranked(), _MOST_RANKED)
    near = itertools.takewhile(lambda one: one.feasible and one.rank <= worst, ranked)
    found, alike = list[Trial](), list[Trial]()
    for trial in itertools.chain([best], reversed(cheaper), near):
        if trial.parameters in [one.parameters for one in (*own, *found, *alike)]:
            continue
        is_like = any(_are_alike(trial.parameters, one.parameters) for one in found)
        (alike if is_like else found).append(trial)
    return [*found, *alike][: max(0, most)]


def _are_alike(one: Parameters, other: Parameters) -> bool:
    """Return whether two configurations differ in a small step of the learning rate at most.

    If one of them misses the quality on a new seed, the other most likely does, too.
    """
    step = math.log(one.get(FACTOR, 1.0) / other.get(FACTOR, 1.0))
    return {**one, FACTOR: 0.0} == {**other, FACTOR: 0.0} and abs(step) < math.log(_ALIKE)
