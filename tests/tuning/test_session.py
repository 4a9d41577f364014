"""Searches against a fake launcher: fast, without PyTorch; the study's storage is real."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from rankzero import Choice, Experiment, Goal, Integer, Train, config
from rankzero.errors import RunFailed, UserError
from rankzero.tuning import members, next_trial
from rankzero.tuning.next_trial import ended, upcoming
from rankzero.tuning.options import PRUNERS, SAMPLERS, Pruner, Sampler, SearchOptions
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.reports.study_run import texts_of
from rankzero.tuning.search import _sentence
from rankzero.tuning.session import DEVICE_KINDS, EARLIER, FIRST, Session
from rankzero.tuning.space import (
    BATCH_INDEX,
    DEVICES,
    FACTOR,
    SPEED,
    make_space,
    only,
    settings_text,
)
from rankzero.tuning.study import Study, find_study, open_study
from rankzero.tuning.trial import State, Trial, Trials
from rankzero.tuning.verdict.decide import Verdict
from rankzero.tuning.verdict.sentence import sentence
from support.company import SPACE, Mine, opened
from support.fake_launcher import FakeLauncher, FakeRunning, Fate

Searcher = Callable[..., tuple[Verdict, Study, FakeLauncher, list[str]]]


@pytest.fixture
def search(tmp_path: Path) -> Searcher:
    def run(
        launcher: FakeLauncher | None = None,
        experiment: Experiment | None = None,
        sampler: Sampler = "tpe",
        pruner: Pruner = "asha",
        parallel: int = 1,
        speed: Mapping[str, Any] | None = None,
        devices: tuple[int, ...] = (1,),
        name: str = "s",
        like: Study | None = None,
        micro_batches: Mapping[str, int] | None = None,
        **options: Any,
    ) -> tuple[Verdict, Study, FakeLauncher, list[str]]:
        launcher = launcher or FakeLauncher()
        own, *more = devices
        space = make_space(experiment or Mine(), own, 0.5, samples=1000, more=more)
        space = dataclasses.replace(space, speed=speed or {}, micro_batches=micro_batches or {})
        study = opened(tmp_path, space, "journal", name=name, sampler=sampler, pruner=pruner)
        if speed:
            fast = space.sped_up(space.reference_parameters())
            study.note(FIRST, [fast, *study.facts[FIRST]])
        if like:
            study.note(EARLIER, next_trial.from_earlier(space, like.trials()))
        lines: list[str] = []
        chosen = SearchOptions(**{"trials": 12, **options})
        session = Session(study, space, [launcher] * parallel, chosen, lines.append)
        return session.run(), study, launcher, lines

    run.folder = tmp_path  # type: ignore[attr-defined]
    return run


def find(search: Searcher) -> Study:
    """Return the study that an interrupted search left."""
    return find_study(f"journal:///{search.folder / 'studies'}", "s")  # type: ignore[attr-defined]


def drawn(study: Study) -> list[tuple[Any, ...]]:
    return [tuple(sorted(trial.parameters.items())) for trial in study.trials()]


def by_trial(fates: Mapping[int, str], *, seed: int = 0) -> Fate:
    """Return the fates of trials by number, on one of their seeds."""
    number = -1

    def fate(_number: int, experiment: Experiment) -> str:
        nonlocal number
        number += experiment.train.seed == 0
        return fates.get(number, "") if experiment.train.seed == seed else ""

    return fate


def firsts(launcher: FakeLauncher) -> list[FakeRunning]:
    """Return the first training of each trial."""
    return [one for one in launcher.running if one.experiment.train.seed == 0]


def of(study: Study, state: str) -> list[Trial]:
    return [trial for trial in study.trials() if trial.state == state]


def test_the_reference_comes_first_and_something_better_is_found(search: Searcher) -> None:
    found, study, launcher, lines = search()
    assert launcher.started[0].train.batch_size == 32 and launcher.started[0].lr == pytest.approx(
        0.03
    )
    assert study.trials()[0].parameters == {BATCH_INDEX: 5, FACTOR: 1.0}  # 1, 2, 4, 8, 16, 32
    assert found.beaten and found.gain is not None and found.gain > 1.5
    assert found.winner.trial != 0 and len(found.winner.runs) == 3
    assert len(study.trials()) == 12 and len(lines) >= 12
    assert all(running.closed for running in launcher.running)


class Tuples(Mine):
    search = {
        "train.batch_size": Choice(32),
        "lr": Choice(0.03),
        "betas": Choice((0.9, 0.999), (0.8, 0.9), (0.9, 0.99)),
        "width": Integer(1, 200),
    }
    betas: tuple[float, float] = (0.9, 0.999)
    width: int = 1


@pytest.mark.parametrize(
    ("storage", "sampler"), [("sqlite", "tpe"), ("sqlite", "grid"), ("journal", "gp")]
)
def test_a_choice_among_tuples_continues(tmp_path: Path, storage: str, sampler: Sampler) -> None:
    space = make_space(Tuples(), 1, 0.5, samples=1000)
    # A leader, a helper and a later start: each has a connection of its own.
    trained = set[Any]()
    for trials in (3, 9, 11):
        study = opened(tmp_path, space, storage, sampler=sampler)
        launcher, options = FakeLauncher(), SearchOptions(trials=trials, sampler=sampler)
        Session(study, space, [launcher], options, lambda _: None).run()
        assert next_trial.reference_trial(study.trials(), space) == study.trials()[0]
        assert len(ended(study.trials())) == trials
        trained |= {one.betas for one in launcher.started if isinstance(one, Tuples)}
        study.members.close()
    assert trained == set(Tuples.search["betas"].options), "as tuples"


def test_no_training_has_a_larger_micro_batch_than_fits(search: Searcher) -> None:
    _, _, launcher, _ = search(micro_batches={"1 x fp32": 16}, trials=9)
    sizes = {(one.train.batch_size, one.train.micro_batch) for one in launcher.started}
    assert {16 if batch > 16 else None for batch, _ in sizes} == {size for _, size in sizes}
    assert launcher.started[0].train.micro_batch == 16, "the reference's, too"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_trials_but_the_reference_have_the_settings_of_speed(
    search: Searcher, sampler: str
) -> None:
    speed = {"train.workers": 2, "train.compile": True}
    found, study, launcher, _ = search(speed=speed, sampler=sampler, trials=9)
    trials = study.trials()
    reference, *others = (one for one in launcher.started if one.train.seed == 0)
    assert reference.train.workers is None and {one.train.workers for one in others} == {2}
    again = [one for one in launcher.started if one.train.seed == 1000]
    assert {(one.train.workers, one.train.compile) for one in again} == {(None, False), (2, True)}
    assert trials[1].parameters == {**trials[0].parameters, SPEED: "workers 2, compile"}
    assert found.beaten and speed.items() <= found.winner.settings.items()
    assert settings_text(found.winner.settings).endswith("workers 2, compile")
    assert not speed.keys() & found.reference.settings.keys()


def test_a_search_of_the_settings_of_speed_alone(search: Searcher) -> None:
    class Fixed(Mine):
        search = {"train.batch_size": Choice(32), "lr": Choice(0.03)}

    found, study, launcher, lines = search(None, Fixed(), speed={"train.workers": 2})
    assert len(study.trials()) == 2 and found.beaten
    assert not any("the sampler draws" in line for line in lines)
    assert [one.train.workers for one in launcher.started[:2]] == [None, 2]


def test_the_search_states_first_what_it_will_cost_and_can_show(search: Searcher) -> None:
    _, _, _, lines = search()
    plan = next(line for line in lines if line.startswith("plan"))
    assert lines.index(plan) == 1, "after the reference"
    assert "plan   11 trials of up to" in plan and "confirm at most 3 of them on 3 seeds" in plan
    _, _, _, lines = search(trials=13)
    assert lines[0].startswith("plan   1 trial of up to"), "12 are done"


def test_trials_neither_keep_checkpoints_nor_train_beyond_the_target(search: Searcher) -> None:
    _, _, launcher, _ = search(trials=3)
    for experiment in launcher.started:
        assert (
            experiment.train.checkpoints.save_every == 0 and not experiment.train.mlflow.log_model
        )
        assert experiment.train.limits.stop_at_target and experiment.goal.target == 0.9


def test_a_confirmation_knows_what_all_of_its_steps_cost(search: Searcher) -> None:
    _, study, _, _ = search()
    stored = study.facts["confirmations"]
    assert stored and all(run["whole"] > run["value"] for run in stored if run["value"])
    limited = config.override(Mine(), {"train.limits.max_minutes": 5.0})
    _, study, _, _ = search(experiment=limited, name="limited")
    stored = study.facts["confirmations"]
    assert stored and all(run["whole"] is None for run in stored)


def test_confirmations_use_new_seeds_interleaved(search: Searcher) -> None:
    found, _, launcher, _ = search(trials=6)
    seeds = [experiment.train.seed for experiment in launcher.started]
    confirmed = [seed for seed in seeds if seed >= 1000]
    assert set(confirmed) == {1000, 1001, 1002} and confirmed == sorted(confirmed)
    assert [run.seed for run in found.reference.runs] == [1000, 1001, 1002]


def test_without_a_target_the_reference_sets_it(search: Searcher) -> None:
    class Open(Mine):
        goal: Goal = Goal("val/accuracy", "max")

    _, study, launcher, _ = search(experiment=Open(), trials=5)
    assert (
        not launcher.started[0].train.limits.stop_at_target
        and launcher.started[1].train.limits.stop_at_target
    )
    assert study.facts["target"] == study.trials()[0].facts["best"]


@pytest.mark.parametrize(
    ("objective", "options"), [("throughput", {}), ("quality", {"trial_minutes": 1.0})]
)
def test_the_other_objectives(search: Searcher, objective: str, options: dict[str, Any]) -> None:
    found, study, launcher, lines = search(objective=objective, trials=6, **options)
    assert found.objective == objective
    best = min(
        trial.value for trial in study.trials() if trial.feasible and trial.value is not None
    )
    assert best <= (study.trials()[0].value or 0.0)
    if objective == "throughput":
        assert study.facts["target"] == pytest.approx(0.99 * study.trials()[0].facts["best"])
    else:
        assert launcher.started[1].train.limits.max_minutes == 1.0
    plan = next(line for line in lines if line.startswith("plan"))
    assert ("it can show gains" in plan) == (objective != "quality")


def test_the_least_energy_is_not_the_least_time(search: Searcher) -> None:
    def watts(experiment: Experiment) -> float:
        return 100.0 if experiment.train.batch_size <= 64 else 1000.0

    found, study, launcher, _ = search(FakeLauncher(watts=watts), objective="energy", trials=12)
    assert launcher.started[1].train.limits.stop_at_target
    by_time, _, _, _ = search(FakeLauncher(watts=watts), name="t", trials=12)
    assert found.winner.batch_size <= 64 < by_time.winner.batch_size
    reference = study.trials()[0]
    assert reference.value == pytest.approx(100.0 * reference.facts["train_seconds"], rel=0.2)


def test_a_machine_without_a_counter_of_energy_is_named(search: Searcher) -> None:
    with pytest.raises(UserError, match="NVML"):
        search(objective="energy")


def test_a_trial_whose_energy_was_not_measured_does_not_end_the_search(search: Searcher) -> None:
    launcher = FakeLauncher(watts=lambda one: 0.0 if one.train.batch_size == 64 else 100.0)
    found, study, _, _ = search(launcher, objective="energy", trials=5)
    missed = [one for one in study.trials() if one.facts["batch_size"] == 64]
    assert missed and {one.state for one in missed} == {"FAIL"}
    assert "found no counter" in missed[0].facts["reason"]
    assert found.winner.batch_size != 64


@pytest.mark.parametrize(
    ("fate", "state", "constraints"),
    [
        ("oom", "PRUNED", {"quality": 1.0, "memory": 1.0}),
        ("nan", "PRUNED", {"quality": 1.0, "memory": 0.0}),
        ("crash", "FAIL", {}),
        ("hang", "FAIL", {}),
    ],
)
def test_a_trial_that_fails_does_not_end_the_search(
    search: Searcher, fate: str, state: str, constraints: dict[str, float]
) -> None:
    launcher = FakeLauncher(by_trial({2: fate}))
    found, study, _, _ = search(launcher, trials=6, silence_seconds=0.05)
    failed = study.trials()[2]
    assert failed.state == state and failed.constraints == constraints and not failed.feasible
    assert len(study.trials()) == 6 and found.winner.trial != 2
    assert ("no sign of life" in str(failed.facts["reason"])) == (fate == "hang")
    assert not of(study, "RUNNING")


def test_a_trial_that_waits_for_its_machine_is_not_silent(search: Searcher) -> None:
    launcher = FakeLauncher(lambda number, _: "queued" if number == 2 else "")
    search(launcher, trials=4, silence_seconds=0.05)
    queued = launcher.running[2]
    assert queued.fate == "queued" and not any("no sign of life" in one for one in queued.asked)


def test_every_other_trial_has_the_same_constraints(search: Searcher) -> None:
    _, study, _, _ = search(trials=10)
    assert {frozenset(trial.constraints) for trial in study.trials()} == {
        frozenset(["quality", "memory"])
    }


def test_a_trial_that_cannot_win_is_stopped(search: Searcher) -> None:
    _, study, launcher, _ = search(trials=12)
    stopped = of(study, "PRUNED")
    assert stopped
    for trial in stopped:
        assert firsts(launcher)[trial.number].asked == [f"prune: {trial.facts['reason']}"]
        assert str(trial.facts["reason"]).startswith(("cannot beat the best", "worse than others"))
        assert trial.value is None and firsts(launcher)[trial.number].closed


class Lucky(FakeLauncher):
    """On its first seed, a batch of 64 is much faster than on others."""

    def speed(self, experiment: Experiment) -> float:
        is_lucky = experiment.train.batch_size == 64 and experiment.train.seed == 0
        return super().speed(experiment) * (1.8 if is_lucky else 1.0)


def test_a_trial_that_would_lead_is_trained_on_three_seeds(search: Searcher) -> None:
    _, study, launcher, _ = search(Lucky(), trials=8)
    trials, best = study.trials(), math.inf
    seeds = {
        trial.number: {
            one.experiment.train.seed
            for one in launcher.running
            if one.name.startswith(f"s-t{trial.number:02d}")
        }
        for trial in trials
    }
    assert seeds[0] == {0} and "values" not in trials[0].facts, "the reference has no rival"
    for trial in trials:
        values = trial.facts.get("values", [trial.value])
        if trial.feasible:
            assert len(seeds[trial.number]) == len(values)
            assert trial.value == pytest.approx(statistics.geometric_mean(values))
            assert len(values) == 3 or trial.value >= best or trial.number == 0
            best = min(best, trial.rank)
    lucky = next(one for one in trials if one.facts["batch_size"] == 64 and one.feasible)
    first, second, *_ = lucky.facts["values"]
    assert second > 1.5 * first and lucky.value is not None and lucky.value > 1.2 * first


def test_a_trial_that_is_lucky_first_and_fast_all_the_same_is_kept(search: Searcher) -> None:
    class Uneven(FakeLauncher):
        """A batch of 128 is fast, and takes 2.5 times the samples on its second seed."""

        def speed(self, experiment: Experiment) -> float:
            return super().speed(experiment) * (6.0 if experiment.train.batch_size == 128 else 1.0)

        def quality(self, experiment: Experiment, samples: float) -> float:
            is_slow = experiment.train.batch_size == 128 and experiment.train.seed == 1
            return super().quality(experiment, samples * (0.4 if is_slow else 1.0))

    _, study, _, _ = search(Uneven(best_lr=0.06), trials=4)
    uneven = next(one for one in study.trials() if one.facts.get("batch_size") == 128)
    assert uneven.state == "COMPLETE" and max(uneven.facts["values"]) > 2 * min(
        uneven.facts["values"]
    )


def test_a_trial_that_misses_the_target_on_another_seed_does_not_lead(search: Searcher) -> None:
    class Unreliable(FakeLauncher):
        def quality(self, experiment: Experiment, samples: float) -> float:
            fails = experiment.train.batch_size == 128 and experiment.train.seed == 1
            return super().quality(experiment, samples) * (0.5 if fails else 1.0)

    found, study, _, _ = search(Unreliable(), trials=8)
    missed = [one for one in study.trials() if one.facts.get("batch_size") == 128]
    assert missed and not any(one.feasible for one in missed)
    assert all(one.batch_size != 128 for one in (found.winner, found.reference))


@pytest.mark.parametrize("fate", ["crash", "lost"])
def test_a_crash_on_another_seed_leaves_the_result_of_the_first(
    search: Searcher, fate: str
) -> None:
    _, study, _, _ = search(trials=7)
    leads = next(one for one in study.trials() if "values" in one.facts)
    launcher = FakeLauncher(by_trial({leads.number: fate}, seed=1))
    _, study, _, _ = search(launcher, trials=7, name="crashes")
    kept = study.trials()[leads.number]
    assert kept.feasible and kept.value == leads.facts["values"][0] and "values" not in kept.facts
    launcher = FakeLauncher(by_trial({leads.number: fate}, seed=2))
    _, study, _, _ = search(launcher, trials=7, name="later")
    kept = study.trials()[leads.number]
    assert len(kept.facts["values"]) == kept.facts[next_trial.SEEDS] == 2


def test_a_trial_that_is_interrupted_on_another_seed_is_tried_again(
    search: Searcher, tmp_path: Path
) -> None:
    whole, study, _, _ = search(trials=7)
    expected = drawn(study)
    leads = next(one.number for one in study.trials() if "values" in one.facts)
    (tmp_path / "studies").unlink()
    with pytest.raises(KeyboardInterrupt):
        search(FakeLauncher(by_trial({leads: "ctrl-c"}, seed=1)), trials=7)
    again, study, _, _ = search(trials=7)
    assert study.abandoned == [leads] and not of(study, "RUNNING")
    assert drawn(study)[:leads] + drawn(study)[leads + 1 :] == expected
    assert again.winner.settings == whole.winner.settings


def test_the_limit_of_a_trial_grows_with_the_noise_among_seeds() -> None:
    def trial(number: int, **facts: Any) -> Trial:
        return Trial(number, "COMPLETE", {}, 1.0, {"quality": 0.0}, facts)

    assert next_trial.noise(Trials([trial(0)])) is None
    several = [trial(0), trial(1, values=[1.0, math.e]), trial(2, values=[5.0, 5.0])]
    assert next_trial.noise(Trials(several)) == pytest.approx(0.5)
    # A copy of a result shows nothing.
    copied = trial(3, values=[1.0, math.e], same_as=1)
    assert next_trial.noise(Trials([*several, copied])) == pytest.approx(0.5)


def test_a_failing_reference_ends_the_search_with_its_reason(search: Searcher) -> None:
    with pytest.raises(RunFailed, match="nothing to compare with: RuntimeError: broken"):
        search(FakeLauncher(lambda number, _: "crash"))


def test_an_interrupted_study_has_the_same_trials_as_one_that_was_not(
    search: Searcher, tmp_path: Path
) -> None:
    whole, study, _, _ = search(trials=9)
    expected, confirmed = drawn(study), whole.winner.trial
    (tmp_path / "studies").unlink()
    launcher = FakeLauncher(by_trial({5: "ctrl-c"}))
    with pytest.raises(KeyboardInterrupt):
        search(launcher, trials=9)
    assert firsts(launcher)[5].asked == ["stop"] and firsts(launcher)[5].closed
    again, study, _, _ = search(trials=9)
    lost = of(study, "FAIL")
    assert [trial.number for trial in lost] == [5]
    assert drawn(study)[:5] + drawn(study)[6:] == expected
    assert again.winner.settings == whole.winner.settings and confirmed


def test_an_interrupted_confirmation_resumes(search: Searcher) -> None:
    begun: list[int] = []

    def fate(_number: int, experiment: Experiment) -> str:
        begun.extend([experiment.train.seed] if experiment.train.seed >= 1000 else [])
        return "ctrl-c" if len(begun) == 4 else ""

    with pytest.raises(KeyboardInterrupt):
        search(FakeLauncher(fate), trials=5)
    _, study, second, _ = search(trials=5)
    assert len(second.started) == len(study.facts["confirmations"]) - 3


def test_a_target_that_no_trial_reaches(search: Searcher) -> None:
    class High(Mine):
        goal: Goal = Goal("val/accuracy", "max", target=1.5)

    found, study, _, lines = search(experiment=High(), trials=5)
    assert not found.beaten and not found.reference.reached and not found.has_sweet_spot
    assert any("missed     best" in line for line in lines) and "  value " not in "".join(lines)
    assert all(trial.constraints["quality"] > 0 for trial in study.trials())


def test_a_budget_that_is_too_short_raises(search: Searcher) -> None:
    with pytest.raises(RunFailed, match="is too short for a second trial"):
        search(trials=None, minutes=1e-9)


def test_without_a_second_configuration_the_minutes_are_not_too_short(search: Searcher) -> None:
    class Fixed(Mine):
        search = {"train.batch_size": Choice(32), "lr": Choice(0.03)}

    found, study, _, _ = search(experiment=Fixed(), trials=None, minutes=60.0)
    assert not found.beaten and len(study.trials()) == 1


def test_the_least_minutes_that_the_error_names_are_enough(tmp_path: Path) -> None:
    def searched(minutes: float) -> Study:
        launcher, options = FakeLauncher(), SearchOptions(trials=None, minutes=minutes)
        study = opened(tmp_path, SPACE, "journal", name=f"{minutes}", pruner="asha")
        clock = lambda: launcher.seconds  # noqa: E731
        Session(study, SPACE, [launcher], options, lambda _: None, clock).run()
        return study

    with pytest.raises(RunFailed) as raised:
        searched(0.05)
    assert len(searched(float(str(raised.value).rpartition("--minutes ")[2])).trials()) > 1


@pytest.mark.parametrize("times", [30.0, 1 / 30])
def test_a_learning_rate_that_is_wrong_by_30_leads_to_the_same_sweet_spot(
    tmp_path: Path, times: float
) -> None:
    def searched(lr: float) -> tuple[Verdict, float]:
        launcher, space = FakeLauncher(), make_space(Mine(lr=lr), 1, 0.5, samples=1000)
        study = opened(tmp_path, space, "journal", name=f"{lr}", pruner="asha")
        # Starting a run takes half a second.
        clock = lambda: launcher.seconds + 0.5 * len(launcher.started)  # noqa: E731
        session = Session(study, space, [launcher], SearchOptions(), lambda _: None, clock)
        return session.run(), clock()

    (right, cost), (found, more) = searched(0.07), searched(0.07 * times)
    assert found.beaten and found.winner.batch_size == right.winner.batch_size
    assert found.winner.settings["lr"] == pytest.approx(right.winner.settings["lr"], rel=0.5)
    assert more < 1.5 * cost, "a part is the wrong guess itself, which trains to its end"


def test_a_reference_that_diverges_does_not_end_a_search_with_a_target(search: Searcher) -> None:
    def fate(_number: int, experiment: Experiment) -> str:
        return "nan" if experiment.lr > 1.0 else ""

    found, study, launcher, lines = search(FakeLauncher(fate), Mine(lr=2.0))
    assert study.trials()[0].state == "PRUNED" and launcher.started[1].lr == pytest.approx(0.25)
    assert found.beaten and found.winner.reached and not found.reference.reached
    told = [line.split()[:3] for line in lines if " diverged" in line]
    assert told[0][:2] == ["trial", "0"] and ["confirm", "trial", "0"] in told
    assert "(0 of 3 seeds; diverged on 3)" in sentence(found, Mine().goal, 0.9, 60.0)

    class Open(Mine):
        goal: Goal = Goal("val/accuracy", "max")
        lr: float = 2.0

    with pytest.raises(RunFailed, match=r"With a goal\.target, a search continues"):
        search(FakeLauncher(fate), Open())


def test_a_reference_that_diverges_sets_no_target_for_quality(search: Searcher) -> None:
    launcher = FakeLauncher(lambda number, _: "nan" if number == 0 else "")
    options = {"objective": "quality", "trial_minutes": 1.0, "trials": 3}
    _, study, _, _ = search(launcher, Mine(goal=Goal("val/accuracy", "max", target=1.5)), **options)
    assert study.facts["target"] is None and study.trials()[1].feasible


def test_a_goal_that_is_nan_ends_the_search_after_the_reference(search: Searcher) -> None:
    class Blind(FakeLauncher):
        def quality(self, experiment: Experiment, samples: float) -> float:
            return math.nan

    launcher = Blind()
    aimless = config.override(Mine(), {"goal.target": None})
    for _ in range(2):
        with pytest.raises(RunFailed, match="val/accuracy was NaN in every evaluation"):
            search(launcher, aimless)
    assert len(launcher.started) == 1


def test_another_configuration_may_reach_a_target_where_yours_is_nan(search: Searcher) -> None:
    class Blind(FakeLauncher):
        def quality(self, experiment: Experiment, samples: float) -> float:
            own = experiment.train.batch_size == 32 and experiment.lr == 0.03
            return math.nan if own else super().quality(experiment, samples)

    found, study, _, _ = search(Blind())
    assert found.beaten and "best" not in study.trials()[0].facts


def test_a_loss_that_is_nan_is_further_off_than_any_other(search: Searcher) -> None:
    class Blind(FakeLauncher):
        def quality(self, experiment: Experiment, samples: float) -> float:
            own = experiment.train.batch_size == 32 and experiment.lr == 0.03
            return math.nan if own else 1.01 - super().quality(experiment, samples)

    goal = Goal("val/accuracy", "min", target=0.05)
    found, study, _, _ = search(Blind(by_trial({2: "nan"})), Mine(goal=goal), trials=6)
    own, diverged = study.trials()[0], study.trials()[2]
    assert own.constraints["quality"] == diverged.constraints["quality"] == 1.0
    assert all(one.constraints["quality"] < 1.0 for one in study.trials() if "best" in one.facts)
    assert not any("further from the quality" in one.facts["reason"] for one in study.trials())
    assert found.beaten


def test_a_reference_that_crashes_is_not_said_to_need_a_target(search: Searcher) -> None:
    with pytest.raises(RunFailed) as raised:
        search(FakeLauncher(lambda number, _: "crash"))
    assert "goal.target" not in str(raised.value)


def of_reference(state: State, quality: float, memory: float = 0.0) -> Trial:
    violations = {"quality": quality, "memory": memory}
    facts, parameters = {"batch_size": 32}, SPACE.reference_parameters()
    return Trial(0, state, parameters, -1.0 if state == "COMPLETE" else None, violations, facts)


def test_no_learning_rate_is_tried_where_it_cannot_help() -> None:
    reached = [of_reference("COMPLETE", 0.0)]
    planned = [upcoming(Trials(reached), [], SPACE, is_speed=one) or {} for one in (False, True)]
    assert [one[FACTOR] for one in planned] == [4.0, 1.0]
    full = of_reference("PRUNED", 1.0, memory=1.0)
    assert upcoming(Trials([full]), [], SPACE) is None


def test_a_range_that_the_user_removed_holds_up_no_search() -> None:
    before = of_reference("COMPLETE", 0.0)
    old = dataclasses.replace(before, parameters={**before.parameters, "width": 16})
    assert upcoming(Trials([old]), [], SPACE) is None


def test_the_best_of_an_earlier_study_come_right_after_the_reference(search: Searcher) -> None:
    _, earlier, _, _ = search(name="earlier")
    best = min(one.value for one in of(earlier, "COMPLETE") if one.value is not None)
    # From a guess that is bad, too: then learning rates come before other guesses.
    found, study, launcher, _ = search(
        experiment=dataclasses.replace(Mine(), lr=0.006), name="s2", like=earlier, trials=3
    )
    first = next(iter(earlier.trials().ranked()))
    assert launcher.started[1].lr == pytest.approx(first.facts["lr"], rel=1e-6)
    assert launcher.started[1].train.batch_size == first.facts["batch_size"]
    assert found.beaten and study.trials()[1].value == pytest.approx(best, rel=0.2)


class Slowing(FakeLauncher):
    def speed(self, experiment: Experiment) -> float:
        slow = experiment.train.seed == 1001 and experiment.train.batch_size == 32
        return super().speed(experiment) * (0.7 if slow else 1.0)


def test_a_round_in_which_the_machine_slowed_down_is_trained_again(search: Searcher) -> None:
    found, study, _, lines = search(Slowing())
    assert study.facts["disturbed"] == [1001]
    assert sorted(run.seed for run in found.reference.runs) == [1000, 1002, 1006]
    assert any("the machine's speed changed in the round of seed 1001" in line for line in lines)


def test_a_quality_that_all_steps_reached_is_not_trained_again(search: Searcher) -> None:
    options = {"objective": "quality", "trial_minutes": 5.0, "pruner": "none"}
    found, study, _, _ = search(Slowing(), **options)
    assert "disturbed" not in study.facts
    assert sorted(run.seed for run in found.reference.runs)[:3] == [1000, 1001, 1002]


def test_an_interrupted_round_that_is_trained_again_is_finished_later(search: Searcher) -> None:
    begun: list[int] = []

    def fate(number: int, experiment: Experiment) -> str:
        begun.extend([number] if experiment.train.seed == 1006 else [])
        return "ctrl-c" if len(begun) == 2 else ""

    with pytest.raises(KeyboardInterrupt):
        search(Slowing(fate))
    left = [one["seed"] for one in find(search).facts["confirmations"]]
    assert left.count(1006) == 1 and "disturbed" not in find(search).facts
    found, study, _, _ = search(Slowing())
    assert study.facts["disturbed"] == [1001] and study.facts["mixed"] == [1006]
    assert sorted(run.seed for run in found.reference.runs) == [1000, 1002, 1006]


def test_a_later_challenger_gets_the_round_that_replaced_a_spoiled_one(search: Searcher) -> None:
    search(Slowing(), trials=2, pruner="none")
    _, study, _, _ = search(Slowing(), trials=8, pruner="none")
    assert study.facts["disturbed"] == [1001]
    runs = study.facts["confirmations"]
    seeds = {
        one["trial"]: {run["seed"] for run in runs if run["trial"] == one["trial"]} for one in runs
    }
    assert len(seeds) > 2
    assert all({1000, 1002, 1006} <= one for one in seeds.values()), seeds


def test_a_study_notes_the_rounds_that_two_sessions_trained(search: Searcher) -> None:
    _, study, _, _ = search(trials=2, pruner="none")
    search(trials=2, pruner="none")
    assert "mixed" not in study.facts
    _, study, _, _ = search(trials=6, pruner="none")
    assert study.facts["mixed"][:3] == [1000, 1001, 1002]


def test_a_trial_shows_the_steps_that_it_was_trained_with(search: Searcher) -> None:
    class Warmed(Mine):
        search = {"train.warmup_steps": Integer(100, 400)}
        train: Train = Train(batch_size=32, epochs=20, warmup_steps=200)

    _, study, launcher, _ = search(experiment=Warmed(), trials=4)
    shown = [trial.own["train.warmup_steps"] for trial in study.trials()]
    assert shown == [one.experiment.train.warmup_steps for one in firsts(launcher)]
    drawn = [trial.parameters["train.warmup_steps"] for trial in study.trials()]
    assert shown != drawn
    old = dataclasses.replace(study.trials()[1], facts={})
    assert not old.own


def test_a_reference_that_is_the_best_wins(search: Searcher) -> None:
    class Best(Mine):
        train: Train = Train(batch_size=256, epochs=20)
        lr: float = 0.2

    found, _, _, _ = search(experiment=Best(), trials=15)
    assert found.winner.trial == 0 or (found.gain or 0.0) > 1.03


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "gp"])
@pytest.mark.parametrize("pruner", PRUNERS)
def test_samplers_and_pruners(search: Searcher, sampler: str, pruner: str) -> None:
    _, study, _, _ = search(sampler=sampler, pruner=pruner, trials=8)
    assert len(study.trials()) == 8


class Asked(Mine):
    """A configuration with a grid of six cells."""

    width: int = 16
    clip: float | None = None
    search = {"width": Choice(16, 32, 64), "clip": Choice(None, 0.5)}


def search_a_grid(folder: Path, launcher: FakeLauncher, trials: int, parallel: int = 1) -> Study:
    space = only(make_space(Asked(), 1, 0.5, ("fp32", "bf16"), samples=1000), Asked.search)
    study = opened(folder, space, sampler="grid")
    options = SearchOptions(trials=trials, sampler="grid")
    Session(study, space, [launcher] * parallel, options, lambda _: None).run()
    study.members.close()
    return study


def test_a_cell_that_is_lost_last_is_tried_again(tmp_path: Path) -> None:
    # The other launcher draws known cells until its end.
    launcher = FakeLauncher(by_trial({5: "lost"}))
    study = search_a_grid(tmp_path, launcher, trials=100, parallel=2)
    assert len(study.abandoned) == 1 and study.untried_cells() == []


def test_a_grid_covers_what_was_asked_for_and_names_what_it_does_not(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    assert len(search_a_grid(tmp_path, launcher, trials=4).untried_cells()) == 2
    study = search_a_grid(tmp_path, launcher, trials=6)
    assert study.untried_cells() == []
    tried = [(one["width"], one["clip"]) for one in (t.parameters for t in study.trials())]
    assert len(set(tried)) == 6


def test_nothing_is_trained_twice_and_a_small_space_ends(search: Searcher) -> None:
    class Small(Mine):
        search = {"train.batch_size": Choice(32, 64), "lr": Choice(0.03)}

    _, study, launcher, _ = search(experiment=Small(), trials=10, sampler="grid")
    assert {experiment.train.batch_size for experiment in launcher.started[:2]} == {32, 64}
    # Then the second trial on other seeds, and confirmations.
    assert 0 not in [experiment.train.seed for experiment in launcher.started[2:]]
    repeats = [trial for trial in study.trials() if "same_as" in trial.facts]
    assert repeats and all(
        trial.value == study.trials()[trial.facts["same_as"]].value for trial in repeats
    )


def test_a_trial_that_its_host_took_along_is_tried_again_and_counts_for_nothing(
    search: Searcher,
) -> None:
    launcher = FakeLauncher(by_trial({0: "lost", 3: "lost"}))
    _, study, _, lines = search(launcher, trials=8)
    assert study.abandoned == [0, 3] and len(ended(study.trials())) == 8
    known = {number: study.trials()[number].parameters for number in (0, 1, 3, 4)}
    assert known[0] == known[1] and known[3] == known[4]
    assert sum("was lost with its host process" in line for line in lines) == 2


def test_a_trial_that_is_lost_each_time_fails_at_last(search: Searcher) -> None:
    launcher = FakeLauncher(
        lambda _, experiment: "lost" if experiment.train.batch_size == 64 else ""
    )
    _, study, _, _ = search(launcher, trials=5)
    first = next(one for one in study.trials() if one.facts.get("batch_size") == 64)
    alike = [one for one in study.trials() if one.parameters == first.parameters]
    assert [one.abandoned for one in alike] == [True, True, False] and first.state == "FAIL"


def test_a_confirmation_run_that_is_lost_is_trained_again(search: Searcher) -> None:
    seen: list[int] = []

    def fate(_number: int, experiment: Experiment) -> str:
        seen.append(experiment.train.seed)
        return "lost" if experiment.train.seed == 1001 and seen.count(1001) == 1 else ""

    found, study, _, lines = search(FakeLauncher(fate), trials=6)
    assert all(run["value"] is not None for run in study.facts["confirmations"])
    assert len(found.winner.runs) == 3 and sum("trained again" in line for line in lines) == 1


def test_a_confirmation_run_whose_energy_was_not_measured_missed_nothing(search: Searcher) -> None:
    seen: list[int] = []

    def watts(experiment: Experiment, times: int = 1) -> float:
        seen.append(experiment.train.seed)
        return 0.0 if seen[-1] == 1001 and seen.count(1001) <= times else 100.0

    _, study, _, lines = search(FakeLauncher(watts=watts), objective="energy", trials=6)
    assert all(run["value"] is not None for run in study.facts["confirmations"])
    assert sum("was not measured: it is trained again" in line for line in lines) == 1
    launcher = FakeLauncher(watts=lambda one: watts(one, times=99))
    with pytest.raises(UserError, match=r"-seed1001 was not measured: .*found no counter"):
        search(launcher, objective="energy", trials=6, name="never")


def test_a_foreign_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "foreign.db"
    path.write_bytes(b"not a database at all, but someone's file")
    with pytest.raises(UserError, match=r"cannot be used.*--storage"):
        open_study(f"sqlite:///{path}", "s", sampler="tpe", pruner="none", seed=0)
    assert path.read_bytes().startswith(b"not a database")


def test_the_error_for_an_unknown_study_lists_the_known_ones(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    open_study(storage, "known", sampler="tpe", pruner="none", seed=0)
    with pytest.raises(UserError, match="there are known"):
        find_study(storage, "unknown")


def test_trials_side_by_side_repeat_no_configuration(search: Searcher) -> None:
    launcher = FakeLauncher()
    found, study, _, _ = search(launcher, trials=12, parallel=3)
    configurations = [
        repr(sorted(trial.parameters.items()))
        for trial in study.trials()
        if "same_as" not in trial.facts
    ]
    assert len(configurations) == len(set(configurations)) == 12
    assert launcher.most_at_once == 3 and found.beaten
    assert {running.closed for running in launcher.running} == {True} and not of(study, "RUNNING")


def test_one_host_of_a_cluster_confirms_and_another_kind_of_device_is_named(
    tmp_path: Path,
) -> None:
    study, launchers, lines = opened(tmp_path), [FakeLauncher(), FakeLauncher()], list[str]()
    for launcher, launcher.device in zip(launchers, ("A100", "H100"), strict=True):
        launcher.host = MagicMock(RemoteHost)
    options = SearchOptions(trials=6)
    found = Session(study, SPACE, launchers, options, lines.append).run()
    confirms = [any(one.train.seed >= 1000 for one in by.started) for by in launchers]
    assert sorted(confirms) == [False, True] and launchers[confirms.index(False)].host.close.called
    (line,) = [one for one in lines if "accelerator_type" in one]
    assert "Trainings ran on A100 and H100: " in line
    assert study.facts[DEVICE_KINDS] == ["A100", "H100"]
    setup = SimpleNamespace(space=SPACE, options=options)
    assert _sentence(setup, study, found).endswith(line)  # type: ignore[arg-type]


def test_ctrl_c_stops_all_running_trials_and_a_resume_repeats_them(search: Searcher) -> None:
    launcher = FakeLauncher(lambda number, _: "ctrl-c" if number == 5 else "")
    with pytest.raises(KeyboardInterrupt):
        search(launcher, trials=9, parallel=3)
    assert {running.closed for running in launcher.running} == {True} and not of(
        find(search), "RUNNING"
    )
    lost = find(search).abandoned
    assert lost
    _, study, _, _ = search(trials=9, parallel=3)
    again = [trial.parameters for trial in study.trials() if trial.state in ("COMPLETE", "PRUNED")]
    assert all(study.trials()[number].parameters in again for number in lost)


def test_a_helper_does_trials_and_leaves_the_rest_to_the_leader(tmp_path: Path) -> None:
    leads, helps, launcher = opened(tmp_path), opened(tmp_path), FakeLauncher()
    Session(leads, SPACE, [launcher], SearchOptions(trials=1), lambda text: None).run()
    Session(helps, SPACE, [launcher], SearchOptions(trials=6), lambda text: None).help()
    assert len(helps.trials()) == 6 and "confirmations" not in helps.facts
    found = Session(leads, SPACE, [launcher], SearchOptions(trials=6), lambda text: None).run()
    assert len(leads.trials()) == 6 and found.beaten and leads.facts["confirmations"]


def test_a_close_confirmation_trains_on_twice_as_many_seeds(search: Searcher) -> None:
    class Close(Mine):
        search = {"train.batch_size": Choice(64, 128), "lr": Choice(0.1)}
        train: Train = Train(batch_size=64, epochs=20)
        lr: float = 0.1

    found, study, _, _ = search(FakeLauncher(jitter=0.6), Close(), trials=3)
    runs = {
        trial: [one["seed"] for one in study.facts["confirmations"] if one["trial"] == trial]
        for trial in (0, 1)
    }
    assert found.beaten or runs[0] == runs[1] == [1000, 1001, 1002, 1003, 1004, 1005]


def test_the_minutes_include_the_confirmation(tmp_path: Path) -> None:
    """By a clock that each trial moves on: the launcher's."""
    study, launcher = opened(tmp_path, SPACE, "journal"), FakeLauncher()
    options = SearchOptions(trials=None, minutes=1.5)
    Session(study, SPACE, [launcher], options, lambda text: None, lambda: launcher.seconds).run()
    assert len(study.trials()) > 5 and study.facts["confirmations"]
    assert 30 < study.facts["seconds"] <= 92


