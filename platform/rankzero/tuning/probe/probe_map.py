"""The probe map: speed and memory of batch size x precision, and the effects of knobs at its knee.

Each cell is measured once and kept; one that failed is measured again by the next command that
begins a search. Each number of devices has a map; knobs are measured on most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rankzero import config, ranks, scalars
from rankzero.errors import RunFailed
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.agent import Topology
from rankzero.launch.failures import Failure, FailureKind
from rankzero.run_store.lock_files import open_lock, try_lock
from rankzero.tuning.probe import grid, speed_knobs, worker
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.probe.speed_knobs import Effect, Subject
from rankzero.tuning.probe.worker import ProbeRequest
from rankzero.tuning.space import BATCH_INDEX, PRECISION, Space, devices_text, settings_text
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.trials.follower import GIVE_UP_SECONDS
from rankzero.tuning.trials.host import Host
from rankzero.tuning.trials.silence import Silence

_BELOW = 2  # the map starts at the user's batch size over this
_POLL_SECONDS = 0.2
_BUSY = 0.5  # half the interval over the speed: wider ones say next to nothing
_STATUS: dict[FailureKind, grid.Status] = {
    FailureKind.OUT_OF_MEMORY: "out of memory",
    FailureKind.OUT_OF_HOST_MEMORY: "out of memory",
    FailureKind.USER_ERROR: "refused",
}
# Settings that do not change the time of a step, or that each cell sets by itself.
_NOT_PART = (
    "train.batch_size",
    "train.micro_batch",
    "train.precision",
    "train.seed",
    "train.epochs",
    "train.steps",
    "train.eval_every",
    "train.checkpoints.save_every",
    "train.checkpoints.keep",
    "train.mlflow.log_model",
    "train.mlflow.log_pictures",
    "train.limits.max_minutes",
    "train.limits.stop_at_target",
    "train.log_every",
    "train.schedule",
    "train.warmup_steps",
    "lr",
    "goal.metric",
    "goal.mode",
    "goal.target",
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """All measurements: the map, and the effect of each value of a knob of speed."""

    cells: list[ProbeResult] = dataclasses.field(default_factory=list)
    effects: list[Effect] = dataclasses.field(default_factory=list)
    is_cut: bool = False
    """Whether there was no time for all of the map. Then it rules out nothing."""


def measure(
    space: Space,
    described: ExperimentDescription,
    experiment_file: str,
    root: Path,
    host: Host,
    notify: Callable[[str], None],
    silence_seconds: float,
    *,
    most_seconds: float = math.inf,
) -> Probe:
    """Measure what is not known yet; return the map, and what knobs do at its knee.

    Raises RunFailed if no cell can be measured. A cell without a result after `silence_seconds`
    is killed, and counts as failed. The map has the space's batch sizes from half of
    the user's own, and all precisions. `root`: the folder of the embedded store. Results are kept
    below it for the next search. On most devices, a step waits longest for data and gradients: a
    search decides the knobs of speed there, for all numbers of devices. After `most_seconds`, no
    cell begins but the first. With 0, it returns only what is known.
    """
    found, results, until = Probe(), root / "probes", time.monotonic() + most_seconds
    results.mkdir(parents=True, exist_ok=True)
    measure_once = functools.partial(_measure_once, host, notify, silence_seconds)
    for count in space.devices:
        if len(space.devices) > 1:
            notify(f"probe  on {devices_text(count)}")
        one = dataclasses.replace(described, processes=count)
        request = _request(space, one, experiment_file, results)
        if most_seconds:
            with _alone(request.results, notify):
                known = _complete(request, measure_once, until)
            # The knobs come last: without some of them, the map is whole.
            whole = dataclasses.replace(request, knobs=()).next_cell(known) is None
            if time.monotonic() > until and request.next_cell(known):
                found = dataclasses.replace(found, is_cut=found.is_cut or not whole)
                so = "leaves settings of speed undecided" if whole else "rules out no batch size"
                notify(
                    f"probe  stopped after {most_seconds:.0f} s, a third of --minutes: this search "
                    f"{so}. `rankzero probe` measures the rest for a search with --new"
                )
            _note_vague(request, known, notify)
        elif grid.knee(request.cells(known := _read(request.results, 0))) is None:
            continue
        probe = _result(request, known, notify)
        found.cells.extend(dataclasses.replace(cell, devices=count) for cell in probe.cells)
        found.effects.extend(probe.effects)
    return found


def _note_vague(
    request: ProbeRequest, known: Sequence[ProbeResult], notify: Callable[[str], None]
) -> None:
    if vague := sum(_BUSY < one.relative_half_width < math.inf for one in known):
        notify(
            f"probe  {vague} of {len(known)} intervals are above ± {_BUSY:.0%}, as on a busy "
            f"machine: delete {request.results} and search with --new to measure again"
        )


def _request(
    space: Space, described: ExperimentDescription, experiment_file: str, results: Path
) -> ProbeRequest:
    """Return the request for the described number of processes."""
    train = space.reference.train
    return ProbeRequest(
        experiment_file=experiment_file,
        config=config.to_yaml(space.reference),
        batch_sizes=tuple(one for one in space.batch_sizes if one * _BELOW >= train.batch_size),
        precisions=space.precisions,
        knobs=space.knobs if described.processes == max(space.devices) else (),
        subject=Subject(train, described),
        results=results / f"{_key(space.reference, described)}.jsonl",
    )


def _result(
    request: ProbeRequest, known: Sequence[ProbeResult], notify: Callable[[str], None]
) -> Probe:
    """Return what is known on one number of devices. Raises RunFailed without a single speed."""
    cells = request.cells(known)
    if (knee := grid.knee(cells)) is None:
        # All cells fail for the same reason then, such as an error in the user's code.
        first = failures.first(request.failures)
        reason = first.reason if first else f"see {request.results}"
        where = devices_text(request.subject.described.processes)
        raise RunFailed(f"no batch size could be measured on {where}: {reason}")
    _, effects = speed_knobs.replay(request.knobs, request.subject, knee, known)
    for effect in effects:
        name, gain, interval, decision = effect.row()
        notify(f"knob   {name:20} {gain:>8}  {interval and f'({interval})'}  {decision}")
    return Probe(cells, effects)


@contextlib.contextmanager
def _alone(results: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Let one search at a time into the block: another one's lines look like lost cells."""
    descriptor = open_lock(results.with_suffix(".lock"))
    try:
        if not try_lock(descriptor):
            notify("probe  another search measures this map: waiting")
            try_lock(descriptor, seconds=math.inf)
        yield
    finally:
        os.close(descriptor)


