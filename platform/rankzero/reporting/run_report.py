"""A run's report in Markdown, for its MLflow page and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.catalog import command_lines
from rankzero.catalog.summary import read_summary
from rankzero.events import RunEnded
from rankzero.metric_names import SPEED
from rankzero.reporting import page_links, reproduce
from rankzero.reporting.delivery_problems import trouble
from rankzero.reporting.markdown import inline, table
from rankzero.reporting.run_facts import Facts, facts_of, is_limited, limited_by, straggler
from rankzero.run_store import provenance
from rankzero.run_store.delivery_state import DeliveryState, load, path_of
from rankzero.run_store.folder import RunFolder
from rankzero.scalars import number, shown

_SETTINGS = (
    "train.batch_size",
    "train.micro_batch",
    "train.precision",
    "train.epochs",
    "train.steps",
    "train.seed",
)
_GPU_ROWS = (
    ("utilization_percentage", "GPU busy, mean", "%"),
    ("memory_usage_percentage", "GPU memory, mean", "%"),
    ("power_usage_watts", "GPU power, mean", "W"),
)
_CHANGES = {
    "true": ", with uncommitted changes",
    "untracked": ", with new files that are not committed",
    "incomplete": ", with uncommitted changes that provenance/diff.patch has in part",
}
# The end of a traceback names the error. The journal has all of it.
_ERROR_LINES = 25
_MAX_NOTES = 30
# MLflow's page puts no space above headings.
_GAP = "&nbsp;\n\n"


def page(folder: RunFolder) -> str:
    """Return a run's page in MLflow as text, as if a run without an end ended now."""
    facts = facts_of(folder)
    text = written(folder, facts, load(path_of(folder, 0)), folder.root)
    # Only MLflow's page needs this space.
    text = text.replace(_GAP, "").replace("&emsp;", "")
    # MLflow has the note above the page, where users edit it.
    return f"{facts.note}\n\n{text}" if facts.note else text


def written(
    folder: RunFolder, facts: Facts, progress: DeliveryState, root: Path | None = None
) -> str:
    """Return the page with the problems of this delivery.

    `root`: its store, for commands. Without one it is the page for MLflow, with links.
    """
    problems = trouble(progress)
    links = page_links.links(progress) if root is None else ""
    if folder.description.exists():
        # Other text, such as a study's: the problems come at its end.
        first, _, rest = folder.description.read_text(encoding="utf-8").partition("\n\n")
        notes = _all_notes(facts, problems)
        parts = [first.rstrip() + links, rest.rstrip(), *notes]
        return "\n\n".join(filter(None, parts)) + "\n"
    end = facts.end
    if end is None:
        status: Any = read_summary(folder).status
        end = RunEnded(facts.last_time, status, f"at step {facts.steps_text}", None, {})
    return markdown(folder.identity.name, facts, end, problems, links, root)


def markdown(
    name: str,
    facts: Facts,
    end: RunEnded,
    problems: Sequence[str] = (),
    links: str = "",
    root: Path | None = None,
) -> str:
    """Return the report of the run `name`.

    `problems`: those of its delivery. `links`: to its pictures. `root`: its store, for commands.
    """
    again = [line.replace("```", "'''") for line in reproduce.commands(name, facts)]
    parts = [
        f"### {end.status}: {inline(end.reason)}",
        _lead(facts, end) + links,
        _results(facts, end),
        _error(end),
        _checkpoints(name, facts, end, root),
        *_all_notes(facts, problems),
        _origin(facts),
        "\n".join([f"{_GAP}### Reproduce\n", "```sh", *again, "```"]) if again else "",
        _setting(facts),
    ]
    # A part without content is empty. Then its heading is left out, too.
    return "\n\n".join(part for part in parts if part) + "\n"


