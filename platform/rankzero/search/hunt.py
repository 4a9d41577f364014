"""A whole search with everything around it: the study, its run in MLflow, the launcher, the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.config import flatten
from rankzero.experiment import Goal
from rankzero.search import controller, record, verdict
from rankzero.search.controller import Say
from rankzero.search.host import Host
from rankzero.search.launcher import TrainLauncher
from rankzero.search.mirror import Description
from rankzero.search.session import Found, Options, Session, guesses
from rankzero.search.space import Space
from rankzero.search.study import Study, Trial, open_study
from rankzero.tracking.journal import Identity, RunFolder
from rankzero.tracking.secrecy import settings_without_secrets
from rankzero.train import launch


@dataclasses.dataclass(frozen=True)
class Quest:
    """What to search, and where everything goes."""

    identity: Identity
    runs: Path
    space: Space
    described: Description
    options: Options
    sampler: str
    pruner: str
    storage: str
    use: str
    """The command that trains with what is found."""


def run(quest: Quest, host: Host, argv: Sequence[str], say: Say) -> str:
    """Search; return the verdict in words. Ctrl-C passes through: the same command goes on."""
    study = open_study(
        quest.storage, quest.identity.name, quest.space.parameters(),
        sampler=quest.sampler, pruner=quest.pruner, seed=quest.space.reference.train.seed,
    )  # fmt: skip
    with record.Record(quest.runs, quest.identity, _params(quest), argv) as kept:
        nodes = launch.Nodes(quest.described.processes)
        launcher = TrainLauncher(host, kept.folder, nodes, kept.environment)
        session = Session(study, quest.space, launcher, quest.options, _Teller(study, kept, say))
        found = session.run(guesses(quest.space))
        says = report(quest, study, found, kept)
        kept.finished(says, _summary(found))
    return says


def report(quest: Quest, study: Study, found: Found, kept: record.Record) -> str:
    """Write the evidence into the study's artifacts; return the verdict in words."""
    space, goal = quest.space, quest.space.reference.goal
    says = verdict.sentence(found.verdict, goal, found.target, found.seconds, closest(study.trials(), goal))
    winner = next(trial for trial in study.trials() if trial.number == found.verdict.winner.trial)
    kept.write_trials(study.trials())
    kept.write(record.SWEET_SPOT, record.sweet_spot_yaml(space.experiment(winner.parameters), says, quest.use))
    study.note("sentence", says)
    study.note("sweet_spot", config.to_yaml(space.experiment(winner.parameters)))
    kept.write_description(f"**{says}**\n\nObjective: {found.verdict.objective}.\n\n{table(study)}\n\n"
                           f"Use it: `{quest.use}`\n")  # fmt: skip
    return says


def closest(trials: Sequence[Trial], goal: Goal) -> tuple[int, float] | None:
    """Return the trial with the best quality, and that quality."""
    sign = 1 if goal.mode == "max" else -1
    found = [(trial.number, float(trial.facts["best"])) for trial in trials if "best" in trial.facts]
    return max(found, key=lambda pair: sign * pair[1], default=None)


def table(study: Study) -> str:
    """Return the trials as Markdown, the best first."""
    ranked = sorted(study.trials(), key=lambda trial: (trial.value is None, trial.value or 0.0, trial.number))
    head = ("trial", "state", "value", "best", "samples_per_second", "batch_size", "precision", "lr")
    rows = [[_cell(dict(zip(record.COLUMNS, record.row_of(trial), strict=True))[name]) for name in head]
            for trial in ranked]  # fmt: skip
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def folder_of(quest: Quest) -> RunFolder:
    return RunFolder((quest.runs / quest.identity.name).absolute())


class _Teller:
    """Prints a line, and draws the newest trial into the study's curves."""

    def __init__(self, study: Study, kept: record.Record, say: Say) -> None:
        self._study, self._kept, self._say = study, kept, say
        self._drawn: set[int] = set()

    def __call__(self, text: str) -> None:
        self._say(text)
        for trial in self._study.trials():
            if trial.state in ("COMPLETE", "PRUNED", "FAIL") and trial.number not in self._drawn:
                self._drawn.add(trial.number)
                self._kept.trial(trial, controller.best_value(self._study))


def _params(quest: Quest) -> dict[str, str]:
    settings = {key: config.render(value) for key, value in flatten(quest.space.reference).items()}
    options = {f"search.{name}": config.render(value) for name, value in dataclasses.asdict(quest.options).items()}
    chosen = {"search.sampler": quest.sampler, "search.pruner": quest.pruner}
    return {**settings_without_secrets(settings), **options, **chosen}


def _summary(found: Found) -> dict[str, float]:
    facts: dict[str, Any] = {"gain": found.verdict.gain, "gain_low": found.verdict.gain_low,
                             "gain_high": found.verdict.gain_high, "search_seconds": found.seconds,
                             "noise": found.verdict.noise}  # fmt: skip
    return {name: float(value) for name, value in facts.items() if value is not None}