def _complete(
    request: ProbeRequest, measure_once: Callable[[ProbeRequest], None], until: float
) -> list[ProbeResult]:
    """Measure until no cell is left, or `until`; return all measurements that hold."""
    # Each pass ends with the map, or with a cell that ended the processes.
    earlier = lines = len(_lines(request.results))
    before, known = -1, _read(request.results, earlier)
    while before < lines and request.next_cell(known) and (not known or time.monotonic() < until):
        # Seconds that are left: another machine's clock may show another time.
        left = max(0.0, until - time.monotonic())
        measure_once(dataclasses.replace(request, known=tuple(known), most_seconds=left))
        before, lines = lines, len(_lines(request.results))
        known = _read(request.results, earlier)
    return known


def _measure_once(
    host: Host, notify: Callable[[str], None], silence_seconds: float, request: ProbeRequest
) -> None:
    """Run one process group until it ends. If a cell killed it, or hung, record that cell."""
    for path in request.failures.glob("rank_*.json"):
        path.unlink()
    logs = request.results.with_suffix(".logs")
    # Counted first: the processes may write a line at once.
    shown, has_ended, was_killed = len(_lines(request.results)), False, False
    topology = Topology(request.subject.described.processes, silence_seconds=silence_seconds)
    folder, key = request.results.parent, request.results.stem
    # The folder has the maps of all experiments.
    host.run(worker.main, topology, request, logs, folder, key)
    silence, beat = Silence(), 0
    while not has_ended:
        has_ended = host.has_ended(_POLL_SECONDS)
        before, beat, lines = beat, _changed_at(request.beat), _lines(request.results)
        is_alive = host.is_starting or len(lines) > shown or beat != before
        for fields in lines[shown:]:
            if "status" in fields:
                notify(_line(grid.parse(fields)))
        shown = len(lines)
        silent = silence.look(is_alive=is_alive and not was_killed)
        if not has_ended and was_killed and silent > GIVE_UP_SECONDS:
            host.close()
            break
        if not has_ended and not was_killed and silent > silence_seconds:
            was_killed = True
            silence.look(is_alive=True)
            reason = f"no result for {silence_seconds:.0f} s (--silence-seconds)"
            failure = Failure(time.time(), -1, reason, "", FailureKind.HANG)
            failures.write(failure, request.failures)
            host.signal(signal.SIGQUIT, [request.failures])
    # A cell that was begun and has no result has killed its processes. If their host is lost, that
    # may be no fault of the cell: it is measured once again.
    if lines and "begun" in lines[-1] and (not host.was_lost or lines[-2:-1] == lines[-1:]):
        _record_lost(request, lines[-1]["begun"], notify)


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _record_lost(
    request: ProbeRequest, begun: dict[str, Any], notify: Callable[[str], None]
) -> None:
    first = failures.first(request.failures)
    status = _STATUS.get(first.kind, "failed") if first else "failed"
    # An error of a compiler has many lines.
    reason = first.reason.partition("\n")[0] if first else "its processes wrote no reason"
    limit = None
    if first and first.kind is FailureKind.OUT_OF_MEMORY:
        # The processes have ended. Other cells of the map are of the same device.
        known = (one.memory_limit_bytes for one in _read(request.results, 0))
        limit = next(filter(None, known), None)
    lost = {**begun, "status": status, "reason": reason, "memory_limit_bytes": limit}
    request.append(lost)
    notify(_line(grid.parse(lost)))