def test_a_killed_search_has_kept_its_time(tmp_path: Path) -> None:
    """SIGKILL leaves no moment to store anything. The facts are read in the middle of trainings."""
    study, kept = opened(tmp_path, SPACE, "journal"), list[float]()

    def fate(_number: int, _experiment: Experiment) -> str:
        kept.append(study.facts["seconds"] - launcher.seconds)
        return ""

    launcher, options = FakeLauncher(fate), SearchOptions(trials=5)
    clock = lambda: launcher.seconds  # noqa: E731
    Session(study, SPACE, [launcher], options, lambda text: None, clock, 7.0).run()
    own = study.trials()[0].facts["train_seconds"]
    # Between two trainings the clock stands still. A trial's further seeds are part of it.
    assert kept[0] == 7.0 and kept.count(7.0) > 10 and min(kept) > 7.0 - 3 * own
    # A later start counts it, too.
    later = SearchOptions(trials=None, minutes=study.facts["seconds"] / 60)
    session = Session(study, SPACE, [launcher], later, lambda text: None, clock)
    assert not session._budget.allows_a_trial()


def test_a_late_helper_counts_the_time_of_its_leader(tmp_path: Path) -> None:
    leads, helps, launcher = opened(tmp_path), opened(tmp_path), FakeLauncher()
    options = SearchOptions(trials=None, minutes=10.0)
    Session(leads, SPACE, [launcher], SearchOptions(trials=1), lambda text: None).run()
    # It joined early, and the leader kept its time since.
    helper = Session(helps, SPACE, [launcher], options, lambda text: None)
    leads.note("seconds", 601.0)
    helper.help()
    assert len(helps.trials()) == 1
    leads.note("seconds", 300.0)
    assert helper._budget.allows_a_trial()


