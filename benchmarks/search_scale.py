"""Measure what a search's controller costs per trial, with a launcher that trains nothing.

    python benchmarks/search_scale.py [--trials 1000] [--samplers random tpe]

The controller asks for a trial, follows eight at a time, reports, and stores results in SQLite. The
launcher makes up their journals. Random draws and no pruner show what RankZero costs. TPE and ASHA
compare each trial with all others. Optuna alone, with as many attributes, is the least possible.

Takes about a minute of processor time for 1,000 trials of a sampler.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from harness import HERE, save

from rankzero.experiment import Experiment, Goal, Train
from rankzero.tuning import next_trial
from rankzero.tuning.options import Pruner, Sampler, SearchOptions
from rankzero.tuning.session import Session
from rankzero.tuning.space import make_space
from rankzero.tuning.study import open_study

sys.path.insert(0, str(HERE.parent / "tests"))
from support.fake_launcher import FakeLauncher

PRUNERS: dict[Sampler, Pruner] = {"random": "none", "tpe": "asha"}
ATTRIBUTES = 13  # of a trial, as a search writes them
PARTS, PARALLEL = 10, 8
WANTED = 20.0  # milliseconds


class Mine(Experiment):
    """A user's configuration that is slow."""

    train: Train = Train(batch_size=32, epochs=20)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)
    lr: float = 0.03


def search(storage: str, sampler: Sampler, trials: int, ended: Callable[[], None]) -> None:
    """Search on a launcher that trains nothing."""
    space = make_space(Mine(), 1, 0.5, samples=1000)
    study = open_study(storage, "s", sampler=sampler, pruner=PRUNERS[sampler], seed=0)
    study.draw_from(space.parameters())

    def notify(text: str) -> None:
        if text.startswith("trial"):
            ended()

    launchers: list[Any] = [FakeLauncher()] * PARALLEL
    options = SearchOptions(trials=trials)
    Session(study, space, launchers, options, notify).run(next_trial.guesses(space))


def optuna_alone(storage: str, trials: int, ended: Callable[[], None]) -> None:
    """Ask and tell as many trials without a search."""
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(0))
    batch = optuna.distributions.IntDistribution(0, 9)
    factor = optuna.distributions.FloatDistribution(1 / 32, 32, log=True)
    for _ in range(trials):
        trial = study.ask({"batch_index": batch, "lr_factor": factor})
        for number in range(ATTRIBUTES):
            trial.set_user_attr(f"fact {number}", number)
        study.tell(trial, 1.0)
        ended()


def milliseconds(run: Callable[[str, Callable[[], None]], None], trials: int) -> list[float]:
    """Return the processor time of a trial, for each tenth of the trials."""
    marks = [time.process_time()]
    with tempfile.TemporaryDirectory() as folder:
        run(f"sqlite:///{Path(folder) / 's.db'}", lambda: marks.append(time.process_time()))
    part = trials // PARTS
    edges = [marks[number * part] for number in range(PARTS + 1)]
    return [1e3 * (late - early) / part for early, late in itertools.pairwise(edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--samplers", nargs="+", choices=PRUNERS, default=list(PRUNERS))
    options = parser.parse_args()
    optuna.logging.set_verbosity(logging.ERROR)
    trials, found = options.trials, {}
    for name in options.samplers:

        def run(storage: str, ended: Callable[[], None], name: Sampler = name) -> None:
            search(storage, name, trials, ended)

        found[f"search, {name} and {PRUNERS[name]}"] = milliseconds(run, trials)
    found["Optuna alone"] = milliseconds(
        lambda storage, ended: optuna_alone(storage, trials, ended), trials
    )
    for name, values in found.items():
        shown = " ".join(f"{value:.0f}" for value in values)
        print(f"{name:24} {shown} ms of processor time a trial, for each tenth of {trials:,}")
    save("search_scale", trials=trials, milliseconds=found, wanted=WANTED)


if __name__ == "__main__":
    main()