def _read(path: Path, earlier: int) -> list[ProbeResult]:
    """Return the measured cells in a file of results. Ignore lines that a crash tore.

    The first `earlier` lines are of other commands. A failure of theirs may be mended by now.
    """
    found = enumerate(_lines(path))
    cells = [(place, grid.parse(fields)) for place, fields in found if "status" in fields]
    newest = {_identity(one): place for place, one in cells if grid.is_lasting(one)}
    # A failure that was measured again later does not count.
    return [
        one
        for place, one in cells
        if grid.is_lasting(one) or place >= max(earlier, newest.get(_identity(one), 0))
    ]


def _identity(one: ProbeResult) -> str:
    return repr((one.batch_size, one.micro_batch, one.precision, one.settings, one.plan))


def guesses(space: Space, measured: Sequence[ProbeResult]) -> list[dict[str, Any]]:
    """Return the parameters to try first: the user's own with the knobs of speed, then the map's.

    The map suggests its knee, and half-way to it from the user's batch size. On other numbers of
    devices than the user's own, it suggests half-way alone.

    With samples to the target n0 (1 + B / B_crit) and speed X0 B / (B + B_hw), the best batch size
    is sqrt(B_hw B_crit). It lies below the knee, where the speed levels off, and above the batch
    size of a user who began small.
    """
    own, tried = space.reference_parameters(), list[dict[str, Any]]()
    for count in space.devices:
        found = grid.knee([one for one in measured if one.devices == count])
        if found is None:
            continue
        first, fast = count == space.devices[0], space.on(count, space.sped_up(own))
        tried += [dict(fast)] if first or BATCH_INDEX not in own else []
        if BATCH_INDEX in own:
            knee = own[BATCH_INDEX]
            if found.batch_size in space.batch_sizes:
                knee = space.batch_sizes.index(found.batch_size)
            between = math.ceil((own[BATCH_INDEX] + knee) / 2)
            if PRECISION in own and found.precision in space.precisions:
                fast[PRECISION] = found.precision
            indices = dict.fromkeys((between, knee) if first else (between,))
            tried += [{**fast, BATCH_INDEX: index} for index in indices]
    return [parameters for parameters in tried if parameters != own]


def _line(one: ProbeResult) -> str:
    what = f"batch {one.batch_size:6} {one.precision:5}"
    if one.plan:
        what += f" {settings_text(one.settings) or 'as it is':20}"
    if one.status != "ok":
        return f"probe  {what} {one.status}: {one.reason}"
    memory = "" if one.memory_bytes is None else f"  {one.memory_bytes / 2**30:6.1f} GiB"
    speed = f"{scalars.shown(one.samples_per_second):>12} samples/s ± {one.relative_half_width:.1%}"
    return f"probe  {what} {speed}{memory}  {one.bound}-bound"


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
    return [fields for fields in found if isinstance(fields, dict)]


def _key(reference: Experiment, described: ExperimentDescription) -> str:
    """Return a digest of all that a measurement depends on: code, settings, machine, versions."""
    settings, count = config.flatten(reference).items(), described.processes
    is_divided = ranks.shards(reference.train.strategy, count) == count
    what = (
        described.code,
        described.name,
        sorted(repr(item) for item in settings if item[0] not in _NOT_PART),
        described.processes,
        described.device,
        described.driver,
        described.cores,
        described.processor,
        version("torch"),
        # An older version's map is of one machine.
        *([described.machines] if described.machines > 1 else ()),
        # An older version divided the batches of these strategies, too.
        *(() if is_divided else ("whole batches",)),
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