def test_a_helper_starts_no_trial_while_its_leader_confirms(tmp_path: Path) -> None:
    leads, helps, other = (opened(tmp_path) for _ in range(3))
    counts, options = list[int](), SearchOptions(trials=30)

    def fate(_number: int, experiment: Experiment) -> str:
        if experiment.train.seed == 1000:
            Session(helps, SPACE, [FakeLauncher()], options, lambda text: None).help()
            counts.append(len(helps.trials()))
        return ""

    assert members.lead(leads)
    Session(leads, SPACE, [FakeLauncher(fate)], SearchOptions(trials=4), lambda text: None).run()
    assert counts and set(counts) == {4}
    # Another leader may want more trials.
    leads.members.close()
    assert members.lead(other)
    Session(helps, SPACE, [FakeLauncher()], options, lambda text: None).help()
    assert len(ended(helps.trials())) == 30


class OwnTarget(Mine):
    """Its target is its own best, and all that a search can choose changes nothing."""

    goal: Goal = Goal("val/accuracy", "max")
    width: int = 1
    search = {"train.batch_size": Choice(32), "lr": Choice(0.03), "width": Integer(1, 8)}


class LuckyReference(FakeLauncher):
    """The reference was lucky on its first seed, and on one of three later ones."""

    def quality(self, experiment: Experiment, samples: float) -> float:
        is_own = isinstance(experiment, OwnTarget) and experiment.width == 1
        change = -0.1 if is_own and experiment.train.seed in (1000, 1002) else 0.01
        return super().quality(experiment, samples) + change * (experiment.train.seed > 0)


