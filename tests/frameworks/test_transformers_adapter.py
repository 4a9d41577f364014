"""Transformers' adapter: evaluations after a training, searches, and values of subclasses."""

from __future__ import annotations

from pathlib import Path

import pytest

from frameworks.examples import SECONDS, needs, run
from frameworks.lightning_script import points
from rankzero.catalog.lookup import folders
from rankzero.events import Noticed, RunEnded, RunStarted, StepsLogged
from rankzero.run_store.journal import read_all

pytestmark = pytest.mark.timeout(2 * SECONDS)

SCRIPT = """
import torch
from transformers import Trainer, TrainingArguments
from rankzero.integrations.own_loop.tracked_run import OPEN
from rankzero.integrations.transformers import RankZeroCallback

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).pow(2).mean()}

DATA = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 16

def trainer(tracker, kind=Trainer, steps=2, **options):
    arguments = TrainingArguments("out", max_steps=steps, logging_steps=1, report_to="none",
        use_cpu=True, disable_tqdm=True, **options)
    return kind(Model(2, 1), arguments, train_dataset=DATA, eval_dataset=DATA, callbacks=[tracker])
"""


def trained(folder: Path, *lines: str, code: int = 0) -> dict[str, list[object]]:
    """Run lines after those above; return the events of each run."""
    needs("transformers")
    (folder / "script.py").write_text("\n".join([SCRIPT, *lines]))
    ended, output = run("script.py", folder)
    assert ended == code, output
    runs = folders(folder / "mlruns/runs")
    return {one.path.name: list(read_all(one.events)) for one in runs}


def statuses(events: list[object]) -> list[str]:
    return [event.status for event in events if isinstance(event, RunEnded)]


def test_trials_that_are_evaluated_have_ended_before_the_next(tmp_path: Path) -> None:
    found = trained(
        tmp_path,
        "for number in range(2):",
        "    one = trainer(RankZeroCallback('trials', name=f'r{number}', offline=True))",
        "    one.train()",
        "    one.evaluate()",
        "    one.evaluate()",
        "    assert not OPEN",
        "raise ValueError('of the next trial')",
        code=1,
    )
    for name in ("r0", "r1"):
        assert statuses(found[name]) == ["FINISHED"] * 3
        assert list(points(found[name])["val/loss"]) == [2]
        assert list(points(found[name])["final/val/loss"]) == [2]


def test_second_training_that_is_resumed_keeps_its_steps(tmp_path: Path) -> None:
    found = trained(
        tmp_path,
        "tracker = RankZeroCallback('again', name='r1', offline=True)",
        "trainer(tracker).train()",
        "trainer(tracker, steps=4, save_steps=2).train()",
        # As another process does, with a checkpoint of the second training.
        "tracker = RankZeroCallback('again', name='r1', offline=True)",
        "resumed = trainer(tracker, steps=6)",
        "resumed.train(resume_from_checkpoint='out/checkpoint-4')",
    )["r1"]
    steps = [one.steps for one in found if isinstance(one, StepsLogged) and one.metrics]
    assert max(step for some in steps for step in some) == 8
    assert not [one.text for one in found if isinstance(one, Noticed)]


def test_each_trial_of_a_search_is_a_run(tmp_path: Path) -> None:
    needs("optuna")
    found = trained(
        tmp_path,
        "import optuna",
        "class Pruned(Trainer):",
        "    def evaluate(self, *args, **options):",
        "        if self.args.learning_rate == 0.5:",
        "            raise optuna.TrialPruned",
        "        return super().evaluate(*args, **options)",
        "one = trainer(RankZeroCallback('hp', name='r', offline=True), Pruned,",
        "    eval_strategy='steps', eval_steps=2)",
        "one.model_init = lambda: Model(2, 1)",
        "one.hyperparameter_search(backend='optuna', n_trials=2, direction='minimize',",
        "    sampler=optuna.samplers.GridSampler({'learning_rate': [0.25, 0.5]}, seed=0),",
        "    hp_space=lambda trial: {",
        "        'learning_rate': trial.suggest_float('learning_rate', 0.1, 1.0)})",
    )
    rates = {name: start_of(events).params["learning_rate"] for name, events in found.items()}
    assert {*rates} == {"r-1", "r-2"} and {*rates.values()} == {"0.25", "0.5"}
    for name, events in found.items():
        assert statuses(events)[0] == ("FAILED" if rates[name] == "0.5" else "FINISHED")
        assert start_of(events).params["trial"] == name[-1]


def test_search_that_continues_and_the_training_after_it_take_new_runs(tmp_path: Path) -> None:
    needs("optuna")
    found = trained(
        tmp_path,
        "import contextlib, transformers",
        "state = transformers.TrainerState(is_hyper_param_search=True)",
        "with contextlib.suppress(TypeError):  # a run that does not begin takes no number",
        "    RankZeroCallback('hp', name='r', wrong=1).on_train_begin(",
        "        transformers.TrainingArguments('x'), state, None)",
        "for _ in range(2):",
        "    tracker = RankZeroCallback('hp', name='r', offline=True)",
        "    one = trainer(tracker, eval_strategy='steps', eval_steps=2)",
        "    one.model_init = lambda: Model(2, 1)",
        "    one.hyperparameter_search(backend='optuna', n_trials=1, direction='minimize',",
        "        hp_space=lambda trial: {",
        "            'learning_rate': trial.suggest_float('learning_rate', 0.1, 1.0)})",
        "one.train()",
    )
    assert {*found} == {"r-1", "r-2", "r"}
    for events in found.values():
        assert statuses(events) == ["FINISHED"] and max(points(events)["train/loss"]) == 2
    assert [start_of(found[name]).params.get("trial") for name in ("r-2", "r")] == ["2", None]


def start_of(events: list[object]) -> RunStarted:
    return next(event for event in events if isinstance(event, RunStarted))


def test_values_of_an_evaluation_that_only_a_log_has_are_kept(tmp_path: Path) -> None:
    found = trained(
        tmp_path,
        "class Own(Trainer):",
        "    def evaluate(self, *args, **options):",
        "        metrics = super().evaluate(*args, **options)",
        "        self.log({'eval_extra': 1.0})",
        "        return metrics",
        "    def log(self, logs, *args, **options):",
        "        if 'eval_loss' in logs:",
        "            logs = {**logs, 'eval_stored': 2.0}",
        "        super().log(logs, *args, **options)",
        "tracker = RankZeroCallback('own', name='r1', offline=True)",
        "one = trainer(tracker, Own, eval_strategy='steps', eval_steps=1)",
        "one.train()",
        "one.evaluate()",
        "assert not OPEN",
    )["r1"]
    values = points(found)
    assert values["val/extra"] == {1: 1.0, 2: 1.0} and values["val/stored"] == {1: 2.0, 2: 2.0}
    assert [*values["val/loss"]] == [1, 2] and [*values["final/val/loss"]] == [2]
    assert values["final/val/extra"] == {2: 1.0}
    assert not [one.text for one in found if isinstance(one, Noticed)]
