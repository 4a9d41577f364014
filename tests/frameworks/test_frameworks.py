"""The adapters with the real frameworks: the examples, and how their runs end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from frameworks.examples import (
    EXAMPLES,
    SECONDS,
    best,
    checkpoints,
    needs,
    run,
    scripted,
    steps_of,
    tracked,
)
from frameworks.lightning_script import LIGHTNING_STEPS, fitted, points
from rankzero.events import Evaluated, RunEnded, StepsLogged

pytestmark = pytest.mark.timeout(2 * SECONDS)

FRAMEWORKS = ("lightning", "transformers", "accelerate", "ignite")


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "keras"])
def test_adapter_without_its_framework_names_the_extra(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"rankzero.integrations.{framework}", raising=False)
    for name in [name for name in sys.modules if name.startswith(f"{framework}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=rf"pip install rankzero\[{framework}\]"):
        importlib.import_module(f"rankzero.integrations.{framework}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_example_is_tracked_to_its_end(framework: str, tmp_path: Path) -> None:
    needs(framework)
    code, output = run(str(EXAMPLES / f"{framework}_digits.py"), tmp_path, "3")
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 3 * 22 + 1))
    assert any("lr" in name or "learning_rate" in name for name in found.params), found.params
    assert checkpoints(tmp_path) or framework in ("transformers", "ignite")


def broken_script(framework: str, folder: Path, main: str = "example.main(3)") -> str:
    """Write a script whose training raises ValueError after thirty steps. Return its path."""
    script = folder / "broken.py"
    script.write_text(f"""
import sys
sys.path[:0] = [{str(EXAMPLES)!r}, {str(EXAMPLES.parent)!r}]
import torch
import {framework}_digits as example
calls = []
def broken(*_, **__):
    calls.append(1)
    if len(calls) > 30:
        raise ValueError("broken on purpose")
    return real(*_, **__)
real, example.cross_entropy = example.cross_entropy, broken
if __name__ == "__main__":
    {main}
""")
    return str(script)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_exception_in_the_training_fails_the_run(framework: str, tmp_path: Path) -> None:
    needs(framework)
    code, output = run(broken_script(framework, tmp_path), tmp_path)
    assert code != 0 and "broken on purpose" in output
    found = tracked(tmp_path)
    assert found.status == "FAILED"
    assert "ValueError: broken on purpose" in found.tags["rankzero.reason"]


def test_an_exception_that_the_script_catches_fails_the_run_of_transformers(tmp_path: Path) -> None:
    needs("transformers")
    # No framework reports it, and Python has no uncaught exception at the end.
    caught = "try: example.main(3)\n    except ValueError: pass"
    code, output = run(broken_script("transformers", tmp_path, caught), tmp_path)
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FAILED"
    assert "did not reach its end" in found.tags["rankzero.reason"]


def test_two_ranks_under_accelerates_launcher_are_one_run(tmp_path: Path) -> None:
    needs("accelerate")
    options = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    example = str(EXAMPLES / "accelerate_digits.py")
    words = ("accelerate.commands.launch", *options.split(), example, "2")
    code, output = run("-m", tmp_path, *words)
    assert code == 0, output
    assert tracked(tmp_path).status == "FINISHED"


TWICE = {
    "lightning": """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger
class Model(BoringModel):
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.step(batch))
logger = RankZeroLogger("again", name="r1", offline=True)
quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
for _ in range(2):
    callbacks = [RankZeroCallback(logger, checkpoints=False)]
    trainer = Trainer(max_steps=4, logger=logger, callbacks=callbacks, **quiet)
    trainer.fit(Model())
    trainer.test(Model())
    logger.log_hyperparams(None)
    logger.log_hyperparams({"late": 1})
    logger.experiment.set_tags({"team": "a"})
""",
    "transformers": """
