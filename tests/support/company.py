"""Processes that share a study and keep a ledger. A process that knows no test can import it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from rankzero import Experiment, Goal, Train
from rankzero.tuning import next_trial
from rankzero.tuning.options import Pruner, Sampler, SearchOptions
from rankzero.tuning.session import FIRST, Session
from rankzero.tuning.space import Space, make_space
from rankzero.tuning.study import Study, open_study
from support.fake_launcher import FakeLauncher, FakeRunning

TRIAL_SECONDS = 0.3
"""A trial's time, so that nobody does all of them."""


class Mine(Experiment):
    """A user's configuration that is slow: small batches, a learning rate a third of the best."""

    train: Train = Train(batch_size=32, epochs=20)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)
    lr: float = 0.03


SPACE = make_space(Mine(), 1, 0.5, samples=1000)


def opened(
    folder: Path,
    space: Space = SPACE,
    store: str = "sqlite",
    *,
    name: str = "s",
    sampler: Sampler = "tpe",
    pruner: Pruner = "none",
) -> Study:
    """Open a study that draws from the space, and tries its guesses first."""
    storage = f"{store}:///{folder / 'studies'}"
    study = open_study(storage, name, sampler=sampler, pruner=pruner, seed=0)
    study.draw_from(space.parameters())
    study.note(FIRST, next_trial.guesses(space))
    return study


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The common notes of all of them, a line each: a short line is appended whole."""

    path: Path

    def write(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()} {text}\n")

    def starts(self) -> list[tuple[int, str]]:
        """Return who began which trial, or confirmation, by their names."""
        return [(int(pid), rest) for pid, word, rest in self._lines() if word == "starts"]

    def results(self) -> list[int]:
        """Return the trials that a process wrote the result of."""
        return [
            int(rest.split()[0])
            for _, word, rest in self._lines()
            if word == "trial" and "interrupted" not in rest
        ]

    def _lines(self) -> list[list[str]]:
        return [line.split(maxsplit=2) for line in self.path.read_text().splitlines()]


class Mortal(FakeLauncher):
    """A launcher with a ledger; its process is killed while the trial of this number runs."""

    def __init__(self, ledger: Ledger, dies_at: int | None) -> None:
        super().__init__()
        self.ledger, self.dies_at = ledger, dies_at

    def start(self, experiment: Experiment, name: str, processes: int | None = None) -> FakeRunning:
        self.ledger.write(f"starts {name}")
        time.sleep(0.0 if "confirm" in name else TRIAL_SECONDS)
        if len(self.started) == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().start(experiment, name, processes)


def session(folder: Path, trials: int, dies_at: int | None = None) -> Session:
    ledger = Ledger(folder / "ledger.txt")
    return Session(
        opened(folder), SPACE, [Mortal(ledger, dies_at)], SearchOptions(trials=trials), ledger.write
    )


def take_part(folder: Path, trials: int, begin: Barrier, leads: bool, dies_at: int | None) -> None:
    """Do what a process does that leads a study, or helps with it."""
    mine = session(folder, trials, dies_at)
    begin.wait(60)
    (mine.run if leads else mine.help)()
