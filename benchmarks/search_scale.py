"""Measure what a search's controller costs per trial, with a launcher that trains nothing.

    python benchmarks/search_scale.py [--trials 1000] [--only "in memory"]

The controller asks for a trial, follows eight at a time, reports and stores results. The launcher
makes up their journals. In memory, Optuna costs next to nothing: the rest is RankZero's. SQLite is
what users have. "Optuna alone" asks SQLite for as many trials, with as many attributes each. TPE
and ASHA compare each trial with all others.

Takes about four minutes of processor time for 1,000 trials; 10,000 in memory take one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
from harness import HERE, known, save

from rankzero.experiment import Experiment, Goal, Train
from rankzero.tuning import next_trial
from rankzero.tuning.options import Pruner, Sampler, SearchOptions
from rankzero.tuning.session import FIRST, Session
from rankzero.tuning.space import make_space
from rankzero.tuning.study import Study, open_study

sys.path.insert(0, str(HERE.parent / "tests"))
from support.fake_launcher import FakeLauncher

ATTRIBUTES = 13  # of a trial, as a search writes them
PARTS, PARALLEL = 10, 8
WANTED = 20.0  # milliseconds
Ended = Callable[[], None]


class Mine(Experiment):
    """A user's configuration that is slow."""

    train: Train = Train(batch_size=32, epochs=20)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)
    lr: float = 0.03


@contextlib.contextmanager
def new_store(kind: str) -> Iterator[str]:
    """Yield the URL of a new database or journal on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"{kind}:///{Path(folder) / 'studies'}"


def search(study: Study, trials: int, ended: Ended) -> None:
    """Search on a launcher that trains nothing."""
    space = make_space(Mine(), 1, 0.5, samples=1000)
    study.draw_from(space.parameters())
    study.note(FIRST, next_trial.guesses(space))

    def notify(text: str) -> None:
        if text.startswith("trial"):
            ended()

    launchers: list[Any] = [FakeLauncher()] * PARALLEL
    options = SearchOptions(trials=trials)
    Session(study, space, launchers, options, notify).run()


def in_memory(trials: int, ended: Ended) -> None:
    store = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=store, study_name="s", pruner=optuna.pruners.NopPruner())
    search(Study(study, store, "sqlite://", "random", 0), trials, ended)


def on_disk(kind: str, sampler: Sampler, pruner: Pruner, trials: int, ended: Ended) -> None:
    with new_store(kind) as url:
        search(open_study(url, "s", sampler=sampler, pruner=pruner, seed=0), trials, ended)


def optuna_alone(trials: int, ended: Ended) -> None:
    """Ask and tell as many trials without a search."""
    with new_store("sqlite") as url:
        study = optuna.create_study(storage=url, sampler=optuna.samplers.RandomSampler(0))
        batch = optuna.distributions.IntDistribution(0, 9)
        factor = optuna.distributions.FloatDistribution(1 / 32, 32, log=True)
        for _ in range(trials):
            trial = study.ask({"batch_index": batch, "lr_factor": factor})
            for number in range(ATTRIBUTES):
                trial.set_user_attr(f"fact {number}", number)
            study.tell(trial, 1.0)
            ended()


CASES: dict[str, Callable[[int, Ended], None]] = {
    "in memory": in_memory,
    "SQLite, random": functools.partial(on_disk, "sqlite", "random", "none"),
    "SQLite, TPE and ASHA": functools.partial(on_disk, "sqlite", "tpe", "asha"),
    "journal, random": functools.partial(on_disk, "journal", "random", "none"),
    "journal, TPE and ASHA": functools.partial(on_disk, "journal", "tpe", "asha"),
    "Optuna alone": optuna_alone,
}


def milliseconds(run: Callable[[int, Ended], None], trials: int) -> list[float]:
    """Return the processor time of a trial, for each tenth of the trials."""
    marks = [time.process_time()]
    run(trials, lambda: marks.append(time.process_time()))
    part = trials // PARTS
    edges = [marks[number * part] for number in range(PARTS + 1)]
    return [round(1e3 * (b - a) / part, 2) for a, b in itertools.pairwise(edges)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--only", choices=CASES)
    options = parser.parse_args()
    optuna.logging.set_verbosity(logging.ERROR)
    trials = options.trials
    file = "search_scale" if trials == 1000 else f"search_scale_{trials}"
    found = known(file).get("milliseconds", {}) if options.only else {}
    for name in [options.only] if options.only else CASES:
        found[name] = milliseconds(CASES[name], trials)
        shown = " ".join(f"{value:.3g}" for value in found[name])
        print(f"{name:21} {shown} ms a trial, for each tenth of {trials:,}", flush=True)
    means = {name: round(statistics.fmean(values), 2) for name, values in found.items()}
    save(file, trials=trials, milliseconds=found, means=means, wanted=WANTED)


if __name__ == "__main__":
    main()