import torch
from transformers import Trainer, TrainingArguments
from rankzero.integrations.transformers import RankZeroCallback
class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return {"loss": (super().forward(x) - labels).pow(2).mean()}
data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 16
arguments = TrainingArguments("out", max_steps=4, logging_steps=1, report_to="none", use_cpu=True)
tracker = RankZeroCallback("again", name="r1", offline=True)
trainer = Trainer(Model(2, 1), arguments, train_dataset=data, eval_dataset=data,
    callbacks=[tracker])
for _ in range(2):
    trainer.train()
    # As in the examples of Transformers.
    trainer.predict(data, metric_key_prefix="predict")
""",
    "accelerate": """
from accelerate import Accelerator
from rankzero.integrations.accelerate import RankZeroTracker
accelerator = Accelerator(log_with=RankZeroTracker("again", name="r1", offline=True), cpu=True)
for _ in range(2):
    accelerator.init_trackers("again", {"lr": 0.1})
    for step in range(1, 5):
        accelerator.log({"train/loss": 1.0}, step)
    accelerator.end_training()
    accelerator.log({"test/loss": 1.0})
""",
    "ignite": """
from ignite.engine import Engine
from ignite.metrics import Average
from rankzero.integrations.ignite import RankZeroHandler
trainer, evaluator = Engine(lambda engine, batch: 1.0), Engine(lambda engine, batch: 1.0)
Average().attach(evaluator, "test/loss")
RankZeroHandler("again", name="r1", offline=True).attach(trainer, evaluator)
for _ in range(2):
    trainer.run(range(4), max_epochs=1)
    evaluator.run(range(4))
""",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_run_goes_on_when_it_is_tested_and_trained_again(framework: str, tmp_path: Path) -> None:
    events, _ = scripted(framework, tmp_path, TWICE[framework])
    ends = [event.status for event in events if isinstance(event, RunEnded)]
    assert len(ends) >= 3 and {*ends} == {"FINISHED"}
    rows = [event for event in events if isinstance(event, StepsLogged)]
    steps = [step for event in rows if "train/loss" in event.metrics for step in event.steps]
    assert steps == list(range(1, 9)), steps
    found = points(events).items()
    assert sum(len(values) for name, values in found if name.endswith("test/loss")) == 2


OUTPUTS = """
import numpy, torch
from ignite.engine import Engine
from rankzero.integrations.ignite import RankZeroHandler
weight = torch.ones(1, requires_grad=True)
def step(engine, batch):
    return {"loss": weight * batch, "ragged": [[1], [2, 3]], "parts": [weight, weight],
        "array": numpy.ones(3), "single": numpy.float32(2.0), "phase": "warm-up"}
