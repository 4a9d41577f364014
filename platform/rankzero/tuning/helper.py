"""A process that takes part in a study which another one leads, on this machine or elsewhere: it does trials."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Sequence

from rankzero.errors import RunFailed, UserError
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.folder import Identity
from rankzero.tuning import members
from rankzero.tuning.budget import SearchOptions
from rankzero.tuning.reports import study_run
from rankzero.tuning.session import TARGET, Session
from rankzero.tuning.setup import (
    FIRST,
    PARENT,
    SPACE,
    SearchOutcome,
    SearchSetup,
    first_parameters,
    launchers,
    params_of,
    signature,
)
from rankzero.tuning.space import Space, narrowed
from rankzero.tuning.study import OWNER, Study
from rankzero.tuning.trials.follower import Say
from rankzero.tuning.trials.host_process import Host

LOOK_SECONDS = 0.5


def run(
    quest: SearchSetup, study: Study, hosts: Sequence[Host], argv: Sequence[str], say: Say
) -> SearchOutcome:
    """Do trials until the budget is spent."""
    where = members.host_of(study.members.leader)
    say(f"{where} leads this study: waiting until it has trained your own configuration")
    _await(study, (SPACE, FIRST, PARENT, TARGET))
    space = agreed(study, quest.space, quest.options)
    with study_run.Record(
        quest.root / "runs",
        _identity(quest, study),
        params_of(quest),
        argv,
        offline=quest.offline,
    ) as kept:
        Session(study, space, launchers(quest, hosts, kept), quest.options, say).help(
            first_parameters(study)
        )
        mine = [trial for trial in study.trials() if trial.facts.get(OWNER) == members.name()]
        says = f"Helped with {len(mine)} trials of {study.name}; {where} confirms and decides."
        kept.finished(says, {})
    return SearchOutcome(says, kept.folder, decided=False)


def _identity(quest: SearchSetup, study: Study) -> Identity:
    """Return this process's own run: below the study's in MLflow, where both go to the same."""
    above = study.facts[PARENT]
    same = above["tracking_uri"] == url_without_secrets(quest.identity.tracking_uri)
    return dataclasses.replace(
        quest.identity,
        name=f"{study.name}-helper-{os.getpid()}",
        uuid=secrets.token_hex(16),
        parent_uuid=above["uuid"] if same else None,
    )


def agreed(study: Study, space: Space, options: SearchOptions) -> Space:
    """Return the space that the leader found. Raises UserError where this machine's is another."""
    fact = study.facts[SPACE]
    found = narrowed(space, fact["batch_sizes"], fact["precisions"])
    if signature(found, options) != fact["signature"]:
        raise UserError(
            f"study {study.name} searches {fact['signature']}, this command {signature(found, options)}: all who share "
            "a study need the same experiment, settings, --nproc and --objective, and devices alike"
        )
    study.draw_from(found.parameters())
    return found


def _await(study: Study, names: Sequence[str]) -> None:
    while not all(name in study.facts for name in names):
        if not study.members.led:
            raise RunFailed("the process that led this study has died: the same command takes over")
        time.sleep(LOOK_SECONDS)