def _lead(facts: Facts, end: RunEnded) -> str:
    """Return the line that MLflow shows above "Show more"."""
    parts = []
    if facts.best is not None:
        parts.append(f"`{facts.goal.metric}` **{_number(facts.best)}**")
    # The line has no room for explanations.
    parts += [
        f"{value} step{'s' * (value != '1')}" if title == "Steps" else value
        for title, value in (*_speed_rows(facts, end), *_progress_rows(facts))
        if title not in ("Waiting for data", "Limited by", "Slowest rank")
    ]
    return " · ".join(parts)


def _best_rows(facts: Facts, best: float) -> Iterator[tuple[str, str]]:
    goal = facts.goal
    value = f"**{_number(best)}** at step {facts.best_step:,}"
    yield f"Best `{goal.metric}` ({goal.mode})", value
    if goal.target is not None:
        verdict = "reached" if goal.reached(best) else "not reached"
        yield f"Target {_number(goal.target)}", f"**{verdict}**"
    # The best checkpoint has these values, too.
    for key, other in facts.best_metrics.items():
        if key != goal.metric:
            yield f"`{key}` at that step", _number(other)


def _results(facts: Facts, end: RunEnded) -> str:
    rows = [] if facts.best is None else [*_best_rows(facts, facts.best)]
    if facts.tested is not None:
        rows += [
            (f"`{key}` at step {facts.tested.step:,}", f"**{_number(value)}**")
            for key, value in facts.tested.metrics.items()
        ]
    rows += [*_progress_rows(facts), *_speed_rows(facts, end)]
    rows += [
        (title, f"{_number(facts.gpu_means[key])} {unit}")
        for key, title, unit in _GPU_ROWS
        if key in facts.gpu_means
    ]
    return table(("Result", ""), rows) if rows else ""


def _progress_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.steps:
        yield "Steps", facts.steps_text
    if facts.started is not None:
        again = f" in {facts.attempts} attempts" if facts.attempts > 1 else ""
        yield "Duration", duration(facts.duration) + again


def _speed_rows(facts: Facts, end: RunEnded) -> Iterator[tuple[str, str]]:
    # Without a summary, the newest speed: the run was killed, or it still trains.
    speed = number(end.metrics.get("samples_per_second")) or facts.metrics.get(SPEED)
    if speed:
        half = number(end.metrics.get("samples_per_second_half_width"))
        yield "Throughput", f"**{_number(speed)}**{f' ± {_number(half)}' if half else ''} samples/s"
    tokens, mfu = (number(end.metrics.get(key)) for key in ("tokens_per_second", "mfu"))
    if tokens:
        yield "Tokens", f"**{_number(tokens)}** tokens/s"
    if mfu:
        yield "Model FLOP/s utilisation", f"{mfu:.1%}"
    wait = number(end.metrics.get("data_wait_fraction"))
    if wait is not None:
        yield "Waiting for data", f"{wait:.1%} of the training time"
        yield "Limited by", limited_by(facts, wait)
    slowest = straggler(end.metrics)
    if slowest:
        yield "Slowest rank", slowest


def _error(end: RunEnded) -> str:
    if not end.error:
        return ""
    lines = end.error.rstrip().splitlines()
    cut = ["…"] if len(lines) > _ERROR_LINES else []
    # Else a text of the user would end the block.
    body = "\n".join([*cut, *lines[-_ERROR_LINES:]]).replace("```", "'''")
    return f"{_GAP}### Error\n\n```text\n{body}\n```"


def _checkpoints(name: str, facts: Facts, end: RunEnded, root: Path | None) -> str:
    if not facts.checkpoints:
        return ""
    saved = sorted(facts.checkpoints.items())
    listed = ", ".join(f"{step:,}{' (best)' if is_best else ''}" for step, is_best in saved)
    if provenance.OWN_LOOP in facts.environment:
        return (
            f"{_GAP}### Checkpoints\n\nSteps {listed}. The program continues from the latest if it "
            f"begins with these lines:\n\n```python\n{reproduce.resume_lines(name)}\n```"
        )
    # A finished run can only continue to a later end, but for one that its time limit ended.
    finished = end.status == "FINISHED" and not is_limited(facts)
    verb = "Continue" if finished else "Resume"
    longer = reproduce.longer(facts.params).split() if finished else []
    command = command_lines.line(root, "resume", name, *longer)
    return (
        f"{_GAP}### Checkpoints\n\nSteps {listed}. {verb} from the latest:\n\n```sh\n{command}\n```"
    )


