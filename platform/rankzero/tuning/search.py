"""A whole search with everything around it: the study, its run in MLflow, the launcher, the report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankzero import config
from rankzero.errors import UserError
from rankzero.experiment import Goal
from rankzero.redaction.text import settings_without_secrets, url_without_secrets
from rankzero.run_store.folder import Identity
from rankzero.tuning import helper, next_trial
from rankzero.tuning.budget import SearchOptions
from rankzero.tuning.probe import grid
from rankzero.tuning.probe import probe_map as probe
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.reports import study_run
from rankzero.tuning.session import SearchResult, Session
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
from rankzero.tuning.study import Study, open_study
from rankzero.tuning.trial import Trial
from rankzero.tuning.trials import follower
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.follower import Say
from rankzero.tuning.trials.host_process import Host
from rankzero.tuning.verdict import sentence


def run(quest: SearchSetup, hosts: Sequence[Host], argv: Sequence[str], say: Say) -> SearchOutcome:
    """Search, or help another process that does. Ctrl-C passes through.

    `hosts`: one for each trial that runs at the same time.
    """
    study = open_study(
        quest.storage,
        quest.identity.name,
        sampler=quest.sampler,
        pruner=quest.pruner,
        seed=quest.space.reference.train.seed,
    )
    leads = study.members.lead()
    if not (leads or quest.shared):
        raise UserError(
            f"study {study.name} is being searched by process {study.members.leader.split(' ')[1]}: wait for it; to "
            "run trials side by side give it --parallel, to share it with other machines --storage URL"
        )
    with study.members.beating():
        return (
            _lead(quest, study, hosts, argv, say)
            if leads
            else helper.run(quest, study, hosts, argv, say)
        )


def _lead(
    quest: SearchSetup, study: Study, hosts: Sequence[Host], argv: Sequence[str], say: Say
) -> SearchOutcome:
    with study_run.Record(
        quest.root / "runs", quest.identity, params_of(quest), argv, offline=quest.offline
    ) as kept:
        began = time.monotonic()
        measured = probe_map(quest, hosts[0], kept, say) if quest.probes else []
        space = _agreed(study, quest.space, measured, quest.options)
        own = kept.folder.identity
        study.note(
            PARENT, {"uuid": own.uuid, "tracking_uri": url_without_secrets(own.tracking_uri)}
        )
        if FIRST not in study.facts:
            study.note(FIRST, probe.guesses(space, measured) or next_trial.guesses(space))
        say(f"space  {shown(space)}")
        teller, spent = _SearchReporter(study, kept, say), time.monotonic() - began
        session = Session(
            study,
            space,
            launchers(quest, hosts, kept),
            quest.options,
            teller,
            already_seconds=spent,
        )
        found = session.run(first_parameters(study))
        says = report(quest, space, study, found, kept)
        _draw(kept, study, measured, space.reference.goal, found.verdict.region, says)
        kept.finished(says, _summary(found))
    return SearchOutcome(says, kept.folder, decided=True)


def _agreed(
    study: Study, space: Space, measured: Sequence[ProbeResult], options: SearchOptions
) -> Space:
    """Return the space that all who share the study draw from: what the leader found first, for good."""
    if SPACE not in study.facts:
        found = searched(space, measured)
        study.note(
            SPACE,
            {
                "batch_sizes": found.batch_sizes,
                "precisions": found.precisions,
                "signature": signature(found, options),
            },
        )
    agreed = narrowed(space, study.facts[SPACE]["batch_sizes"], study.facts[SPACE]["precisions"])
    study.draw_from(agreed.parameters())
    return agreed


def probe_map(
    quest: SearchSetup, host: Host, kept: study_run.Record, say: Say
) -> list[ProbeResult]:
    """Return the speeds of the space's cells, measured where they are not known."""
    plan = probe.make_batch_order(
        quest.space, quest.described, quest.identity.experiment_file or "", quest.root
    )
    measured = probe.run(plan, host, say)
    kept.write("probe_map.json", table_json(measured))
    return measured


def probe_alone(
    identity: Identity,
    root: Path,
    space: Space,
    described: ExperimentDescription,
    host: Host,
    argv: Sequence[str],
    say: Say,
    *,
    offline: bool = False,
) -> list[ProbeResult]:
    """Measure the map by itself, as a run of its own."""
    params = config.rendered(space.reference)
    with study_run.Record(
        root / "runs", identity, settings_without_secrets(params), argv, offline=offline
    ) as kept:
        plan = probe.make_batch_order(space, described, identity.experiment_file or "", root)
        measured = probe.run(plan, host, say)
        kept.write("probe_map.json", table_json(measured))
        _draw_map(kept, measured)
        found = grid.knee(measured)
        peak = max(one.samples_per_second for one in measured)
        says = (
            "no cell fits"
            if found is None
            else f"{found.batch_size} samples a batch reach 95 % of the peak speed"
        )
        kept.finished(f"{says}, {peak:,.0f} samples/s", {"samples_per_second": peak})
    return measured


