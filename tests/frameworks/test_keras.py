"""The Keras callback with Keras and TensorFlow: replicas, workers, and how its runs end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from frameworks.examples import (
    EXAMPLES,
    SECONDS,
    all_tracked,
    best,
    checkpoints,
    end,
    free_ports,
    needs,
    run,
    start,
    steps_of,
    tracked,
)
from rankzero.catalog.lookup import folders
from rankzero.events import RunEnded
from support.runs import of_kind

# TensorFlow's import alone takes ten seconds on two busy cores.
pytestmark = pytest.mark.timeout(2 * SECONDS)

PREAMBLE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import keras
import numpy as np
import keras_digits as example
from rankzero.integrations.keras import restore

class Broken(keras.callbacks.Callback):
    async_safe = True
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.batches == 30:
            raise ValueError("broken on purpose")
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    needs("keras")
    needs("tensorflow", "keras")


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(PREAMBLE + text)
    return str(path)


def ran(folder: Path, text: str, **environ: str) -> str:
    """Run a script that succeeds. Return what it printed."""
    code, output = run(script(folder, text), folder, **environ)
    assert code == 0, output
    return output


def test_two_replicas_are_one_run_with_every_batch(tmp_path: Path) -> None:
    code, output = run(str(EXAMPLES / "keras_digits.py"), tmp_path, "3")
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 67))
    assert steps_of(tmp_path, found, "val/loss") == steps_of(tmp_path, found, "lr") == [22, 44, 66]
    assert found.params["replicas"] == "2" and found.params["batch_size"] == "64"
    assert (
        found.params["optimizer.name"] == "adam_w"
        and float(found.params["optimizer.learning_rate"]) > 0.002
    )


def test_checkpoint_restores_weights_and_optimizer(tmp_path: Path) -> None:
    output = ran(
        tmp_path,
        """
from pathlib import Path

class Keep(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        weights = [np.array(array) for array in self.model.get_weights()]
        self.all = weights, int(self.model.optimizer.iterations.numpy())

keep = Keep()
example.main(1, keep)
(checkpoint,) = Path("mlruns/runs").glob("*/checkpoints/step_*")
fresh = example.convnet(16)
restore(fresh, checkpoint)
weights, iterations = keep.all
assert iterations == int(fresh.optimizer.iterations.numpy()) == 22
assert all(np.array_equal(a, b) for a, b in zip(weights, fresh.get_weights(), strict=True))
try:
    restore(example.convnet(8), checkpoint)
except ValueError as error:
    print("refused:", error)
other = example.convnet(16)
other.compile("sgd", "mse")
before = other.get_weights()
try:
    restore(other, checkpoint)
except ValueError:
    assert all(np.array_equal(a, b) for a, b in zip(before, other.get_weights(), strict=True))
    print("nothing is loaded")
""",
    )
    assert "refused: the model of" in output and "does not fit this model" in output
    assert "nothing is loaded" in output
    assert tracked(tmp_path).status == "FINISHED"


def test_fit_in_the_scope_of_a_strategy_keeps_its_checkpoints(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, devices)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    data = np.ones((16, 4)), np.ones((16, 2))
    tracker = example.RankZeroCallback("scope")
    model.fit(*data, batch_size=4, validation_data=data, callbacks=[tracker], verbose=0)
""",
    )
    assert tracked(tmp_path).status == "FINISHED" and len(checkpoints(tmp_path)) == 1


def test_exception_in_the_training_fails_the_run(tmp_path: Path) -> None:
    code, output = run(script(tmp_path, "example.main(3, Broken())"), tmp_path)
    assert code != 0 and "broken on purpose" in output
    found = tracked(tmp_path)
    assert found.status == "FAILED"
    assert "ValueError: broken on purpose" in found.tags["rankzero.reason"]
    assert max(steps_of(tmp_path, found, "train/loss")) == 30


def test_abandoned_fit_fails_its_run_and_the_next_fit_starts_another(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
model = example.convnet(4)
train, val = example.digits(64)
tracker = example.RankZeroCallback("twice", checkpoints=False)
try:
    model.fit(train, epochs=2, callbacks=[tracker, Broken()], verbose=0)
except ValueError:
    pass
model.fit(train, epochs=4, initial_epoch=2, callbacks=[tracker], verbose=0)
assert "torch" not in sys.modules
""",
    )
    runs = {found.status: found for found in all_tracked(tmp_path)}
    assert runs.keys() == {"FAILED", "FINISHED"}
    assert "left before its end" in runs["FAILED"].tags["rankzero.reason"]
    assert steps_of(tmp_path, runs["FINISHED"], "train/loss") == list(range(45, 89))
    assert not checkpoints(tmp_path)


def test_fit_within_another_and_a_second_callback_end_no_run(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
import copy

model = example.convnet(4)
train, val = example.digits(64)

def probe(*_):
    tracker = example.RankZeroCallback("probe", checkpoints=False)
    example.convnet(4).fit(train, epochs=1, callbacks=[tracker], verbose=0)

callbacks = [example.RankZeroCallback(name, checkpoints=False) for name in ("one", "two")]
callbacks = copy.deepcopy(callbacks)  # as KerasTuner does
callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=probe))
model.fit(train, epochs=2, callbacks=callbacks, verbose=0)
""",
    )
    for folder in folders(tmp_path / "mlruns/runs"):
        assert [one.status for one in of_kind(folder.path, RunEnded)] == ["FINISHED"]


