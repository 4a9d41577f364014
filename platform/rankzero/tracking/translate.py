"""From events to what MLflow is told: points, checkpoints, beginnings and ends. Pure: no file, no clock, no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rankzero import scalars
from rankzero.events import (
    CheckpointDeleted,
    CheckpointSaved,
    DataDescribed,
    Evaluated,
    Event,
    PicturesTaken,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
    encode,
)
from rankzero.metric_names import WHOLE_RUN
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.items import (
    DESCRIPTION,
    RETRIES,
    MetricBatch,
    MetricPoint,
    MlflowItem,
    RunEnd,
    Tags,
)
from rankzero.run_store.delivery_state import ARTIFACTS, DeliveryState

Row = tuple[str, object, object, object]  # key, step, time, value, as the journal has them


def translate(events: Iterable[Event], progress: DeliveryState) -> Iterator[MlflowItem]:
    """Yield what MLflow is to be told, in order, in few large batches.

    Uploads and the end of the run go to `progress.waiting` and `progress.ending` instead: they
    come after the points. `progress` is brought to where it is once all items are delivered.
    """
    before = (progress.best, len(progress.infinite))
    batch: list[MetricPoint] = []
    for event in events:
        if isinstance(event, RunStarted):
            yield from _batches(batch)
            batch = []
            yield _start(event, progress)
        elif isinstance(event, DataDescribed):
            yield event
        else:
            batch += _points_or_none(event, progress)
        while len(batch) >= limits.METRICS_PER_BATCH:
            yield MetricBatch(batch[: limits.METRICS_PER_BATCH])
            batch = batch[limits.METRICS_PER_BATCH :]
    yield from _batches(batch)
    if (progress.best, len(progress.infinite)) != before:
        yield Tags(tags_of(progress))


def tags_of(progress: DeliveryState) -> dict[str, str]:
    """Return the tags that say what the points cannot."""
    tags = {}
    if progress.best is not None:
        tags["rankzero.best"] = repr(progress.best)
    if progress.infinite:
        words = (f"{key} from step {step}" for key, step in progress.infinite.items())
        tags["rankzero.infinite"] = limits.head(", ".join(words), limits.TAG_LENGTH)
    return tags


def linked(event: CheckpointSaved, progress: DeliveryState, model_id: str) -> list[MetricPoint]:
    """Return the checkpoint's metrics linked to its model: the same points as its evaluation's, so no second ones."""
    at = progress.evaluated.get(str(event.step), scalars.milliseconds(event.time) or 0)
    found = []
    for key, raw in event.metrics.items():
        value = scalars.number(raw)
        if (
            value is not None and value == value
        ):  # a model's metric has no way to say NaN: it would read 0
            found.append(MetricPoint(named(key, progress), value, at, event.step, model_id))
    return found


def ending(event: RunEnded, description: str, progress: DeliveryState) -> list[MlflowItem]:
    """Return what closes the run: its final numbers, then why it ended and its description, then its status."""
    tags = {"rankzero.reason": event.reason, DESCRIPTION: description}
    if event.error:
        tags["rankzero.error"] = limits.tail(event.error, limits.TAG_LENGTH)
    tags |= trouble_of(progress)
    points = _keep(_summary_rows(event, progress), progress)
    return [*_batches(points), Tags(tags), RunEnd(event)]


def trouble_of(progress: DeliveryState) -> dict[str, str]:
    """Return the tags that say what MLflow does not have, or not as it was; in full in `delivery.json`."""
    tags = {}
    if progress.rejected:
        tags["rankzero.rejected"] = "; ".join(
            [f"{progress.rejected} things set aside", *progress.reasons]
        )
    if progress.altered:
        tags["rankzero.altered"] = "; ".join(
            [f"{progress.altered} things changed", *progress.remarks]
        )
    if progress.failures:
        tags[RETRIES] = str(progress.failures)
    return tags


def _summary_rows(event: RunEnded, progress: DeliveryState) -> Iterator[Row]:
    """Yield ``whole_run/<name>``, which MLflow's page shows below the curves.

    Metrics that have curves of their own need no second last point. The step is the attempt's: the page shows the
    single point of a first step as a bar, comparable between runs, and a later attempt's point follows it.
    """
    for key, value in event.metrics.items():
        if "/" not in key:
            yield f"{WHOLE_RUN}/{key}", max(0, progress.attempt - 1), event.time, value
        elif named(key, progress) not in progress.marks:
            yield key, 0, event.time, value


def _start(event: RunStarted, progress: DeliveryState) -> RunStarted:
    if event.attempt > progress.attempt:
        progress.floor = dict(progress.marks)
        progress.attempt = event.attempt
    progress.goal = event.params.get("goal.metric")
    progress.ending, progress.ended = None, False
    if ARTIFACTS not in progress.waiting:
        progress.waiting.append(ARTIFACTS)
    _remark_on_params(event, progress)
    return event


def _remark_on_params(event: RunStarted, progress: DeliveryState) -> None:
    """Say of which params and tags MLflow will not have all; the journal has."""
    for key, name in limits.names(event.params).items():
        if name != key:
            progress.remark(f"param {key!r}", f"is called {name!r} in MLflow")
    for kind, texts, length in (
        ("param", event.params, limits.PARAM_LENGTH),
        ("tag", event.environment, limits.TAG_LENGTH),
    ):
        for key, text in texts.items():
            lost = limits.lost(text, length)
            if lost is not None:
                progress.remark(f"{kind} {key!r}", f"{lost}; events.jsonl has it whole")


def named(key: str, progress: DeliveryState) -> str:
    """Return what a metric is called in MLflow: its own name, unless that is illegal or another's; told once."""
    owners = progress.owners
    name = limits.name(key)
    if owners.get(name, key) != key:
        name = limits.apart(key)
    if name not in owners:
        owners[name] = key
        if name != key:
            progress.remark(f"metric {key!r}", f"is called {name!r} in MLflow")
    return name