def test_nothing_beats_a_reference_for_missing_its_own_target(search: Searcher) -> None:
    found, _, _, lines = search(LuckyReference(), OwnTarget(), trials=4)
    assert all(", width " in line for line in lines if line.startswith("trial")), lines
    assert found.reference.share == pytest.approx(1 / 3) and not found.beaten


class BadLuck(FakeLauncher):
    """The user's own configuration takes longer, and others miss the target on some new seeds."""

    misses: tuple[int, ...] = (1001,)

    def speed(self, experiment: Experiment) -> float:
        return super().speed(experiment) * (0.4 if experiment.train.batch_size == 32 else 1.0)

    def quality(self, experiment: Experiment, samples: float) -> float:
        fails = experiment.train.batch_size != 32 and experiment.train.seed in self.misses
        return super().quality(experiment, samples) * (0.5 if fails else 1.0)


class BadLuckTwice(BadLuck):
    misses = (1000, 1002)


@pytest.mark.parametrize("kind", [BadLuck, BadLuckTwice])
@pytest.mark.parametrize("minutes", [1.3, 3.0])
def test_a_challenger_with_bad_luck_gets_a_second_look(
    kind: type[BadLuck], minutes: float, tmp_path: Path
) -> None:
    study, launcher = opened(tmp_path, SPACE, "journal"), kind()
    options = SearchOptions(trials=12, minutes=minutes, challengers=1)
    clock = lambda: launcher.seconds  # noqa: E731
    found = Session(study, SPACE, [launcher], options, lambda text: None, clock).run()
    assert found.beaten and len(found.winner.runs) == 6
    # Only if there is time for its slow runs.
    assert len(found.reference.runs) == (3 if minutes < 2 else 6)
    assert launcher.seconds <= 60 * minutes


