"""What to search and where everything goes, and what all who share a study agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.config import values
from rankzero.config.renamed import with_new_names
from rankzero.launch.agent import Topology
from rankzero.redaction.text import settings_without_secrets
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tuning.budget import SearchOptions
from rankzero.tuning.reports.study_run import Record
from rankzero.tuning.space import Space
from rankzero.tuning.study import Study
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.host_process import Host
from rankzero.tuning.trials.launcher import TrainLauncher

SPACE, FIRST, PARENT = "space", "first", "parent"
"""Facts of a study: what is drawn from, what is tried first, its run in MLflow."""


@dataclasses.dataclass(frozen=True)
class SearchSetup:
    """What to search, and where everything goes."""

    identity: Identity
    root: Path
    """The folder of the embedded store."""
    space: Space
    described: ExperimentDescription
    options: SearchOptions
    sampler: str
    pruner: str
    storage: str
    shared: bool
    """Whether other processes may take part."""
    probes: bool
    """Whether speeds are measured first."""
    use: str
    """The command that trains with what is found."""
    offline: bool = False
    """Whether runs are only recorded, and delivered to MLflow later."""


@dataclasses.dataclass(frozen=True)
class SearchOutcome:
    """How it ended, in words."""

    says: str
    folder: RunFolder
    """The run of this process's part."""
    decided: bool
    """Whether it is a verdict."""


def signature(space: Space, options: SearchOptions) -> str:
    """Return what all who share a study must have alike: what is drawn, and what for."""
    wanted = options.objective, options.tolerance, options.trial_minutes
    return repr((wanted, space.reference.goal, sorted(space.parameters().items())))


def launchers(quest: SearchSetup, hosts: Sequence[Host], kept: Record) -> list[TrainLauncher]:
    """Return a launcher for each host."""
    nodes = Topology(quest.described.processes)
    return [TrainLauncher(host, kept.folder, nodes, kept.environment) for host in hosts]


def first_parameters(study: Study) -> list[dict[str, Any]]:
    """Return the parameters that all who share the study try first."""
    return [with_new_names(parameters) for parameters in study.facts[FIRST]]


def params_of(quest: SearchSetup) -> dict[str, str]:
    settings = config.rendered(quest.space.reference)
    options = {
        f"search.{name}": values.render(value)
        for name, value in dataclasses.asdict(quest.options).items()
    }
    chosen = {"search.sampler": quest.sampler, "search.pruner": quest.pruner}
    return {**settings_without_secrets(settings), **options, **chosen}