def _points_or_none(event: Event, progress: DeliveryState) -> list[MetricPoint]:
    """Return the event's points; of an event that is not what its type says, none, counted."""
    try:
        _queue(event, progress)
        return _points(event, progress)
    except (TypeError, ValueError, AttributeError) as error:
        progress.reject(type(event).__name__, f"malformed: {error!r}")
        return []


def _points(event: Event, progress: DeliveryState) -> list[MetricPoint]:
    match event:
        case StepsLogged():
            return _keep(_column_rows(event), progress)
        case Evaluated():
            return _evaluation(event, progress)
        case SystemSampled():
            number = event.sample + progress.sample_offset
            return _keep(_rows(event.metrics, number, event.time), progress)
        case _:
            return []


def _evaluation(event: Evaluated, progress: DeliveryState) -> list[MetricPoint]:
    milliseconds = scalars.milliseconds(event.time)
    if milliseconds is not None:
        progress.remember_evaluation(event.step, milliseconds)
    if event.best and progress.goal is not None:
        progress.best = scalars.number(event.metrics.get(progress.goal))
    return _keep(_rows(event.metrics, event.step, event.time), progress)


def _queue(event: Event, progress: DeliveryState) -> None:
    match event:
        case CheckpointSaved() | CheckpointDeleted() | PicturesTaken():
            progress.waiting.append(encode(event))
        case RunEnded():
            progress.ending = encode(event)
            progress.waiting.append(ARTIFACTS)
        case _:
            pass


def _rows(metrics: Mapping[str, object], step: object, time: object) -> Iterator[Row]:
    return ((key, step, time, value) for key, value in metrics.items())


def _column_rows(event: StepsLogged) -> Iterator[Row]:
    for key, values in event.metrics.items():
        for step, time, value in zip(event.steps, event.times, values, strict=False):
            if value is not None:  # not reported at that step
                yield key, step, time, value


def _keep(rows: Iterable[Row], progress: DeliveryState) -> list[MetricPoint]:
    """Return the rows as legal points, less those that MLflow has from an earlier attempt; count what is dropped."""
    kept = []
    for raw_key, raw_step, time, raw_value in rows:
        key, step = named(str(raw_key), progress), scalars.step(raw_step)
        milliseconds, value = scalars.milliseconds(time), scalars.number(raw_value)
        if step is None or milliseconds is None or value is None:
            progress.reject(
                f"metric {key}", f"not a number at a step and a time: {raw_value!r} at {raw_step!r}"
            )
            continue
        if step <= progress.floor.get(key, step - 1):
            progress.skipped += 1
            continue
        if scalars.is_infinite(raw_value) and key not in progress.infinite:
            progress.infinite[key] = step
            progress.remark(
                f"metric {key}", f"infinite from step {step}, which MLflow shows as NaN"
            )
        progress.marks[key] = max(step, progress.marks.get(key, step))
        kept.append(MetricPoint(key, value, milliseconds, step))
    return kept


def _batches(points: list[MetricPoint]) -> Iterator[MetricBatch]:
    if points:
        yield MetricBatch(points)
