"""A whole search: the study, its run in MLflow, the trials, the report.

One of the processes that share a study leads. It measures the probe map, trains the reference,
confirms and decides. The others help with trials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rankzero import ranks
from rankzero.catalog import dead_runs
from rankzero.config import values
from rankzero.errors import UserError
from rankzero.launch.agent import Topology
from rankzero.mlflow_store import uris
from rankzero.redaction.text import url_without_secrets
from rankzero.reporting import html_page
from rankzero.run_store import run_locks
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.location import make_root
from rankzero.tuning import members, next_trial
from rankzero.tuning.agreement import (
    SPACE,
    agree_on_space,
    await_facts,
    check_space,
    options_of,
    space_of_version,
)
from rankzero.tuning.budget import SECONDS
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.probe import probe_map, speed_knobs
from rankzero.tuning.probe.probe_map import Probe
from rankzero.tuning.reports.study_run import StudyRun, texts_markdown, trials_markdown
from rankzero.tuning.session import DEVICE_KINDS, EARLIER, FIRST, TARGET, Session
from rankzero.tuning.space import BATCH, LR, Space, settings_text
from rankzero.tuning.study import OWNER, Study, decided_studies, find_study, open_study
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.host import Host
from rankzero.tuning.trials.launcher import TrainLauncher
from rankzero.tuning.verdict import confirm
from rankzero.tuning.verdict.confirm import DISTURBED, MIXED, sound
from rankzero.tuning.verdict.cost import DeviceResult, device_result
from rankzero.tuning.verdict.decide import Candidate, Verdict
from rankzero.tuning.verdict.sentence import different_devices, sentence

_PARENT, PRICE = "parent", "price"
"""Facts of a study: its run in MLflow, and the price of a device for an hour."""
SUBJECT, WINNER, CODE = "subject", "winner", "code"
"""Facts of a study: its experiment in MLflow and the class, the number of the winning trial, and a
digest of the code that it began with."""

_UNITS = {"time-to-target": ", in s", "energy": ", in J"}


@dataclasses.dataclass(frozen=True)
class SearchSetup:
    """The subject of a search, and the places of its results."""

    identity: Identity
    root: Path
    """The folder of the embedded store."""
    space: Space
    described: ExperimentDescription
    options: SearchOptions
    storage: str
    shared: bool
    """Whether other processes may take part."""
    probes: bool
    like: str | None
    """The study whose best trials come first."""
    use: str
    """The command that trains with the sweet spot."""
    again: str
    """The command that continues the search."""
    offline: bool
    """Whether runs are only recorded, and delivered to MLflow later."""
    tags: Mapping[str, str]
    """The user's tags."""
    argv: Sequence[str]
    hosts: Sequence[Host]
    """One for each trial that runs at the same time."""
    notify: Callable[[str], None]
    """Prints a line."""


@dataclasses.dataclass(frozen=True)
class SearchOutcome:
    """How this process's part in a search ended."""

    text: str
    folder: RunFolder | None
    """The run of this process's part. None: it had none."""
    use: str = ""
    """The command that trains with the sweet spot, if this process found one."""
    is_leaderless: bool = False
    """Whether the leader is gone, so that nobody will decide until a command does."""


def run(setup: SearchSetup) -> SearchOutcome:
    """Search, or help another process that does. Ctrl-C passes through."""
    if not setup.described.is_validated:
        raise UserError(
            "a search compares trainings by a validation metric, and data() returns no validation "
            "set: return one"
        )
    setup.space.check_reference()
    # With --offline, nothing has made the folder before.
    make_root(setup.root)
    refuse_other_storage(setup.storage, RunFolder(setup.root / "runs" / setup.identity.name))
    study = open_study(
        setup.storage,
        setup.identity.name,
        sampler=setup.options.sampler,
        pruner=setup.options.pruner,
        seed=setup.space.reference.train.seed,
    )
    space = space_of_version(study, setup.space, setup.options)
    setup = dataclasses.replace(setup, space=space)
    if has_changed(study, setup.described.code):
        setup.notify(
            "code   the experiment's file, or a module in its folder, has changed since this study "
            "began, and earlier trials stay: --new starts another study"
        )
    with contextlib.closing(study.members):
        leads = members.lead(study)
        if not (leads or setup.shared):
            pid = members.leader(study).split(" ")[1:2]
            raise UserError(
                f"process {' '.join(pid)} is searching study {study.name}: wait for it. To run "
                "trials side by side give that command --parallel, to share a study between "
                "machines --storage URL"
            )
        return _lead(setup, study) if leads else _help(setup, study)


