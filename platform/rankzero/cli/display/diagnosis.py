"""``rankzero doctor RUN``: what happened to a run, from everything in its folder."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rankzero.catalog import command_lines, dead_runs, lookup
from rankzero.catalog.summary import ELSEWHERE, Summary, read_summary
from rankzero.events import RunStarted
from rankzero.mlflow_store import named_runs
from rankzero.redaction.text import text_without_secrets, url_without_secrets
from rankzero.reporting import reproduce, timeline
from rankzero.reporting.delivery_problems import trouble
from rankzero.reporting.run_report import duration
from rankzero.run_store import checkpoint_files, provenance, run_locks
from rankzero.run_store import delivery_state as delivery
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import READ_BYTES, read_all, take

_LINES, _OUTPUT_BYTES = 8, 4096
_WARNING = re.compile("WARNING|ERROR|CRITICAL")


def run(runs: Path, name_or_id: str) -> int:
    """Print what happened to a run; return 0. Raises UserError if there is no such run."""
    folder = named_runs.require(runs, name_or_id)
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for heading, lines in sections(folder):
        if lines:
            console.print(f"[bold]{heading}[/]")
            for line in lines:
                console.print(f"  {line}")
    return 0


def sections(folder: RunFolder) -> Iterator[tuple[str, list[str]]]:
    """Yield each section: a heading, and its lines with rich's markup."""
    listed = read_summary(folder)
    (name,) = lookup.shown_names([folder])
    yield f"{escape(name)}: {listed.status}", list(_current_state(folder, listed.status))
    yield "what happened", list(_timeline(folder))
    yield "why a rank failed", list(_failures(folder))
    yield "delivery to MLflow", list(_delivery(folder))
    yield "the recorder's warnings", list(_warnings(folder))
    if listed.status in ("FAILED", "DIED", "KILLED"):
        found = []
        for path in _output_files(folder.path / "logs"):
            name = escape(str(path.relative_to(folder.path / "logs")))
            lines = [line for line in _end_of(path, _OUTPUT_BYTES).splitlines() if line.strip()]
            found += [f"{name}: {escape(line[:300])}" for line in lines[-3:]]
        yield "the ranks' last output (logs/)", found
    yield "what to do next", list(_advice(folder, listed))


def _output_files(logs: Path) -> list[Path]:
    """Return what the first ranks of the newest launch printed. The names of launches are drawn."""
    newest = sorted(logs.glob("*/attempt_*"), key=lambda one: one.stat().st_mtime_ns)[-1:]
    found = (path for attempt in newest for path in attempt.glob("*/std*.log"))
    return sorted(found, key=lambda one: (len(one.parent.name), one))[: 2 * _LINES]


def _current_state(folder: RunFolder, status: str) -> Iterator[str]:
    identity, claim = folder.identity, run_locks.latest(folder, 0)
    store = escape(url_without_secrets(identity.tracking_uri))
    yield f"MLflow experiment {escape(identity.experiment)}, in {store}"
    if claim is not None:
        alive = "alive" if run_locks.writer_lives(folder) else "gone"
        yield f"rank 0: process {claim.pid} on {escape(claim.host)}, {alive}"
    yield f"last sign of life: {_ago(run_locks.last_heartbeat(folder))}"
    if status == "RUNNING" and dead_runs.silence(folder) > dead_runs.QUIET_SECONDS:
        silence = duration(dead_runs.silence(folder))
        yield f"[yellow]nothing was written for {silence}[/]: a long evaluation, or a hang"
    if folder.pruned.exists():
        yield f"stopped by its search: {escape(_end_of(folder.pruned).strip())}"


def _timeline(folder: RunFolder) -> Iterator[str]:
    for line in timeline.lines(read_all(folder.events)):
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time))
        text = escape(_one_line(line.text))
        yield f"[dim]{moment}[/]  {f'[yellow]{text}[/]' if line.grave else text}"
    foreign, offset = 0, 0
    while (chunk := take(folder.events, offset, READ_BYTES)).offset != offset:
        foreign, offset = foreign + chunk.foreign, chunk.offset
    if foreign:
        why = "a writer died while it wrote them, or another program did"
        yield f"[yellow]{foreign} lines of the journal are not events: {why}[/]"
    nodes = sorted(folder.path.glob("system-node_*.jsonl"))
    if nodes:
        newest = max(path.stat().st_mtime for path in nodes)
        yield f"[dim]samples of {len(nodes)} node(s), the last {_ago(newest)}[/]"