def _draw_map(kept: study_run.Record, measured: Sequence[ProbeResult]) -> None:
    from rankzero.tuning.reports import html_page, png_figures

    kept.write("probe_map.html", html_page.map_page(measured, "Probe map"))
    png_figures.write_map(kept.folder.artifacts, measured)


def table_json(measured: Sequence[ProbeResult]) -> str:
    """Return the map as MLflow's artifact viewer shows tables."""
    rows = [{**dataclasses.asdict(one), "bound": one.bound} for one in measured]
    return json.dumps({"columns": list(rows[0]), "data": [list(row.values()) for row in rows]})


def searched(space: Space, measured: Sequence[ProbeResult]) -> Space:
    """Return the space without what the map rules out: batches that do not fit or are no faster, slow precisions."""
    if not measured:
        return space
    sizes = [one.batch_size for one in grid.fastest(measured)]
    return narrowed(space, sizes, grid.worth_searching(measured, space.precisions))


def shown(space: Space) -> str:
    """Return a space in a line."""
    parts = [f"batch {space.batch_sizes[0]}-{space.batch_sizes[-1]}", "/".join(space.precisions)]
    parts.append(
        f"lr {space.factors.low:g}-{space.factors.high:g} x scaled (exponent {space.lr_exponent:g})"
    )
    return ", ".join([*parts, *space.extras])


def report(
    quest: SearchSetup, space: Space, study: Study, found: SearchResult, kept: study_run.Record
) -> str:
    """Write the evidence into the study's artifacts; return the verdict in words."""
    goal = space.reference.goal
    says = sentence.sentence(
        found.verdict, goal, found.target, found.seconds, closest(study.trials(), goal)
    )
    winner = next(trial for trial in study.trials() if trial.number == found.verdict.winner.trial)
    kept.write_trials(study.trials())
    kept.write(
        study_run.SWEET_SPOT,
        study_run.sweet_spot_yaml(space.experiment(winner.parameters), says, quest.use),
    )
    study.note("objective", found.verdict.objective)
    study.note("sentence", says)
    study.note("sweet_spot", config.to_yaml(space.experiment(winner.parameters)))
    kept.write_description(
        f"**{says}**\n\nObjective: {found.verdict.objective}.\n\n{table(study)}\n\n"
        f"Use it: `{quest.use}`\n"
    )
    return says


def _draw(
    kept: study_run.Record,
    study: Study,
    measured: Sequence[ProbeResult],
    goal: Goal,
    region: Sequence[int],
    title: str,
) -> None:
    """Write the pictures; a picture that cannot be drawn must not cost the verdict."""
    from rankzero.tuning.reports import html_page, png_figures

    trials, weights = study.trials(), study.importances()
    try:
        kept.write("search.html", html_page.page(trials, measured, weights, goal, region, title))
        png_figures.write(kept.folder.artifacts, trials, measured, weights, goal, region)
    except Exception as error:
        kept.notice(f"the pictures could not be drawn: {error!r}")


def closest(trials: Sequence[Trial], goal: Goal) -> tuple[int, float] | None:
    """Return the trial with the best quality, and that quality."""
    sign = 1 if goal.mode == "max" else -1
    found = [
        (trial.number, float(trial.facts["best"])) for trial in trials if "best" in trial.facts
    ]
    return max(found, key=lambda pair: sign * pair[1], default=None)


def table(study: Study) -> str:
    """Return the trials as Markdown, the best first."""
    ranked = sorted(
        study.trials(), key=lambda trial: (trial.value is None, trial.value or 0.0, trial.number)
    )
    head = (
        "trial",
        "state",
        "value",
        "best",
        "samples_per_second",
        "batch_size",
        "precision",
        "lr",
    )
    titles = [f"{name.replace('_per_second', '/s').replace('_', ' ')}&emsp;" for name in head]
    rows = [
        [
            _cell(dict(zip(study_run.COLUMNS, study_run.row_of(trial), strict=True))[name])
            for name in head
        ]
        for trial in ranked
    ]
    return "\n".join(
        ["| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(head), *rows)]
    )


def _cell(value: Any) -> str:
    """Return a cell with some air behind it: MLflow sets the columns of a table without any."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}&emsp;" if abs(value) >= 1000 else f"{value:.4g}&emsp;"
    return f"{value}&emsp;"


class _SearchReporter:
    """Prints a line, and draws the newest trial into the study's curves."""

    def __init__(self, study: Study, kept: study_run.Record, say: Say) -> None:
        self._study, self._kept, self._say = study, kept, say
        self._drawn: set[int] = set()

    def __call__(self, text: str) -> None:
        self._say(text)
        for trial in self._study.trials():
            if trial.state in ("COMPLETE", "PRUNED", "FAIL") and trial.number not in self._drawn:
                self._drawn.add(trial.number)
                self._kept.trial(trial, follower.best_value(self._study))


def _summary(found: SearchResult) -> dict[str, float]:
    facts: dict[str, Any] = {
        "gain": found.verdict.gain,
        "gain_low": found.verdict.gain_low,
        "gain_high": found.verdict.gain_high,
        "search_seconds": found.seconds,
        "noise": found.verdict.noise,
    }
    return {name: float(value) for name, value in facts.items() if value is not None}
