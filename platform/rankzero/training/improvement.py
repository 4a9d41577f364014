"""Conclusions from the history of evaluations: the best value, early ends, learning rates.

Every rank has the same history, so every rank decides the same.
"""

from __future__ import annotations

import math

from rankzero.experiment import Experiment
from rankzero.training.job import State


def add_evaluation(experiment: Experiment, state: State, value: float) -> bool:
    """Take the goal metric's new value into `state`. Return whether it is the best so far."""
    if experiment.goal.better(value, state.best):
        state.best, state.evaluations_since_best = value, 0
        return True
    state.evaluations_since_best += 1
    train = experiment.train
    if train.schedule == "plateau" and not state.evaluations_since_best % train.plateau.patience:
        reduced = math.prod(state.lr_reductions) * train.plateau.factor
        if reduced >= train.plateau.lowest:
            state.reduce_lr(train.plateau.factor)
    return False


def stalled(experiment: Experiment, state: State) -> str | None:
    """Return why `train.patience` ends the training, or None."""
    patience, evaluations = experiment.train.patience, state.evaluations_since_best
    if patience is None or evaluations < patience:
        return None
    return f"no better {experiment.goal.metric} for {evaluations} evaluations"


def early_end(experiment: Experiment, state: State) -> str | None:
    """Return why the training ends before its last step, or None."""
    goal, limits = experiment.goal, experiment.train.limits
    if limits.stop_at_target and goal.reached(state.best):
        return f"{goal.metric} has reached {goal.target:g}"
    return stalled(experiment, state)