@pytest.mark.parametrize("at", [9, 10, 12, 15])
def test_a_search_that_was_killed_in_its_second_look_goes_on_to_the_same_verdict(
    search: Searcher, at: int
) -> None:
    begun: list[int] = []

    def fate(_number: int, experiment: Experiment) -> str:
        begun.extend([experiment.train.seed] if experiment.train.seed >= 1000 else [])
        return "ctrl-c" if len(begun) == at else ""

    options = {"trials": 8, "challengers": 2}
    expected, study, _, _ = search(BadLuckTwice(), name="whole", **options)
    # Two challengers and the reference, on six seeds, but for those that are stopped early.
    assert expected.beaten and len(study.facts["confirmations"]) == 18
    with pytest.raises(KeyboardInterrupt):
        search(BadLuckTwice(fate), **options)
    found, again, launcher, _ = search(BadLuckTwice(), **options)
    assert found == expected and len(launcher.started) == 18 - at + 1
    assert again.facts["confirmations"] == study.facts["confirmations"]


def test_a_study_that_goes_on_may_have_other_challengers(search: Searcher) -> None:
    def confirmed(study: Study) -> set[int]:
        return {run["trial"] for run in study.facts["confirmations"]}

    _, study, _, _ = search(BadLuckTwice(), trials=4, challengers=1)
    before = confirmed(study)
    found, study, _, _ = search(BadLuckTwice(), trials=14, challengers=1)
    assert before < confirmed(study) and found.beaten