trainer = Engine(step)
RankZeroHandler("odd", name="r1", offline=True).attach(trainer)
trainer.run(range(3), max_epochs=1)
"""


def test_an_output_of_ignite_that_is_no_single_value_does_not_end_the_training(
    tmp_path: Path,
) -> None:
    events, output = scripted("ignite", tmp_path, OUTPUTS)
    for name in ("ragged", "parts", "array"):
        assert output.count(f"train/{name} is not a single value") == 1
    found = points(events)
    assert {*found} == {"train/loss", "train/single"}
    rows = [event for event in events if isinstance(event, StepsLogged)]
    assert [step for event in rows for step in event.steps] == [1, 2, 3]


@pytest.mark.parametrize(
    ("calls", "steps", "evaluations"),
    [
        ("fit(Model)", 12, [6, 12]),
        ("fit(Two)", 12, [6, 12]),
        ("fit(Model, accumulate_grad_batches=4)", 4, [2, 4]),
        ("fit(Model); fit(Model, 3, ckpt_path='saved/last.ckpt')", 18, [6, 12, 18]),
    ],
)
def test_lightnings_logger_and_callback_count_the_same_steps(
    calls: str, steps: int, evaluations: list[int], tmp_path: Path
) -> None:
    events, output = scripted("lightning", tmp_path, f"{LIGHTNING_STEPS}\n{calls}\n")
    assert "twice" not in output and "earlier attempt" not in output, output
    found = points(events)
    assert list(found["val/loss"]) == evaluations
    assert list(found["train/mine"]) == list(range(1, steps + 1))
    assert list(found["train/loss"]) == list(range(1, steps + 1))
    if "accumulate" in calls:
        # The losses of an epoch are 1 to 6, and then 7 to 12: four are a step, then two.
        assert list(found["train/loss"].values()) == [2.5, 5.5, 8.5, 11.5]


def test_a_run_of_an_older_version_counts_on_with_two_optimizers(tmp_path: Path) -> None:
    lines = [
        "def as_before():",
        "    saved = torch.load('saved/last.ckpt', weights_only=False)",
        "    del saved['callbacks']['RankZeroCallback']",
        "    torch.save(saved, 'saved/last.ckpt')",
        "fit(Two)",
        "as_before()",
        # Its checkpoint has 12 batches and 24 steps of optimizers.
        "fit(Two, 3, ckpt_path='saved/last.ckpt')",
        "fit(Two, 4, ckpt_path='saved/last.ckpt')",
    ]
    found = [one for one in fitted(tmp_path, *lines) if isinstance(one, StepsLogged)]
    steps = [step for one in found if "train/loss" in one.metrics for step in one.steps]
    assert steps == [*range(1, 13), *range(25, 37)]


def test_a_validation_after_lightnings_training_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "trainer = fit(Model)",
        "newest = trainer.lightning_module.state_dict()",
        "other = Model()",
        "trainer.validate(other)",
        "from rankzero import track",
        "kept = track('steps', name='r1', offline=True).latest()['model']",
        "assert all(torch.equal(kept[name], newest[name]) for name in newest), (kept, newest)",
    )
    assert [one.step for one in events if isinstance(one, Evaluated)] == [6, 12, 12]


@pytest.mark.parametrize("metric", ["accuracy", "val_accuracy", "val/accuracy"])
def test_goal_is_judged_whatever_the_module_calls_its_metric(metric: str, tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Named(Model):",
        "    def validation_step(self, batch, batch_idx):",
        f"        self.log({metric.replace('/', '_')!r}, 1.0 + self.trainer.current_epoch)",
        "from rankzero.experiment import Goal",
        f"fit(Named, goal=Goal({metric!r}, 'max'))",
    )
    found = [(one.metrics, one.best) for one in events if isinstance(one, Evaluated)]
    assert found == [({metric: 1.0}, True), ({metric: 2.0}, True)]


def test_lightnings_fast_dev_run_makes_no_run(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "fit(Model, fast_dev_run=True)",
        "from pathlib import Path",
        "assert not Path('mlruns').exists()",
        "fit(Model)",
    )
    assert [one.step for one in events if isinstance(one, Evaluated)] == [6, 12]


def test_steps_of_a_validation_keep_all_their_values(tmp_path: Path) -> None:
    events = fitted(
        tmp_path,
        "class Stepping(Model):",
        "    def validation_step(self, batch, batch_idx):",
        "        self.log('mine', 10.0 + batch_idx, on_step=True, on_epoch=False)",
        "fit(Stepping, epochs=1, limit_train_batches=2, limit_val_batches=4)",
    )
    assert [values for name, values in points(events).items() if name.startswith("mine")] == [
        {0: 10.0, 1: 11.0, 2: 12.0, 3: 13.0}
    ]
    rows = [event for event in events if isinstance(event, StepsLogged)]
    mine = [event for event in rows if any(name.startswith("mine") for name in event.metrics)]
    assert [step for event in mine for step in event.steps] == [0, 1, 2, 3]


EVALUATORS = """
from ignite.engine import Engine, Events
from ignite.metrics import Average
from rankzero.integrations.ignite import RankZeroHandler
trainer, evaluator = Engine(lambda engine, batch: 1.0), Engine(lambda engine, batch: batch)
Average().attach(evaluator, "score")
RankZeroHandler("two", name="r1", offline=True).attach(trainer, evaluator)
@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(_):
    evaluator.run([1.0])  # the training set
    evaluator.run([2.0])