def refuse_other_storage(storage: str, folder: RunFolder) -> None:
    """Raise UserError for a new study if the run of its name has the trials of another one."""
    # Before the new study is made: an empty one would hide the page of the run.
    if folder.children and folder.path.name not in decided_studies(storage, {}, SPACE):
        raise UserError(
            f"the trials of study {folder.path.name} are in another --storage, its database is "
            "lost, or an old version began it: give the --storage, or --new"
        )


def has_changed(study: Study, code: str) -> bool:
    """Return whether a study began with another code than this. Note the code of a new one."""
    # A study of an older version has none, and gets this one.
    if CODE not in study.facts:
        study.note(CODE, code)
    return bool(study.facts[CODE] != code)


def _lead(setup: SearchSetup, study: Study) -> SearchOutcome:
    _check_like(setup, study)
    _check_not_erased(setup, study)
    # Whichever machines have led the study, it has one run in MLflow.
    uuid = _run_in_mlflow(setup, study) or setup.identity.uuid
    with _open_run(setup, dataclasses.replace(setup.identity, uuid=uuid)) as run:
        try:
            return _decide(setup, study, run)
        except members.LostLead:
            # Its part ends as a helper's. The end of the study is the other process's.
            text = (
                f"Led {study.name} until this process lost the database for a while. Another one "
                "leads it since, and decides."
            )
            run.finish(text, {})
            is_leaderless = not study.members.has_leader() and members.leader(study) != ""
            return SearchOutcome(text, run.folder, is_leaderless=is_leaderless)


def _decide(setup: SearchSetup, study: Study, run: StudyRun) -> SearchOutcome:
    """Search as the leader. Raises LostLead."""
    began, probe = time.monotonic(), _probe(setup, study, run) if setup.probes else Probe()
    measured, speed = probe.cells, speed_knobs.decided(probe.effects)
    space = agree_on_space(
        study, setup.space, measured, setup.options, speed, rules_out=not probe.is_cut
    )
    setup = dataclasses.replace(setup, space=space)
    # The folder may hold an earlier attempt's identity, which stays.
    own = run.folder.identity
    uri = url_without_secrets(own.tracking_uri)
    study.note(_PARENT, {"uuid": own.uuid, "tracking_uri": uri, "host": socket.gethostname()})
    if setup.options.price is not None:
        study.note(PRICE, setup.options.price)
    # Stored once: a resumed search must not get other guesses from another probe map.
    if FIRST not in study.facts:
        _note_earlier(setup, study)
        guesses = probe_map.guesses(space, measured) or next_trial.guesses(space)
        study.note(FIRST, guesses)
    setup.notify(f"space  {space}")
    for warning in space.warnings():
        run.log.notice(warning)

    def notify(text: str) -> None:
        setup.notify(text)
        run.log_trials(study.known)

    spent, launchers = time.monotonic() - began, _launchers(setup, run)
    session = Session(study, space, launchers, setup.options, notify, already_seconds=spent)
    verdict = session.run()
    setup = dataclasses.replace(setup, use=_use(setup, verdict))
    confirmed, price = sound(study.facts), study.facts.get(PRICE)
    devices = device_result(study.trials(), space, confirmed, price, verdict.winner.trial, measured)
    text = _report(setup, study, verdict, probe, devices, run)
    run.finish(
        text,
        {
            "best": study.trials()[verdict.winner.trial].facts.get("best"),
            "gain": verdict.gain,
            "gain_low": verdict.gain_low,
            "gain_high": verdict.gain_high,
            "search_seconds": study.facts[SECONDS],
            "noise": verdict.noise if math.isfinite(verdict.noise) else None,
        },
    )
    study.note(members.LEADER, "")
    return SearchOutcome(text, run.folder, setup.use)


def _use(setup: SearchSetup, verdict: Verdict) -> str:
    """Return the command that trains with the sweet spot, or nothing without one."""
    devices = how_many_devices(setup.space, verdict.winner, setup.described.gpus)
    return f"{setup.use}{devices}" if verdict.has_sweet_spot else ""


def how_many_devices(space: Space, winner: Candidate, gpus: int) -> str:
    """Return the options that train on the winner's devices, where the defaults may not.

    `gpus`: of the machine.
    """
    strategy = winner.settings.get("train.strategy", space.reference.train.strategy)
    is_default = winner.devices == ranks.default_count(strategy, gpus)
    if len(space.devices) == space.machines == 1 and is_default:
        return ""
    meeting = " --rdzv-endpoint HOST:PORT" if space.machines > 1 else ""
    return f" {options_of([winner.devices], space.machines)}{meeting}"


