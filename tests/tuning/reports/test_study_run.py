"""The run of a study: its curves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rankzero import Experiment
from rankzero.errors import RunFailed
from rankzero.events import Event, RunEnded, StepsLogged
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tuning.reports.study_run import StudyRun, own_settings, texts_of, trials_markdown
from rankzero.tuning.space import settings_text
from rankzero.tuning.trial import State, Trial, Trials


class Log:
    """Keeps the steps that a run logs."""

    folder = None

    def __init__(self) -> None:
        self.steps, self.bests = list[int](), list[float]()

    def __call__(self, event: Event) -> None:
        assert isinstance(event, StepsLogged)
        self.steps += event.steps
        self.bests += event.metrics["search/best_value"]

    def flush(self) -> None:
        pass


def trial(number: int, state: State = "COMPLETE") -> Trial:
    return Trial(number, state, {"lr_factor": 1.0 + number}, 1.0, {}, {})


def logged(*calls: Trials) -> list[int]:
    log = Log()
    run = StudyRun(cast("Any", log), {})
    for trials in calls:
        run.log_trials(trials)
    return log.steps


def test_a_helpers_trial_is_in_the_curve_after_the_leader_has_resumed() -> None:
    trials = Trials([trial(0), trial(1, "RUNNING"), trial(2)])
    before = logged(trials)
    # A resumed run delivers only the steps after those of its earlier attempts.
    trials.put(trial(1))
    assert before + [step for step in logged(trials) if step > max(before)] == [0, 1, 2]


def test_each_trial_is_logged_once() -> None:
    trials = Trials([trial(0), trial(1, "RUNNING"), trial(2)])
    assert logged(trials, trials) == [0]
    log = Log()
    run = StudyRun(cast("Any", log), {})
    for number in range(3):
        run.log_trials(trials)
        trials.put(trial(1) if number == 0 else trial(number + 2))
    assert log.steps == [0, 1, 2, 3]


def test_the_best_value_of_a_trials_step_is_none_of_a_later_trial() -> None:
    values = [10.0, 20.0, 8.0]
    trials = Trials(dataclasses.replace(trial(n), value=one) for n, one in enumerate(values))
    log = Log()
    StudyRun(cast("Any", log), {}).log_trials(trials)
    assert log.bests == [10.0, 10.0, 8.0]


def test_a_sweet_spot_of_an_earlier_session_does_not_stay(tmp_path: Path) -> None:
    log = SimpleNamespace(folder=SimpleNamespace(artifacts=tmp_path))
    run = StudyRun(cast("Any", log), {})
    run.write_sweet_spot(Experiment(), "It won.", "rankzero train x.py --from s")
    assert "# Use it: rankzero train" in (tmp_path / "sweet_spot.yaml").read_text()
    run.write_sweet_spot(Experiment(), "Nobody won.", "")
    assert not list(tmp_path.iterdir())


def test_tables_of_trials_have_the_searched_settings_and_the_seeds(tmp_path: Path) -> None:
    trials = [
        dataclasses.replace(
            trial(n), parameters={"lr_factor": 1.0, "width": n}, facts={"lr": 0.1, "seeds": 3}
        )
        for n in (16, 32)
    ]
    log = Mock(folder=RunFolder(tmp_path))
    StudyRun(log, {}).write_trials(trials)
    # Without this tag, MLflow's viewer shows the text of the file.
    [event] = (call.args[0] for call in log.call_args_list)
    [listed] = json.loads(event.tags["mlflow.loggedArtifacts"])
    assert listed == {"path": "trials.json", "type": "table"}
    table = json.loads((tmp_path / "artifacts/trials.json").read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["width"], row["seeds"]) for row in rows] == [(16, 3), (32, 3)]
    first, _, row = trials_markdown(trials).splitlines()[:3]
    assert "width" in first and "seeds" in first and "16" in row
    assert "width" in (tmp_path / "artifacts/trials.csv").read_text().splitlines()[0]


def test_a_trial_that_missed_the_target_says_so_below_the_others() -> None:
    missed = dataclasses.replace(trial(0), value=0.5, constraints={"quality": 0.1})
    first, second = trials_markdown([missed, trial(1)]).splitlines()[2:4]
    assert "COMPLETE" in first and "missed" in second and "COMPLETE" not in second
    # Its value is not a time that anybody measured.
    assert texts_of(missed)[2] == "" and texts_of(trial(1))[2] == "1"


def test_a_setting_with_a_line_break_breaks_no_table_and_no_file() -> None:
    found = Trial(0, "COMPLETE", {"prompt": "Q|\nA"}, 1.0, {}, {})
    assert trials_markdown([found]).splitlines()[2].endswith(" Q\\| A |")
    assert settings_text(found.parameters) == "prompt Q| A"


def test_a_setting_with_the_name_of_a_column_has_another_head() -> None:
    parameters = {"seeds": 7, "batch": 4, "width": 16}
    found = Trial(0, "COMPLETE", parameters, 1.0, {}, {"seeds": 3})
    heads = {"seeds": "setting seeds", "batch": "setting batch", "width": "width"}
    assert own_settings([found]) == heads
    first = trials_markdown([found]).splitlines()[0]
    assert first.count("seeds") == 2 and "setting seeds" in first


@pytest.mark.parametrize(
    ("error", "reason"), [(RunFailed("too short"), "too short"), (KeyError("x"), "KeyError: 'x'")]
)
def test_a_reason_names_the_class_of_an_error_only_if_it_is_no_message(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    identity = Identity("s", "uuid", "tests", f"sqlite:///{tmp_path / 'mlflow.db'}")
    options: dict[str, Any] = {"offline": True, "tags": {}}
    with (
        pytest.raises(type(error)),
        StudyRun.open(tmp_path, identity, Experiment(), [], **options) as run,
    ):
        raise error
    (ended,) = (one for one in read_all(run.folder.events) if isinstance(one, RunEnded))
    assert ended.reason == reason


def test_a_disk_that_hides_the_claim_for_a_moment_costs_no_end(tmp_path: Path) -> None:
    identity = Identity("s", "uuid", "tests", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with StudyRun.open(tmp_path, identity, Experiment(), [], offline=True, tags={}) as run:
        run.finish("It is decided.", {})
        (run.folder.path / "recorder.json").rename(tmp_path / "away")
    (ended,) = (one for one in read_all(run.folder.events) if isinstance(one, RunEnded))
    assert ended.status == "FINISHED"