def test_minutes_are_kept_for_misses_once_a_trial_missed_the_target_on_a_seed(
    tmp_path: Path,
) -> None:
    class Uneven(BadLuck):
        """A batch of 128 misses the target on its second seed, others on two new seeds."""

        def quality(self, experiment: Experiment, samples: float) -> float:
            self.misses = (1,) if experiment.train.batch_size == 128 else (1000, 1001)
            return super().quality(experiment, samples)

    def searched(kind: type[BadLuck]) -> tuple[int, float]:
        study, launcher = opened(tmp_path, SPACE, "journal", name=kind.__name__), kind()
        options = SearchOptions(trials=None, minutes=3.0)
        clock = lambda: launcher.seconds  # noqa: E731
        Session(study, SPACE, [launcher], options, lambda text: None, clock).run()
        trials = study.trials()
        assert next_trial.is_uneven(trials) == (kind is Uneven)
        return len(trials), launcher.seconds

    even, uneven = searched(BadLuck), searched(Uneven)
    assert uneven[0] < even[0] and uneven[1] <= 180


def devices_of(study: Study, trial: int) -> int:
    return int(study.trials()[trial].parameters[DEVICES])


def test_trials_choose_among_numbers_of_devices(search: Searcher, tmp_path: Path) -> None:
    found, study, launcher, lines = search(devices=(1, 2, 4), trials=14)
    trials = study.trials()
    assert trials[0].parameters[DEVICES] == 1 and launcher.running[0].devices == 1
    assert [one.devices for one in firsts(launcher)] == [one.parameters[DEVICES] for one in trials]
    assert {devices_of(study, one.number) for one in trials} == {1, 2, 4}
    assert [texts_of(one)[-1] for one in trials] == [str(one.parameters[DEVICES]) for one in trials]
    assert found.beaten and found.winner.devices == 4 and found.winner.settings[DEVICES] == 4
    assert "4 devices" in settings_text(found.winner.settings)
    assert any("4 devices" in line for line in lines), "the lines of trials state their devices"
    # The cheapest is confirmed, though it is slower than the best by far.
    confirmed = {run["trial"] for run in study.facts["confirmations"]}
    assert {devices_of(study, number) for number in confirmed} >= {1, 4}
    again = {one.name: one.devices for one in launcher.running if "confirm" in one.name}
    assert all(devices_of(study, int(name.split("-")[2])) == n for name, n in again.items())