def _run_in_mlflow(setup: SearchSetup, study: Study) -> str | None:
    """Return the id of the study's run, if it is in the MLflow that this process delivers to."""
    parent, own = study.facts.get(_PARENT), url_without_secrets(setup.identity.tracking_uri)
    return parent["uuid"] if parent and parent["tracking_uri"] == own else None


def _check_not_erased(setup: SearchSetup, study: Study) -> None:
    # Another machine may have no folder of the run. It may have a store of the same path.
    own = {"tracking_uri": uris.default_tracking_uri(setup.root), "host": socket.gethostname()}
    # An earlier version noted no host.
    began_here = own.items() <= ({"host": own["host"]} | (study.facts.get(_PARENT) or {})).items()
    if began_here and not (setup.root / "runs" / study.name).exists():
        where = url_without_secrets(setup.storage)
        raise UserError(
            f"the run of study {study.name} and its trials are erased, and {where} still has the "
            "study: choose another --name"
        )


def _probe(setup: SearchSetup, study: Study, run: StudyRun) -> Probe:
    probe = probe_map.measure(
        setup.space,
        setup.described,
        setup.identity.experiment_file or "",
        setup.root,
        setup.hosts[0],
        setup.notify,
        setup.options.silence_seconds,
        # A study that has its space does not use what another measurement would show.
        most_seconds=0 if SPACE in study.facts else 60 * (setup.options.minutes or math.inf) / 3,
    )
    run.write_probe(probe.cells, probe.effects)
    return probe


def _help(setup: SearchSetup, study: Study) -> SearchOutcome:
    """Do trials of a study that another process leads, until the budget is spent."""
    leader = members.leader(study).split(" ")[0] or "another process"  # the host's name
    setup.notify(f"{leader} leads this study: waiting until it has trained your own configuration")
    gone = f"{leader} led it and has ended without a verdict: `{setup.again}` continues and decides"
    if not await_facts(study, (SPACE, FIRST, _PARENT, TARGET)):
        return SearchOutcome(f"Helped with no trial of {study.name}. {gone}", None, "", True)
    space = check_space(study, setup.space, setup.options)
    identity = dataclasses.replace(
        setup.identity,
        name=helper_name(study),
        uuid=secrets.token_hex(16),
        parent_uuid=_run_in_mlflow(setup, study),
    )
    with _open_run(setup, identity) as run:
        session = Session(study, space, _launchers(setup, run), setup.options, setup.notify)
        session.help()
        # A copy of a result has its owner, too.
        ended, own_name = next_trial.ended(study.trials()), study.members.own_name
        own = [one for one in ended if one.facts.get(OWNER) == own_name]
        # In this order: a leader that decides notes it before it frees its lock.
        decides = study.members.has_leader()
        is_leaderless = not decides and members.leader(study) != ""
        end = f"{leader} confirms and decides" if decides else "The study is decided"
        text = f"Helped with {len(own)} trials of {study.name}. {gone if is_leaderless else end}."
        run.finish(text, {})
    return SearchOutcome(text, run.folder, is_leaderless=is_leaderless)


def helper_name(study: Study) -> str:
    """Return the name of the run of this process's part, which no other helper has."""
    # Each container numbers its processes from 1, so their numbers are equal.
    return f"{study.name}-helper-{study.members.own_name[-6:]}"


def _open_run(setup: SearchSetup, identity: Identity) -> AbstractContextManager[StudyRun]:
    options = vars(setup.options).items()
    # The machine may have gone down with the search, and its recorder.
    folder = RunFolder(setup.root / "runs" / identity.name)
    if not run_locks.writer_lives(folder):
        dead_runs.close_children(folder)
    return StudyRun.open(
        setup.root / "runs",
        identity,
        setup.space.reference,
        setup.argv,
        offline=setup.offline,
        tags=setup.tags,
        options={f"search.{name}": values.render(value) for name, value in options},
        again=setup.again,
    )


def _check_like(setup: SearchSetup, study: Study) -> None:
    """Raise UserError if there is no study that --like names."""
    if setup.like is not None and FIRST in study.facts:
        setup.notify("like   this study has begun already, so --like changes nothing")
    elif setup.like is not None:
        # Now, and not after the probe, which takes minutes.
        find_study(setup.storage, setup.like)