trainer.run(range(3), max_epochs=2)
evaluator.run([4.0])
"""


def test_ignites_evaluator_of_two_data_sets_is_noted(tmp_path: Path) -> None:
    events, output = scripted("ignite", tmp_path, EVALUATORS)
    assert output.count("attach an evaluator that runs on the validation set only") == 1, output
    assert points(events) == {
        "train/loss": dict.fromkeys(range(1, 7), 1.0),
        "val/score": {3: 1.0, 6: 1.0},
        "final/val/score": {6: 4.0},
    }


HANDLED = """
from ignite.engine import Engine, Events
from rankzero.integrations.ignite import RankZeroHandler
from rankzero.integrations.own_loop.tracked_run import OPEN
trainer, tester = Engine(lambda engine, batch: 1.0), Engine(lambda engine, batch: 2.0)
tracker = RankZeroHandler("tested", name="r1", offline=True).attach(trainer)
tracker.attach_output_handler(tester, Events.COMPLETED, "test",
    output_transform=lambda output: output)
trainer.run(range(3), max_epochs=1)
tester.run([1.0])
assert not OPEN
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.terminate(skip_completed=True))
trainer.run(range(3), max_epochs=1)
assert not OPEN
"""


def test_output_handler_of_an_evaluator_after_the_training_ends_the_run(tmp_path: Path) -> None:
    events, _ = scripted("ignite", tmp_path, HANDLED)
    assert points(events)["test/output"] == {1: 2.0}


RESUMED = """
from ignite.engine import Engine
from rankzero.integrations.ignite import RankZeroHandler
def made():
    trainer, tracker = Engine(lambda engine, batch: 1.0), RankZeroHandler(name="r1", offline=True)
    tracker.attach(trainer)
    return trainer, tracker
trainer, tracker = made()
for _ in range(2):
    trainer.run(range(4), max_epochs=1)
saved = trainer.state_dict(), tracker.state_dict()
for made_again, state in zip(pair := made(), saved):  # as another process does
    made_again.load_state_dict(state)
pair[0].run(range(4), max_epochs=2)
"""


def test_second_training_of_ignite_that_is_resumed_keeps_its_steps(tmp_path: Path) -> None:
    events, _ = scripted("ignite", tmp_path, RESUMED)
    assert list(points(events)["train/loss"]) == list(range(1, 13))


GOAL = """
from accelerate import Accelerator
import rankzero.integrations.accelerate
from rankzero import Goal
accelerator = Accelerator(log_with="rankzero", cpu=True)
options = {"name": "r1", "offline": True, "goal": Goal("val/score", "max")}
accelerator.init_trackers("mine", {}, {"rankzero": options})
for epoch, score in enumerate([0.5, 0.75, 0.25, 0.5]):
    accelerator.log({"train/loss": 1.0}, GAP * epoch)
    accelerator.log({"val/score": score, "val/other": 1.0}, GAP * epoch)
accelerator.end_training()
"""


@pytest.mark.parametrize("gap", [1, 2])
def test_accelerates_goal_is_judged(gap: int, tmp_path: Path) -> None:
    events, output = scripted("accelerate", tmp_path, GOAL.replace("GAP", str(gap)))
    assert "twice" not in output, output
    found = [(one.step, one.best) for one in events if isinstance(one, Evaluated)]
    # Those of one second are judged together: the last of those that were the best, and the newest.
    assert (gap, True) in found and found[-1] == (3 * gap, False)
    assert {step for step, best in found if best} <= {0, gap}
    (end,) = (one for one in events if isinstance(one, RunEnded))
    assert (end.metrics["best"], end.metrics["val/score"]) == (0.75, 0.5)
