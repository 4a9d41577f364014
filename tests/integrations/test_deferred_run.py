"""The run of the adapters: it starts with its first value, and copies of it continue it."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from rankzero.events import Evaluated, RunEnded, StepsLogged
from rankzero.integrations.deferred_run import DeferredRun
from rankzero.integrations.own_loop.tracked_run import OPEN
from support.runs import of_kind
from support.spawned import log_second_step, train


def steps_and_ends(run: DeferredRun) -> tuple[list[int], list[str]]:
    folder = Path("mlruns/runs", str(run.name))
    steps = [step for event in of_kind(folder, StepsLogged) for step in event.steps]
    return steps, [event.status for event in of_kind(folder, RunEnded)]


def test_texts_are_artifacts_by_step() -> None:
    run = DeferredRun("mine", offline=True)
    run.log({"loss": 0.5, "phase": "warm-up"}, 3)
    run.log({"note": "no step"})
    run.end()
    folder = Path("mlruns/runs", str(run.name), "artifacts/text")
    assert (folder / "phase/step_3.md").read_text() == "warm-up"
    assert (folder / "note.md").read_text() == "no step"
    assert steps_and_ends(run) == ([3], ["FINISHED"])


def test_texts_of_an_evaluation_are_artifacts(capsys: pytest.CaptureFixture[str]) -> None:
    run = DeferredRun("mine", offline=True)
    run.evaluated({"val/loss": 0.5, "val/worst": "a cat"}, 3)
    run.end()
    folder = Path("mlruns/runs", str(run.name), "artifacts/text")
    assert (folder / "val/worst/step_3.md").read_text() == "a cat"
    assert "NaN" not in capsys.readouterr().out


def test_copy_continues_the_run_as_a_new_attempt() -> None:
    run = DeferredRun("mine", offline=True)
    run.log({"loss": 1.0}, 1)
    copy = pickle.loads(pickle.dumps(run))
    copy.log({"loss": 0.5}, 2)
    copy.end()
    assert copy.name == run.name and steps_and_ends(run) == ([1, 2], ["FINISHED"] * 2)


def test_spawned_process_continues_the_run_and_its_parent_goes_on_after_it() -> None:
    run = DeferredRun("mine", offline=True)
    run.log({"loss": 1.0}, 1)
    process = multiprocessing.get_context("spawn").Process(target=log_second_step, args=(run,))
    process.start()
    process.join()
    assert process.exitcode == 0
    run.log({"loss": 0.25}, 3)
    run.end()
    assert steps_and_ends(run) == ([1, 2, 3], ["FINISHED"] * 3)


def test_second_training_that_is_continued_keeps_its_steps() -> None:
    run = DeferredRun("mine", offline=True)
    for begins, step in ((0, 4), (0, 4), (4, 6)):
        run.begin_training(begins)
        run.log({"loss": 1.0}, step)
    run.end()
    assert steps_and_ends(run)[0] == [4, 8, 10]


def test_lower_checkpoint_of_a_training_that_its_framework_resumes_needs_no_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for step in (20, 10):
        run = DeferredRun("mine", name="r1", offline=True)
        run.begin_training(step - 5)
        run.checkpoint({"model": {}}, step, {})
        run.end()
    assert "latest()" not in capsys.readouterr().out


def test_training_ends_what_its_thread_has_left_open() -> None:
    left, late, newest = (DeferredRun("mine", offline=True) for _ in range(3))
    left.begin_training().unless_ended = RuntimeError("caught")
    late.begin_training()
    late.end()
    late.log({"loss": 1.0}, 1)
    newest.begin_training()
    assert steps_and_ends(left)[1] == ["FAILED"]
    assert steps_and_ends(late) == ([1], ["FINISHED"] * 2)
    newest.end()
    assert not OPEN


def test_training_stops_one_of_an_earlier_call_whose_framework_reports_no_end() -> None:
    """As in a sweep with Accelerate that catches the error of a trial."""
    left, newest = (DeferredRun("mine", offline=True) for _ in range(2))
    left.begin_training(call=object())
    newest.begin_training(call=object())
    assert steps_and_ends(left)[1] == ["KILLED"] and not steps_and_ends(newest)[1]
    newest.end()


def test_evaluation_after_a_cell_that_was_interrupted_ends_the_run_again() -> None:
    run = DeferredRun("mine", offline=True)
    run.begin_training()
    run.evaluated({"val/loss": 1.0}, 4)
    run.begin().finish(KeyboardInterrupt())  # As the end of the cell does.
    run.evaluated({"val/loss": 0.5}, 4)
    run.end_if_over()
    assert steps_and_ends(run)[1] == ["KILLED", "FINISHED"]
    assert run.begin().had(["final/val/loss"], 4)
    run.end()


def test_training_ends_none_that_it_runs_within() -> None:
    outer, inner = DeferredRun("mine", offline=True), DeferredRun("mine", offline=True)
    outer.begin_training().unless_ended = RuntimeError("caught")

    def callback_of_an_epoch() -> None:
        inner.begin_training()
        inner.end()

    callback_of_an_epoch()
    assert steps_and_ends(outer)[1] == []
    outer.end()


def test_two_callbacks_of_one_training_end_neither() -> None:
    runs, call = [DeferredRun("mine", offline=True) for _ in range(2)], object()
    for run in runs:
        run.begin_training(call=call).unless_ended = RuntimeError("caught")
    for run in runs:
        assert steps_and_ends(run)[1] == []
        run.end()


def test_training_of_another_thread_is_not_ended() -> None:
    run, other = DeferredRun("mine", offline=True), DeferredRun("mine", offline=True)

    def train() -> None:
        other.begin_training().unless_ended = RuntimeError("caught")

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    run.begin_training()
    assert steps_and_ends(other)[1] == []
    for one in (run, other):
        one.end()


def test_second_training_begins_behind_the_highest_step() -> None:
    run = DeferredRun("mine", offline=True)
    run.begin_training()
    run.log({"loss": 1.0}, 4)
    run.end()
    run.log({"fold/accuracy": 0.5}, 0)
    run.begin_training()
    run.log({"epoch": 1.0}, 1)
    run.log({"loss": 1.0}, 4)
    run.begin_training()
    run.log({"loss": 1.0}, 1)
    run.end()
    assert steps_and_ends(run)[0] == [4, 0, 5, 8, 9]


def test_evaluation_after_the_training_is_the_final_one(capsys: pytest.CaptureFixture[str]) -> None:
    run = DeferredRun("mine", offline=True)
    run.begin_training()
    run.evaluated({"val/loss": 1.0}, 2)
    run.evaluated({"val/loss": 0.5}, 4)
    run.end()
    run.evaluated({"val/loss": 0.25}, 4)
    run.evaluated({"val/accuracy": 0.75}, 4)
    run.end()
    evaluations = of_kind(Path("mlruns/runs", str(run.name)), Evaluated)
    found = [(one.step, dict(one.metrics)) for one in evaluations]
    assert found[2:] == [(4, {"final/val/loss": 0.25}), (4, {"val/accuracy": 0.75})]
    assert "earlier attempt" not in capsys.readouterr().out


def test_evaluation_by_another_process_is_one_after_the_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained, others = (DeferredRun("mine", name="r1", offline=True) for _ in range(2))
    others.evaluated({"val/loss": 2.0}, 0)  # Before the training.
    others.end()
    trained.begin_training()
    trained.evaluated({"val/loss": 1.0}, 4)
    trained.end()
    others.evaluated({"val/loss": 0.25}, 0)
    others.evaluated({"test/loss": 0.75}, 0)
    others.end()
    found = [(one.step, dict(one.metrics)) for one in of_kind(Path("mlruns/runs/r1"), Evaluated)]
    assert found[1:] == [
        (4, {"val/loss": 1.0}),
        (4, {"final/val/loss": 0.25}),
        (4, {"test/loss": 0.75}),
    ]
    assert "earlier attempt" not in capsys.readouterr().out


FORKED = """
import os, sys, warnings
from rankzero.integrations.deferred_run import DeferredRun
warnings.simplefilter("ignore")  # Python warns of forks with threads.
run = DeferredRun("mine", offline=True)
if "tags" in sys.argv:
    run.begin().set_tags({"team": "a"})