def _note_earlier(setup: SearchSetup, study: Study) -> None:
    """Note the best trials of an earlier study, which come first, or name a study that has some."""
    subject = f"{setup.identity.experiment}: {setup.described.name}"
    study.note(SUBJECT, subject)
    if setup.like is None:
        alike = decided_studies(setup.storage, {SUBJECT: subject}, WINNER)
        if alike and setup.options.sampler != "grid":
            words = f"--like {shlex.quote(alike[-1])}"
            setup.notify(f"like   {words} would begin with the best trials of that study")
        return
    like = find_study(setup.storage, setup.like)
    space, facts = setup.space, like.facts
    # A study of an older version has no settings.
    own = facts.get(SPACE, {}).get("settings", {}).get(BATCH)
    found = next_trial.from_earlier(space, like.trials(), facts.get(WINNER), own and int(own))
    study.note(EARLIER, found)
    chosen = (space.experiment(one) for one in found)
    texts = [settings_text({BATCH: one.train.batch_size, LR: one.lr}) for one in chosen]
    best = "; ".join(texts) or "it has none but yours"
    setup.notify(f"like   {setup.like}: its best trials come first: {best}")


def _launchers(setup: SearchSetup, run: StudyRun) -> list[TrainLauncher]:
    # The command of a machine ends after so long a silence of the others.
    silence_seconds = setup.options.silence_seconds
    topology = Topology(setup.described.processes, silence_seconds=silence_seconds)
    return [TrainLauncher(host, run.folder, topology, run.environment) for host in setup.hosts]


def _report(
    setup: SearchSetup,
    study: Study,
    verdict: Verdict,
    probe: Probe,
    devices: DeviceResult,
    run: StudyRun,
) -> str:
    """Write the verdict and its evidence into the run and the study; return it as sentences."""
    members.require_lead(study)
    trials, goal = study.trials(), setup.space.reference.goal
    text = " ".join([_sentence(setup, study, verdict), *devices.sentences()])
    for name, columns, rows in devices.tables():
        run.write_table(name, columns, rows)
    tables = [
        texts_markdown(("confirmed trial", "values on new seeds"), confirm.rows(study.facts)),
        *(texts_markdown(columns, rows) for _, columns, rows in devices.tables()),
        texts_markdown(speed_knobs.EFFECT_COLUMNS, [one.row() for one in probe.effects]),
    ]
    run.log_trials(trials)
    run.write_trials(trials)
    run.write_sweet_spot(
        setup.space.experiment(trials[verdict.winner.trial].parameters), text, setup.use
    )
    # For `rankzero report`, which reads the study alone.
    unit = _UNITS.get(verdict.objective, "")
    study.note("objective", f"{verdict.objective}{unit}")
    study.note("sentence", text)
    study.note(WINNER, verdict.winner.trial)
    result = f"**{text}**\n\nObjective: {verdict.objective}{unit}.\n\n"
    details = f"{trials_markdown(trials)}{''.join(tables)}"
    use = f"Use it: `{setup.use}`\n" if setup.use else ""
    run.write_description(f"{result}{details}{use}")
    with run.drawing():
        from rankzero.tuning.reports import device_figures, optuna_figures, png_files, probe_figures

        costs = device_figures.figures(devices)
        speeds = probe_figures.figures(probe.cells, probe.effects)
        figures = [*costs.values(), *optuna_figures.interactive(trials, goal, verdict.region)]
        png_files.write_all(run.folder.artifacts, {**costs, **speeds})
        first, last = (
            html_page.from_markdown(one.replace("&emsp;", "")) for one in (result + use, details)
        )
        charts = ['<div class="grid">', *figures, *speeds.values(), "</div><h2>Trials</h2>"]
        run.write("search.html", html_page.page(run.folder.path.name, [first, *charts, last]))
        optuna_figures.write_pngs(run.folder.artifacts, trials, goal, verdict.region)
    return text


def _sentence(setup: SearchSetup, study: Study, verdict: Verdict) -> str:
    """Say which trial won, by how much, and how far the search came."""
    trials, facts, goal = study.trials(), study.facts, setup.space.reference.goal
    sign = 1 if goal.mode == "max" else -1
    qualities = [(one.number, float(one.facts["best"])) for one in trials if "best" in one.facts]
    text = sentence(
        verdict,
        goal,
        facts.get(TARGET),
        facts[SECONDS],
        max(qualities, key=lambda pair: sign * pair[1], default=None),
        edges=setup.space.at_edge(trials[verdict.winner.trial].parameters),
        disturbed=len(facts.get(DISTURBED, ())),
        mixed=facts.get(MIXED, ()),
    )
    if setup.options.sampler == "grid" and (left := study.untried_cells()):
        text += f" The grid has {len(left)} cells that were not tried, such as {left[0]}."
    if len(devices := facts.get(DEVICE_KINDS, ())) > 1:
        text += f" {different_devices(devices)}"
    return text