def _all_notes(facts: Facts, problems: Sequence[str]) -> list[str]:
    parts = []
    for heading, lines in (
        ("Problems during the run", facts.notices),
        ("Delivery to MLflow", problems),
    ):
        shown = [f"- {inline(line).removeprefix('- ')}" for line in lines[:_MAX_NOTES]]
        more = [f"- and {len(lines) - _MAX_NOTES} more"] if len(lines) > _MAX_NOTES else []
        parts += [f"{_GAP}### {heading}\n\n" + "\n".join([*shown, *more])] if lines else []
    return parts


def _origin(facts: Facts) -> str:
    """Return the experiment's file, the code's version, the data and the machine."""
    known = facts.environment
    code = (known.get("mlflow.source.git.commit") or "")[:12]
    changed = _CHANGES.get(known.get("rankzero.dirty", ""), "")
    # Without a GPU there is no name, only the kind of the device.
    machine = known.get("rankzero.gpu") or known.get("rankzero.device") or ""
    # A run of `rankzero.track` has the version among its packages only.
    torch = known.get("rankzero.torch") or known.get("rankzero.package.torch")
    rows = [
        ("Tags", ", ".join(f"{key}={text}" for key, text in facts.tags.items())),
        ("Experiment", known.get("rankzero.experiment_file")),
        *((f"{context.capitalize()} data", data.text) for context, data in facts.data.items()),
        ("Parameters", _parameters(known)),
        ("Commit", code and f"{code}{changed}"),
        (
            "Processes",
            known.get("rankzero.world_size", "") and f"{known['rankzero.world_size']} on {machine}",
        ),
        ("Host", known.get("rankzero.host")),
        ("PyTorch", torch),
    ]
    found = [(title, inline(value)) for title, value in rows if value]
    return _GAP + "### What was run\n\n" + table(("Origin", ""), found) if found else ""


def _parameters(known: Mapping[str, str]) -> str:
    """Return the model's size: 1,234, of which 1,000 are trained (stem: 1,000, head: 234)."""
    total, trainable = (
        known.get(f"rankzero.{key}", "") for key in ("parameters", "parameters.trainable")
    )
    if not (total.isdecimal() and trainable.isdecimal()):
        return ""
    trained = f", of which {int(trainable):,} are trained" if trainable != total else ""
    return f"{int(total):,}{trained} ({known.get('rankzero.parameters.by_module', '')})"


def _setting(facts: Facts) -> str:
    params = facts.params
    # Keys without a dot are the experiment's own. Those of a command may be any.
    own = [key for key in params if "." not in key]
    words = (word for text, *_ in facts.every_command for word in reproduce.words(text))
    given = [word.partition("=")[0] for word in words]
    rows = [
        # Two backticks around nothing would be shown as they are.
        (f"`{key}`", f"`{inline(params[key]) or repr('')}`")
        for key in dict.fromkeys((*own, *_SETTINGS, *given))
        if key in params and (params[key] != "none" or key in given)
    ]
    return _GAP + "### Setting\n\n" + table(("Setting", "Value"), rows) if rows else ""


def _number(value: float | None) -> str:
    real = number(value)
    return "not a number" if real is None or real != real else shown(real)


def duration(seconds: float) -> str:
    """Return a duration as 12 s, 3 min 20 s or 2 h 05 min."""
    minutes, rest = divmod(max(0, round(seconds)) if math.isfinite(seconds) else 0, 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
