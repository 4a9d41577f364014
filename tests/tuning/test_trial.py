"""All trials with what a search asks of them: right, and no slower with many of them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

import rankzero
from rankzero.tuning import next_trial
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.session import Session
from rankzero.tuning.space import BATCH_INDEX, DEVICES, FACTOR, make_space
from rankzero.tuning.trial import REPEAT, Trial, Trials
from support import company
from support.company import Mine, opened
from support.fake_launcher import FakeLauncher

OWN_FILES = str(Path(rankzero.__file__).parent)
SPACE = make_space(Mine(), 1, 0.5, samples=1000, more=(2, 4))


def a_trial(number: int, luck: random.Random, *, has_ended: bool = True, step: int = 1) -> Trial:
    state = luck.choice(("COMPLETE", "COMPLETE", "PRUNED", "FAIL")) if has_ended else "RUNNING"
    factor = 2.0 ** (luck.randint(-3 * step, 3 * step) / step)
    drawn = {BATCH_INDEX: 5, FACTOR: factor, DEVICES: luck.choice((1, 2, 4))}
    value = luck.uniform(1.0, 100.0) if state == "COMPLETE" else None
    facts = {"batch_size": 32, "curve": [], **({REPEAT: 0} if luck.random() < 0.1 else {})}
    quality = luck.choice((-0.1, -0.1, 0.2))
    return Trial(number, state, drawn, value, {"quality": quality} if has_ended else {}, facts)


def test_what_is_known_of_the_trials_follows_each_change() -> None:
    luck, known, trials = random.Random(3), dict[int, Trial](), Trials()
    for _ in range(400):
        open_ones = [number for number, one in known.items() if not one.has_ended]
        failed = [one for one in known.values() if one.state == "FAIL" and not one.abandoned]
        if open_ones and luck.random() < 0.4:
            trial = a_trial(luck.choice(open_ones), luck)
        elif failed and luck.random() < 0.2:
            lost = luck.choice(failed)
            trial = Trial(lost.number, "FAIL", lost.parameters, None, {}, {}, abandoned=True)
        else:
            trial = a_trial(len(known), luck, has_ended=luck.random() < 0.3)
        known[trial.number] = trial
        trials.put(trial)
    ones = [known[number] for number in range(len(known))]
    taken = [one for one in ones if one.counts or one.state == "RUNNING"]
    good = [one for one in ones if one.feasible]
    assert list(trials) == ones and trials.abandoned == {
        one.number for one in ones if one.abandoned
    }
    assert trials.taken == {one.number for one in taken} and len(trials.abandoned) > 3
    assert trials.factors == sorted(one.parameters[FACTOR] for one in taken)
    assert [one for one in trials.ranked() if one.feasible] == sorted(
        good, key=lambda one: one.rank
    )
    assert next_trial.best_value(trials) == min(one.rank for one in good)
    for devices in (1, 2, 4):
        own = [one.rank for one in good if one.parameters[DEVICES] == devices]
        assert trials.fastest[devices].rank == min(own)
    for wanted in (ones[0].parameters, {"another": [1, 2]}):
        alike = [one for one in ones if one.parameters == wanted]
        assert trials.alike(wanted) == alike and trials.is_taken(wanted) == any(
            one in taken for one in alike
        )


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the calls of the package's functions, and the statements that databases get."""
    found = Counter[str]()

    def call(frame: FrameType, happened: str, _: Any) -> None:
        found["calls"] += happened == "call" and frame.f_code.co_filename.startswith(OWN_FILES)

    def statement(*_: Any) -> None:
        found["statements"] += 1

    before = sys.getprofile()
    event.listen(Engine, "before_cursor_execute", statement)
    sys.setprofile(call)
    try:
        yield found
    finally:
        sys.setprofile(before)
        event.remove(Engine, "before_cursor_execute", statement)


def test_an_answer_about_ten_times_as_many_trials_takes_no_more_calls() -> None:
    luck = random.Random(1)
    few, many = (
        Trials(a_trial(number, luck, step=10**6) for number in range(count))
        for count in (200, 2000)
    )

    def plan(trials: Trials) -> None:
        next_trial.upcoming(trials, next_trial.guesses(SPACE), SPACE)
        next_trial.twin(trials, len(trials) - 1)
        next_trial.time_to_beat(trials, SPACE, 2)
        next_trial.nearest_curve(trials)
        next_trial.challengers(trials, SPACE, 3)
        next_trial.running(trials)

    counts = []
    for trials in (few, many):
        with counting() as found:
            plan(trials)
        counts.append(found["calls"])
    assert counts[1] <= 1.2 * counts[0], counts


def test_a_search_does_no_more_for_a_late_trial_than_for_an_early_one(tmp_path: Path) -> None:
    study, marks = opened(tmp_path, sampler="random"), list[Counter[str]]()

    def notify(text: str) -> None:
        if text.startswith("trial"):
            marks.append(found.copy())

    launchers = [FakeLauncher(), FakeLauncher()]
    # Optuna's samplers and pruners compare all trials: these two do not.
    with counting() as found:
        options = SearchOptions(trials=31, minutes=600)
        Session(study, company.SPACE, launchers, options, notify).run()
    for what in ("calls", "statements"):
        early, late = (marks[end][what] - marks[end - 10][what] for end in (15, 30))
        assert 0 < late <= 1.1 * early, (what, early, late)