def _failures(folder: RunFolder) -> Iterator[str]:
    found = []
    for path in folder.failures.glob("rank_*.json"):
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # damaged
            fields = json.loads(_end_of(path))
            what = str(fields["reason"]), str(fields["error"])
            found.append((float(fields["time"]), int(fields["rank"]), *what))
    # Other ranks write the first one's failure, too.
    by_rank = {one[1]: one for one in sorted(found, reverse=True)}
    for number, (_, rank, reason, error) in enumerate(sorted(by_rank.values())):
        first = ", the first" if number == 0 and len(by_rank) > 1 else ""
        yield f"rank {rank}{first}: {escape(_one_line(reason))}"
        if number == 0:
            yield from _traceback(error)
    ended = lookup.last_end(folder)
    if not found and ended is not None and ended.error:
        yield from _traceback(ended.error)


def _traceback(error: str) -> list[str]:
    return [f"    [dim]{escape(line)}[/]" for line in error.rstrip().splitlines()[-_LINES:]]


def _delivery(folder: RunFolder) -> Iterator[str]:
    for path in sorted(folder.path.glob("delivery*.json")):
        progress = delivery.load(path)
        pending = delivery.unread_bytes(folder, progress.cursor.offsets)
        pending += len(progress.queue.waiting) + bool(progress.queue.ending)
        left = f", {pending:,} bytes and things not yet" if pending else ", complete"
        done = f"{progress.cursor.delivered:,} values delivered{left}"
        yield f"{path.stem}: {done}; last update {_ago(progress.updated)}"
        yield from (f"[yellow]{escape(line)}[/]" for line in trouble(progress))
        if (skipped := progress.curves.skipped) > 0:
            yield f"{skipped:,} values not sent again: an earlier attempt delivered their steps"
        if progress.run_id:
            yield f"MLflow run {progress.run_id}"
    if not delivery.path_of(folder, 0).exists():
        yield "[yellow]nothing was delivered yet[/]"


def _warnings(folder: RunFolder) -> Iterator[str]:
    for path in sorted(folder.path.glob("recorder*.log")):
        lines = [line for line in _end_of(path).splitlines() if _WARNING.search(line)]
        if len(lines) > _LINES:
            yield f"{path.name}: {len(lines)} warnings, the last of them"
        yield from (escape(line) for line in lines[-_LINES:])


def _advice(folder: RunFolder, listed: Summary) -> Iterator[str]:
    def command(verb: str) -> str:
        return escape(command_lines.line(folder.root, verb, listed.name))

    if listed.status == ELSEWHERE:
        yield "rank 0 ran on another machine: that machine and MLflow have the result"
    if listed.status == "DIED":
        yield "its end was not recorded: `rankzero runs` records it, here and in MLflow"
    if listed.undelivered and listed.status != "RUNNING":
        yield f"not everything is in MLflow: {command('sync')}"
    if listed.status in ("FAILED", "KILLED", "DIED"):
        kept = [path.name for path in checkpoint_files.by_step(folder.checkpoints)]
        starts = [one for one in read_all(folder.events) if isinstance(one, RunStarted)]
        if kept and any(provenance.OWN_LOOP in start.environment for start in starts):
            yield f"continue from {kept[-1]}: start the program again, with these lines in it"
            yield from escape(reproduce.resume_lines(listed.name)).splitlines()
        elif kept:
            yield f"continue from {kept[-1]}: {command('resume')}"
        elif starts and (again := _command_of_many(folder, starts[-1])):
            yield f"continue: {escape(again)}"
        else:
            yield "it has no checkpoint: start a new run"


def _command_of_many(folder: RunFolder, start: RunStarted) -> str:
    """Return what continues a repeat, a search or a probe, also for their runs; "" for others."""
    recorded = start.environment.get("rankzero.command", "")
    words = reproduce.words(recorded)[:2]
    if words == ["rankzero", "repeat"]:
        return command_lines.line(folder.root, "repeat", folder.identity.parent or folder.path.name)
    with contextlib.suppress(ValueError):  # a command that is cut off
        if words in (["rankzero", "search"], ["rankzero", "probe"]):
            again = [word for word in shlex.split(recorded)[1:] if word != "--new"]
            return shlex.join(["rankzero", *again])
    return ""


def _end_of(path: Path, most: int = 1 << 20) -> str:
    """Return the end of a file without secrets, or "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            # Logs may have any size, and the end is what explains a failure.
            file.seek(max(0, path.stat().st_size - most))
            return text_without_secrets(file.read().decode(errors="replace"))
    except OSError:
        return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _ago(moment: float) -> str:
    return f"{duration(time.time() - moment)} ago" if moment else "never"