if "ends" in sys.argv:
    run.begin().finish()
for _ in range(2 if "twice" in sys.argv else 1):
    child = os.fork()
    if child == 0:
        try:
            run.begin_training()
            run.evaluated({"loss": 1.0}, 1)
            run.end()
        except Exception as error:
            print(error, flush=True)
            os._exit(3)
        os._exit(0)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if "reopens" in sys.argv:
        run.begin().finish()
run.log({"test": 2.0}, 2)
run.end()
"""


def test_forked_process_continues_the_run_that_its_parent_has_ended() -> None:
    output = subprocess.check_output([sys.executable, "-c", FORKED, "tags", "ends"], text=True)
    assert "child 0" in output
    (folder,) = Path("mlruns/runs").iterdir()
    assert [one.step for one in of_kind(folder, Evaluated)] == [1]
    assert [one.steps for one in of_kind(folder, StepsLogged)] == [[2]]


@pytest.mark.parametrize("words", [[], ["reopens"]])
def test_second_forked_training_counts_on_from_the_first(words: list[str]) -> None:
    script = [sys.executable, "-c", FORKED, "ends", "twice", *words]
    output = subprocess.check_output(script, text=True)
    assert output.count("child 0") == 2 and "earlier attempt" not in output
    (folder,) = Path("mlruns/runs").iterdir()
    assert [one.step for one in of_kind(folder, Evaluated)] == [1, 2]


def test_spawned_process_that_loads_data_with_the_run_leaves_it_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = DeferredRun("mine", offline=True)
    run.begin_training()
    loader = DataLoader([run], num_workers=1, multiprocessing_context="spawn")
    # The process gets a copy of the run, and ends.
    command = [sys.executable, "-c", ""]
    monkeypatch.setattr("multiprocessing.spawn.get_command_line", lambda **_: command)
    iter(loader)
    assert not run.is_over
    # As torchdata's loader, and then as a strategy that code without a module's name calls.
    for names in ({"__name__": "torchdata.stateful_dataloader"}, {}):
        assert not run.is_over
        process = multiprocessing.get_context("spawn").Process(target=print, args=(run,))
        exec("process.start()", {"process": process, **names})  # noqa: S102
        process.join()
    assert run.is_over


def test_second_spawned_training_counts_on_from_the_first() -> None:
    run = DeferredRun("mine", offline=True, name="r1")
    for _ in range(2):
        process = multiprocessing.get_context("spawn").Process(target=train, args=(run, 3))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert run.is_over and run.name == "r1"
    run.end()
    assert steps_and_ends(run) == ([3, 6], ["FINISHED"] * 3)


def test_training_in_a_fork_of_the_process_that_has_the_run_open_is_an_error() -> None:
    output = subprocess.check_output([sys.executable, "-c", FORKED, "tags"], text=True)
    assert "child 3" in output and "call the run's finish() before the training" in output
