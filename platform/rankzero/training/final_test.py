"""The test set: evaluated once, when a run has finished, with the best checkpoint's weights.

It decides nothing. A run that is killed before the end of the evaluation repeats it when it is
resumed, with the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankzero.errors import UserError
from rankzero.events import Evaluated
from rankzero.experiment import Experiment
from rankzero.run_store import checkpoint_files
from rankzero.training import rng
from rankzero.training.checkpoints import restore
from rankzero.training.data import sets
from rankzero.training.data.stream import is_empty
from rankzero.training.distributed.world import World
from rankzero.training.evaluation import evaluate
from rankzero.training.job import State, TrainingContext
from rankzero.training.stop import StopRequest


def load_sets(experiment: Experiment, world: World) -> dict[str, Any]:
    """Return the test sets by the group of their metrics, or none. Collective.

    Raises UserError if one is unusable.
    """
    if not experiment.train.test:
        return {}
    # The user's code may draw numbers. The training must be the same with and without a test set.
    random_states = rng.state(world.device)
    rng.seed_all(experiment.train.seed)
    data = experiment.test()
    rng.restore(random_states, world.device)
    found = {} if data is None else sets.by_group("test", data)
    try:
        empty = [group for group, one in found.items() if is_empty(one)]
    except TypeError as error:
        raise UserError(
            f"test() must return a data set, a mapping of names to data sets, or None: {error}"
        ) from error
    if empty:
        raise UserError(f"test() returned an empty data set for {empty[0]}: return None for none")
    if type(experiment).test is not Experiment.test:
        sets.check_same(world, "test()", found, experiment.train)
    return found


def evaluate_best(
    job: TrainingContext,
    state: State,
    test_sets: Mapping[str, Any],
    checkpoints: Path,
    stop: StopRequest,
    notice: Callable[[str], None],
) -> Evaluated:
    """Evaluate the best checkpoint on the test sets, at its step. Collective.

    It leaves those weights in the model. Raises EvaluationInterrupted.
    """
    world, goal = job.world, job.experiment.goal
    path = checkpoint_files.best(checkpoints, goal) if world.ranks.first else None
    name, step = world.share(path.name if path else None), state.step
    if name is None:
        notice(f"the run keeps no checkpoint: the last weights, of step {step}, are tested")
    else:
        saved = restore.read(checkpoints / name, world)
        step = saved["step"]
        had = checkpoint_files.read_manifest(path).metrics.get(goal.metric) if path else state.best
        # A goal that was never a number has no best evaluation.
        if state.best is not None and goal.better(state.best, had):
            notice(f"the best evaluation has no checkpoint: that of step {step} is tested")
        # The checkpoint may be of a time with another train.ema. Its best model is the average.
        weights = saved.get("ema", saved["model"])
        if state.average is not None:
            state.average.load(weights)
            weights = saved["model"]
        job.strategy.load_model(weights)
    # The result depends on the weights alone, also if `measure` draws numbers.
    rng.seed_all(job.experiment.train.seed, 1 + job.strategy.shard.rank, step)
    loaders = {group: job.make_loader(one) for group, one in test_sets.items()}
    return Evaluated(time.time(), step, evaluate(job, state, stop, loaders, step), best=False)