def test_evaluation_after_the_training_is_the_final_one(tmp_path: Path) -> None:
    output = ran(
        tmp_path,
        """
from rankzero.integrations.own_loop.tracked_run import OPEN

model = example.convnet(4)
train, val = example.digits(64)
tracker = example.RankZeroCallback("after", checkpoints=False)
model.fit(train, epochs=1, validation_data=val, callbacks=[tracker], verbose=0)
model.evaluate(train, callbacks=[tracker], verbose=0)
assert not OPEN
""",
    )
    assert "earlier attempt" not in output, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED"
    assert steps_of(tmp_path, found, "val/loss") == [22]
    assert steps_of(tmp_path, found, "final/val/loss") == [22]


def test_evaluation_after_an_interrupted_fit_is_kept(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
model = example.convnet(4)
train, val = example.digits(64)
tracker = example.RankZeroCallback("interrupted", checkpoints=False)
try:
    model.fit(train, epochs=2, validation_data=val, callbacks=[tracker, Broken()], verbose=0)
except ValueError:
    pass
model.evaluate(val, callbacks=[tracker], verbose=0)
""",
    )
    found = tracked(tmp_path)
    assert found.status == "FAILED"
    assert steps_of(tmp_path, found, "val/loss") == [22, 30]


def test_fits_of_a_named_run_count_on(tmp_path: Path) -> None:
    output = ran(
        tmp_path,
        """
model = example.convnet(4)
images, labels = np.ones((24, 8, 8, 1), "float32"), np.zeros(24)

def stream():
    for _ in range(3):
        yield images[:8], labels[:8]

def fit(tracker, data, **options):
    model.fit(*data, callbacks=[tracker], verbose=0, **options)

tracker = example.RankZeroCallback("named", name="r1", checkpoints=False)
fit(tracker, (images, labels), batch_size=8, epochs=1)
fit(tracker, (images, labels), batch_size=8, epochs=1)
fit(tracker, (images, labels), batch_size=8, epochs=2, initial_epoch=1)
fit(tracker, (images, labels), batch_size=12, epochs=2, initial_epoch=1)
# As another process does, with data of unknown length.
tracker = example.RankZeroCallback("named", name="r1", checkpoints=False)
fit(tracker, (stream(),), epochs=4, initial_epoch=3)
""",
    )
    assert "earlier attempt" not in output, output
    assert steps_of(tmp_path, tracked(tmp_path), "train/loss") == list(range(1, 15))


def test_callbacks_from_several_threads_lose_no_batch(tmp_path: Path) -> None:
    output = ran(
        tmp_path,
        """
import threading

class Threads(keras.callbacks.Callback):
    async_safe = True

    def on_train_batch_end(self, batch, logs=None):
        print("called from", threading.current_thread().name)

model = example.convnet(4)
images, labels = np.ones((320, 8, 8, 1), "float32"), np.zeros(320)
tracker = example.RankZeroCallback("threads")
callbacks = [tracker, Threads()]
model.fit(
    images, labels, batch_size=8, epochs=2, validation_split=0.1, callbacks=callbacks, verbose=0
)
""",
        KERAS_BACKEND="torch",
    )
    assert "called from ThreadPoolExecutor" in output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and found.params["backend"] == "torch"
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 73))
    assert steps_of(tmp_path, found, "val/loss") == [36, 72] and checkpoints(tmp_path)


def started(folder: Path, example: str, *tasks: tuple[str, int]) -> list[subprocess.Popen[str]]:
    """Start an example as the tasks of one cluster, each a kind and an index."""
    cluster: dict[str, list[str]] = {}
    for (kind, _), port in zip(sorted(tasks), free_ports(len(tasks)), strict=True):
        cluster.setdefault(kind, []).append(f"localhost:{port}")
    return [
        start(
            folder,
            sys.executable,
            str(EXAMPLES / example),
            "3",
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}),
        )
        for kind, index in tasks
    ]


def test_two_workers_are_one_run_of_the_chief(tmp_path: Path) -> None:
    for code, output in map(
        end, started(tmp_path, "keras_workers_digits.py", ("worker", 1), ("worker", 0))
    ):
        assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 67))
    assert checkpoints(tmp_path)


def test_coordinator_of_a_parameter_server_tracks_one_run(tmp_path: Path) -> None:
    tasks = ("ps", 0), ("worker", 0), ("chief", 0)
    *servers, coordinator = started(tmp_path, "parameter_server_digits.py", *tasks)
    try:
        code, output = end(coordinator)
    finally:
        for server in servers:  # They serve until somebody ends them.
            server.kill()
            server.communicate()
    assert code == 0, output
    found = tracked(tmp_path)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(tmp_path, found, "train/loss") == list(range(1, 67))
    assert steps_of(tmp_path, found, "val/accuracy") == [22, 44, 66]
    assert found.params["batch_size"] == "64" and "localhost" in found.params["ps"]


def test_variable_that_is_assigned_later_is_logged_as_it_was(tmp_path: Path) -> None:
    ran(
        tmp_path,
        """
import tensorflow as tf
from rankzero.integrations.own_loop import values

for variable in (tf.Variable(0.25), keras.Variable(0.25)):
    kept = values.snapshot(variable)
    variable.assign(0.5)
    assert values.to_float(kept) == 0.25, variable
    variable.assign_add(0.5)
    assert values.to_float(kept) == 0.25, variable
""",
    )
