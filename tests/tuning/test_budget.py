"""The time that a search keeps for its confirmation."""

from __future__ import annotations

from pathlib import Path

from rankzero.tuning.budget import REFERENCE_SECONDS, Budget
from rankzero.tuning.objective import QUALITY
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.session import Session
from rankzero.tuning.space import FACTOR, make_space
from support.company import SPACE, Mine, opened
from support.fake_launcher import FakeLauncher


def test_slow_trials_leave_half_of_the_time_for_faster_ones(tmp_path: Path) -> None:
    """Three challengers as slow as the only good trial would take all of it."""
    study, own = opened(tmp_path, store="journal"), SPACE.reference_parameters()
    for parameters, seconds, missing in ((own, 100.0, 0.1), ({**own, FACTOR: 2.0}, 90.0, 0.0)):
        number = study.ask(parameters)
        facts = {"train_seconds": seconds}
        study.tell(number, "COMPLETE", seconds, {QUALITY: missing}, facts)
    study.note(REFERENCE_SECONDS, 100.0)
    options = SearchOptions(trials=None, minutes=1000 / 60)
    # One challenger and the reference take 1.1 * 3 * 190 s on three seeds.
    allowed = [
        Budget(study, SPACE, options, lambda: 0.0, spent, 1).leaves_time() for spent in (360, 380)
    ]
    assert allowed == [True, False]
    plan = "then up to 627 s to confirm at most 3 of them"
    assert plan in Budget(study, SPACE, options, lambda: 0.0, 0.0, 1).outlook()
    # Side by side, the confirmation takes as long as its longest run.
    allowed = [
        Budget(study, SPACE, options, lambda: 0.0, spent, 16).leaves_time() for spent in (880, 900)
    ]
    assert allowed == [True, False]
    # More of them cost nothing then, however little time there is.
    late = [Budget(study, SPACE, options, lambda: 0.0, 2000.0, at_once) for at_once in (1, 16)]
    reference, other = study.known
    three = [reference, other] * 3
    assert [one.allows_runs(three, least=three[:2]) for one in late] == [False, True]
    assert not late[1].allows_runs(three)


def test_a_target_that_the_first_evaluation_reached_asks_for_more_of_them(tmp_path: Path) -> None:
    study = opened(tmp_path, store="journal")
    number, options = study.ask(SPACE.reference_parameters()), SearchOptions()
    study.tell(number, "COMPLETE", 9.0, {QUALITY: 0.0}, {"curve": [[40, 9.0, 0.95]]})
    assert "train.eval_every=4 " in Budget(study, SPACE, options, lambda: 0.0, 0.0, 1).outlook()


def test_challengers_for_which_there_is_no_time_are_not_confirmed(tmp_path: Path) -> None:
    """An own learning rate that never reaches the quality costs most of the time."""
    space, launcher = make_space(Mine(lr=0.0007), 1, 0.5, samples=1000), FakeLauncher()
    study = opened(tmp_path, space, "journal", pruner="asha")
    options = SearchOptions(trials=None, minutes=1.5)
    Session(study, space, [launcher], options, lambda _: None, lambda: launcher.seconds).run()
    confirmed = {run["trial"] for run in study.facts["confirmations"]} - {0}
    assert 1 <= len(confirmed) < options.challengers and launcher.seconds < 1.1 * 90
