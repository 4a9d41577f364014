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
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.session import Session
from rankzero.tuning.space import make_space
from rankzero.tuning.study import Study, open_study
from support.fake_launcher import FakeLauncher, FakeRunning

TRIAL_SECONDS = 0.3
"""A trial's time, so that nobody does all of them."""


class Mine(Experiment):
    train: Train = Train(batch_size=32, epochs=20)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)
    lr: float = 0.03


SPACE = make_space(Mine(), 1, 0.5, samples=1000)


def opened(folder: Path) -> Study:
    study = open_study(
        f"sqlite:///{folder / 'studies.db'}", "s", sampler="tpe", pruner="none", seed=0
    )
    study.draw_from(SPACE.parameters())
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
    (mine.run if leads else mine.help)(next_trial.guesses(SPACE))