def test_an_interrupted_search_of_devices_goes_on_to_the_same_verdict(
    search: Searcher, tmp_path: Path
) -> None:
    two: dict[str, Any] = {"devices": (1, 2), "trials": 8}
    whole, study, _, _ = search(**two)
    expected = drawn(study)
    (tmp_path / "studies").unlink()
    with pytest.raises(KeyboardInterrupt):
        search(FakeLauncher(by_trial({4: "ctrl-c"})), **two)
    again, study, _, _ = search(**two)
    assert drawn(study)[:4] + drawn(study)[5:] == expected
    assert again.winner.settings == whole.winner.settings


def test_a_trial_is_of_use_while_no_other_is_as_fast_and_as_cheap() -> None:
    space = make_space(Mine(), 1, 0.5, samples=1000, more=(2, 4))

    def ended(number: int, devices: int, seconds: float) -> Trial:
        parameters = {**space.reference_parameters(), FACTOR: 1.0 + number, DEVICES: devices}
        return Trial(number, "COMPLETE", parameters, seconds, {"quality": 0.0}, {})

    found = [ended(0, 1, 100.0), ended(1, 4, 30.0), ended(2, 2, 55.0), ended(3, 4, 31.0)]
    trials = Trials(found)
    limits = [next_trial.time_to_beat(trials, space, count) for count in (1, 2, 4)]
    # On 1 device, a trial may take as long as the reference: the faster ones cost more.
    assert limits == [100.0, 55.0, 30.0]
    assert next_trial.time_to_beat(Trials(found[:2]), space, 2) == 60.0, "as dear as 4 for 30 s"
    assert [one.number for one in next_trial.challengers(trials, space, 4)] == [1, 2, 3]
