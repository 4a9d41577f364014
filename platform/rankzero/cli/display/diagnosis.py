"""What became of a run: everything that its folder tells, for people who come in the morning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rankzero.catalog import dead_runs, lookup
from rankzero.catalog.summary import ELSEWHERE, Summary, read_summary
from rankzero.cli.display.progress import duration
from rankzero.events import RunEnded
from rankzero.redaction.text import text_without_secrets, url_without_secrets
from rankzero.reporting import timeline
from rankzero.reporting.delivery_problems import trouble
from rankzero.run_store import claims
from rankzero.run_store import delivery_state as delivery
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import READ_BYTES, read_all, take

TAIL_LINES, TAIL_BYTES = 8, 4096
GRAVE = ("WARNING", "ERROR", "CRITICAL")


def run(runs: Path, name_or_id: str) -> int:
    """Print the story of a run; return 0. Raises UserError where there is no such run."""
    folder = lookup.require(runs, name_or_id)
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    for heading, lines in told(folder):
        if lines:
            console.print(f"[bold]{heading}[/]")
            for line in lines:
                console.print(f"  {line}")
    return 0


def told(folder: RunFolder) -> Iterator[tuple[str, list[str]]]:
    """Yield headings, and below each what the folder tells of it."""
    listed = read_summary(folder)
    yield f"{listed.name}: {listed.status}", list(_standing(folder, listed.status))
    yield "what happened", list(_timeline(folder))
    yield "why a rank failed", list(_failures(folder))
    yield "delivery to MLflow", list(_delivery(folder))
    yield "the recorder's warnings", list(_warnings(folder))
    if listed.status in ("FAILED", "DIED", "KILLED"):
        yield "the ranks' last words (logs/)", list(_last_words(folder))
    yield "what next", list(_advice(folder, listed))


def _standing(folder: RunFolder, status: str) -> Iterator[str]:
    identity, claim = folder.identity, claims.latest(folder, 0)
    yield f"MLflow experiment {escape(identity.experiment)}, in {escape(url_without_secrets(identity.tracking_uri))}"
    if claim is not None:
        alive = "lives" if claims.writer_lives(folder) else "is gone"
        yield f"rank 0: process {claim.pid} on {escape(claim.host)}, {alive}"
    yield f"last sign of life: {_ago(claims.last_heartbeat(folder))}"
    if status == "RUNNING" and dead_runs.silence(folder) > dead_runs.QUIET_SECONDS:
        silence = duration(dead_runs.silence(folder))
        yield f"[yellow]nothing was written for {silence}[/]: a long evaluation, or it hangs"
    if folder.pruned.exists():
        yield f"stopped by its search: {escape(_text(folder.pruned).strip())}"


def _timeline(folder: RunFolder) -> Iterator[str]:
    for line in timeline.tell(read_all(folder.events)):
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(line.time))
        text = escape(_one_line(line.text))
        yield f"[dim]{moment}[/]  {f'[yellow]{text}[/]' if line.grave else text}"
    foreign = _foreign(folder.events)
    if foreign:
        yield f"[yellow]{foreign} lines of the journal are no events: torn by a writer's death, or somebody else's[/]"
    nodes = sorted(folder.path.glob("system-node_*.jsonl"))
    if nodes:
        yield f"[dim]samples of {len(nodes)} node(s), the last {_ago(max(path.stat().st_mtime for path in nodes))}[/]"


def _failures(folder: RunFolder) -> Iterator[str]:
    found = [
        failure
        for path in sorted(folder.failures.glob("rank_*.json"))
        if (failure := _failure(path))
    ]
    for number, (_, rank, reason, error) in enumerate(sorted(found)):
        yield f"rank {rank}{', the first' if number == 0 and len(found) > 1 else ''}: {escape(_one_line(reason))}"
        if number == 0:
            yield from (
                f"    [dim]{escape(line)}[/]" for line in error.rstrip().splitlines()[-TAIL_LINES:]
            )
    ended = lookup.last_end(folder)
    if not found and isinstance(ended, RunEnded) and ended.error:
        yield from (
            f"[dim]{escape(line)}[/]" for line in ended.error.rstrip().splitlines()[-TAIL_LINES:]
        )


def _failure(path: Path) -> tuple[float, int, str, str] | None:
    """Return time, rank, reason and traceback of what a rank left; None of what is none of ours."""
    import json

    try:
        fields = json.loads(_text(path))
        return (
            float(fields["time"]),
            int(fields["rank"]),
            str(fields["reason"]),
            str(fields["error"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _delivery(folder: RunFolder) -> Iterator[str]:
    for path in sorted(folder.path.glob("delivery*.json")):
        progress = delivery.load(path)
        pending = (
            delivery.unread_bytes(folder, progress.cursor.offsets)
            + len(progress.queue.waiting)
            + bool(progress.queue.ending)
        )
        left = f", {pending:,} bytes and things not yet" if pending else ", complete"
        yield f"{path.stem}: {progress.cursor.delivered:,} values delivered{left}; last heard of {_ago(progress.updated)}"
        yield from (f"[yellow]{escape(line)}[/]" for line in trouble(progress))
        if progress.curves.skipped:
            yield f"{progress.curves.skipped:,} values not sent again, since an earlier attempt had sent their steps"
        if progress.run_id:
            yield f"MLflow run {progress.run_id}"
    if not delivery.path_of(folder, 0).exists():
        yield "[yellow]nothing was delivered yet[/]"


def _warnings(folder: RunFolder) -> Iterator[str]:
    for path in sorted(folder.path.glob("recorder*.log")):
        lines = [line for line in _text(path).splitlines() if any(word in line for word in GRAVE)]
        if len(lines) > TAIL_LINES:
            yield f"{path.name}: {len(lines)} warnings, the last of them"
        yield from (escape(line) for line in lines[-TAIL_LINES:])


def _last_words(folder: RunFolder) -> Iterator[str]:
    for path in sorted((folder.path / "logs").glob("*/attempt_*/*/std*.log"))[-2 * TAIL_LINES :]:
        lines = [line for line in _text(path, TAIL_BYTES).splitlines() if line.strip()][-3:]
        name = path.relative_to(folder.path / "logs")
        yield from (f"{escape(str(name))}: {escape(line[:300])}" for line in lines)


def _advice(folder: RunFolder, listed: Summary) -> Iterator[str]:
    name = escape(listed.name)
    if listed.status == ELSEWHERE:
        yield "this machine has helped with it: the machine that rank 0 ran on knows how it went, and so does MLflow"
    if listed.status == "DIED":
        yield "its end was not written: `rankzero runs` does that, here and in MLflow"
    if listed.undelivered and listed.status != "RUNNING":
        yield f"MLflow has not all of it: rankzero sync {name}"
    if listed.status in ("FAILED", "KILLED", "DIED"):
        kept = sorted(path.name for path in folder.checkpoints.glob("step_*"))
        newest = (
            f"go on from {kept[-1]}: rankzero resume {name}"
            if kept
            else "no checkpoint was kept: start it anew"
        )
        yield newest


def _foreign(path: Path) -> int:
    count, offset = 0, 0
    while (taken := take(path, offset, READ_BYTES)).offset != offset:
        count, offset = count + taken.foreign, taken.offset
    return count


def _text(path: Path, most: int = 1 << 20) -> str:
    """Return the end of a file, without secrets; nothing where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return text_without_secrets(file.read().decode(errors="replace"))
    except OSError:
        return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def _ago(moment: float) -> str:
    return f"{duration(time.time() - moment)} ago" if moment else "never"
