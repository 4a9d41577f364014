"""From events to what MLflow is sent. Pure: no file, no clock, no network, no argument changes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rankzero import scalars
from rankzero.events import (
    ArtifactLogged,
    CheckpointDeleted,
    CheckpointSaved,
    DataDescribed,
    Evaluated,
    Event,
    ModelLogged,
    ParamsLogged,
    PicturesTaken,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
    TagsSet,
)
from rankzero.metric_names import WHOLE_RUN
from rankzero.mlflow_store import limits
from rankzero.mlflow_store.items import (
    RETRIES,
    MetricBatch,
    MetricPoint,
    MlflowItem,
    Tags,
)
from rankzero.run_store.delivery_state import Curves, DeliveryState, Task, UploadEvent
from rankzero.run_store.provenance import tags_for_mlflow, tags_of_user

Row = tuple[str, object, object, object]  # key, step, time, value, as the journal has them
Steps = Mapping[tuple[str, int], int]
"""A metric and a page of steps -> a bit for each step that has a value."""
Before = Callable[[int], Steps]
"""Returns the steps that the attempts before this number have."""

_STEPS_REMEMBERED = 1000
_PAGE = 2048  # A million steps in a row take 0.2 MB. A step alone in its page takes 0.4 KB.
_SPEED, _INTERVAL = "samples_per_second", "samples_per_second_half_width"


def translate(
    events: Iterable[Event],
    state: DeliveryState,
    batch_size: int = limits.METRICS_PER_BATCH,
    before: Before = lambda _: {},
) -> tuple[list[MlflowItem], DeliveryState]:
    """Return what to send for the events, in order, and the state once all of it is sent.

    The end of the run and uploads go to the state's queue instead: they come after the points.
    Calls `before` only for a step that is not above those of the metric's earlier attempts.
    """
    draft = _Draft(state, before)
    items: list[MlflowItem] = []
    points: list[MetricPoint] = []
    for event in events:
        if isinstance(event, RunStarted):
            # A journal that is delivered later has several ends. Each attempt has its figures.
            points += draft.unsent_summary()
            items += _batches(points, batch_size)
            points = []
            items.append(draft.start_attempt(event))
        elif isinstance(event, DataDescribed):
            items.append(event)
        elif isinstance(event, ParamsLogged):
            draft.remark_texts(event.params, {})
            items.append(event)
        elif isinstance(event, TagsSet):
            draft.remark_texts({}, event.tags)
            items.append(Tags(dict(event.tags)))
        else:
            points += draft.points(event)
    items += _batches(points, batch_size)
    after = draft.state()
    tags = _curve_tags(after.curves)
    return [*items, *([Tags(tags)] if tags != _curve_tags(state.curves) else [])], after


def ending(event: RunEnded, state: DeliveryState) -> tuple[list[MlflowItem], DeliveryState]:
    """Return what closes the run, and the state once it is sent but for the end itself.

    The items are the final numbers, the reason, and the status.
    """
    draft = _Draft(state)
    points = draft.keep(list(draft.summary_rows(event)))
    tags = {"rankzero.reason": event.reason}
    if event.error:
        tags["rankzero.error"] = limits.tail(event.error, limits.TAG_LENGTH)
    after = draft.state()
    return [*_batches(points), Tags(tags | problem_tags(after)), event], after


def problem_tags(state: DeliveryState) -> dict[str, str]:
    """Return the tags that list what MLflow does not have, or not as it was."""
    problems, tags = state.problems, {}
    if problems.rejected:
        tags["rankzero.rejected"] = "; ".join(
            [f"{problems.rejected} things set aside", *problems.reasons]
        )
    if problems.altered:
        tags["rankzero.altered"] = "; ".join(
            [f"{problems.altered} things changed", *problems.remarks]
        )
    if state.retries.failures:
        tags[RETRIES] = str(state.retries.failures)
    return tags


def steps_before(attempt: int, events: Iterable[Event]) -> Steps:
    """Return the steps at which a journal has values of the attempts before this number."""
    found = defaultdict[tuple[str, int], int](int)
    for event in events:
        if isinstance(event, RunStarted) and event.attempt >= attempt:
            break
        # `points` counts a malformed event.
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            for key, raw_step, _, value in _rows_of(event):
                step = scalars.step(raw_step)
                if step is not None and scalars.number(value) is not None:
                    found[str(key), step // _PAGE] |= 1 << step % _PAGE
    return dict(found)


def linked(
    event: CheckpointSaved,
    curves: Curves,
    model_id: str,
    history: Callable[[str], Iterable[MetricPoint]] = lambda _: (),
    before: Before = lambda _: {},
) -> list[MetricPoint]:
    """Return the checkpoint's metrics linked to its model.

    They are the points of its evaluation once more, so MLflow adds no second ones. `history`:
    MLflow's points of a metric, among which those of an earlier attempt are.
    """
    at = curves.evaluated.get(str(event.step), scalars.milliseconds(event.time) or 0)
    points = list[MetricPoint]()
    for key, raw in event.metrics.items():
        name, value = metric_name(key, curves), scalars.number(raw)
        # MLflow stores no NaN for a model's metric: it would show 0.
        if value is None or value != value:
            continue
        new = MetricPoint(name, value, at, event.step, model_id)
        if not _has_earlier(curves, name, key, event.step, before):
            points.append(new)
            continue
        # An earlier attempt sent this step, perhaps with another value: that one stays.
        sent = (one._replace(model_id=model_id) for one in history(name))
        points += [one for one in sent if (one.step, one.value) == (event.step, value)][:1]
    return points


def _has_earlier(curves: Curves, name: str, key: str, step: int, before: Before) -> bool:
    """Return whether MLflow has another value of the step, as far as this journal and it say."""
    if step <= curves.floor.get(name, step - 1):
        return True
    if step > curves.marks.get(name, step - 1):
        return step <= curves.replayed.get(name, step - 1)
    if step > curves.earlier.get(name, step - 1):
        return False
    steps = before(curves.attempt).get((key, step // _PAGE), 0)
    return bool(steps >> step % _PAGE & 1)


def metric_name(key: str, curves: Curves) -> str:
    """Return the metric's name in MLflow: its own, unless that is illegal or another metric's."""
    name = limits.name(key)
    return name if curves.owners.get(name, key) == key else limits.unique_name(key)


def is_others(event: object, curves: Curves) -> bool:
    """Return whether MLflow has another machine's checkpoint in the place of the event's."""
    return (
        isinstance(event, CheckpointSaved | CheckpointDeleted)
        and curves.other_step != -1
        and event.step <= curves.other_step
    )


class _Draft:
    """The state while one chunk of events is translated, with dictionaries of its own."""

    def __init__(self, state: DeliveryState, before: Before = lambda _: {}) -> None:
        curves, self._steps_before = state.curves, before
        self._before, self._problems = state, state.problems
        self._waiting, self._ending = list(state.queue.waiting), state.queue.ending
        self._ended, self._user_tags = state.queue.ended, state.user_tags
        self._marks, self._infinite = dict(curves.marks), dict(curves.infinite)
        self._evaluated, self._owners = dict(curves.evaluated), dict(curves.owners)
        self._curves = dataclasses.replace(
            curves,
            marks=self._marks,
            infinite=self._infinite,
            evaluated=self._evaluated,
            owners=self._owners,
        )
        # Resolving a name costs a regular expression, and a chunk has tens of thousands of points.
        self._names = {key: name for name, key in curves.owners.items()}

    def state(self) -> DeliveryState:
        """Return the state after what was translated so far."""
        # No command waits for the page's update, so it comes last and holds up nothing.
        order = sorted(self._waiting, key=lambda upload: upload is Task.PAGE_UPDATE)
        queue = dataclasses.replace(
            self._before.queue, waiting=tuple(order), ending=self._ending, ended=self._ended
        )
        return dataclasses.replace(
            self._before,
            curves=self._curves,
            queue=queue,
            problems=self._problems,
            user_tags=self._user_tags,
        )

    def start_attempt(self, event: RunStarted) -> RunStarted:
        """Note the new attempt. Return it without the tags that the one before it had, too.

        Somebody may have changed them in MLflow since.
        """
        # A replay of the same attempt after a crash must not skip the points it sends again.
        if event.attempt > self._curves.attempt:
            self._change(attempt=event.attempt, earlier=dict(self._marks))
        if event.time > self._curves.other_began:
            self._change(other_step=-1)
        goal, known = event.params.get("goal.metric"), self._curves
        # Another goal's best value is none of this one's, nor is that of abandoned weights.
        is_lost = event.abandons(known.best_step) or (known.goal and goal not in (None, known.goal))
        self._change(goal=goal, best=None if is_lost else known.best)
        self._ending, self._ended = None, False
        self._upload_artifacts()
        self.remark_texts(event.params, tags_for_mlflow(event.environment))
        before = self._user_tags
        # An attempt that names no tags, such as a resume, takes none back.
        self._user_tags = {**before, **tags_of_user(event.environment)}
        new = {key: tag for key, tag in event.environment.items() if before.get(key) != tag}
        return dataclasses.replace(event, environment=new)

    def remark_texts(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Note which params and tags MLflow will not have whole, or under other names."""
        for key, name in limits.names(params).items():
            if name != key:
                self._remark(f"param {key!r}", f"is called {name!r} in MLflow")
        for kind, texts, length in (
            ("param", params, limits.PARAM_LENGTH),
            ("tag", tags, limits.TAG_LENGTH),
        ):
            for key, text in texts.items():
                lost = limits.loss(text, length)
                if lost is not None:
                    self._remark(f"{kind} {key!r}", f"{lost}; events.jsonl has it whole")

    def points(self, event: Event) -> list[MetricPoint]:
        """Queue the event's upload, or return its points. A malformed event is counted instead."""
        try:
            match event:
                case CheckpointSaved() | CheckpointDeleted() | PicturesTaken() | ModelLogged():
                    self._queue_upload(event)
                case ArtifactLogged():
                    self._upload_artifacts()
                case RunEnded():
                    self._ending = event
                    best = event.metrics.get("best", self._curves.best)
                    self._change(best=scalars.number(best))
                    self._waiting.append(Task.ARTIFACTS)
                case StepsLogged():
                    return self.keep(_column_rows(event))
                case Evaluated():
                    return self._evaluation(event)
                case SystemSampled():
                    sample = event.sample + self._curves.sample_offset
                    return self.keep(_rows(event.metrics, sample, event.time))
                case _:
                    pass
        except (TypeError, ValueError, AttributeError) as error:
            self._reject(type(event).__name__, f"malformed: {error!r}")
        return []

    def keep(self, rows: Iterable[Row]) -> list[MetricPoint]:
        """Return the rows as legal points, without those that an earlier attempt has sent.

        Rows that are no number at a step and a time are counted.
        """
        points, skipped = [], 0
        for raw_key, raw_step, time, raw_value in rows:
            key, step = self._name(str(raw_key)), scalars.step(raw_step)
            milliseconds, value = scalars.milliseconds(time), scalars.number(raw_value)
            if step is None or milliseconds is None or value is None:
                what = f"not a number at a step and a time: {raw_value!r} at {raw_step!r}"
                self._reject(f"metric {key}", what)
                continue
            is_repeated = _has_earlier(self._curves, key, str(raw_key), step, self._steps_before)
            self._marks[key] = max(step, self._marks.get(key, step))
            if is_repeated:
                skipped += 1
                continue
            if scalars.is_infinite(raw_value) and key not in self._infinite:
                self._infinite[key] = step
                self._remark(
                    f"metric {key}", f"infinite from step {step}, which MLflow shows as NaN"
                )
            points.append(MetricPoint(key, value, milliseconds, step))
        self._change(skipped=self._curves.skipped + skipped)
        return points

    def unsent_summary(self) -> list[MetricPoint]:
        """Return the figures of the attempt before, if its end was not sent yet."""
        return [] if self._ending is None else self.keep(list(self.summary_rows(self._ending)))

    def summary_rows(self, event: RunEnded) -> Iterator[Row]:
        """Yield ``whole_run/<name>``, which MLflow's page shows below the curves.

        A metric that has a curve needs no second last point.
        """
        # MLflow shows a single point at step 0 as a bar, which compares runs, and a later attempt's
        # point follows it.
        step = max(0, self._curves.attempt - 1 + self._curves.attempt_offset)
        # A killed rank 0 wrote no metrics, and the evaluations have the best value.
        known = {} if self._curves.best is None else {"best": self._curves.best}
        for key, value in {**known, **event.metrics}.items():
            if key != "best" and self._names.get(key) in self._marks:
                continue
            if "/" not in key:
                yield f"{WHOLE_RUN}/{key}", step, event.time, _rounded(value)
            elif self._name(key) not in self._marks:
                yield key, 0, event.time, value
        # A short attempt has no interval. That of an earlier one does not fit its speed.
        stale = f"{WHOLE_RUN}/{_INTERVAL}"
        is_short = _SPEED in event.metrics and _INTERVAL not in event.metrics
        if is_short and stale in self._marks:
            yield stale, step, event.time, math.nan

    def _evaluation(self, event: Evaluated) -> list[MetricPoint]:
        milliseconds = scalars.milliseconds(event.time)
        if milliseconds is not None:
            # The first one counts: its points are those that MLflow keeps after a resume.
            self._evaluated.setdefault(str(event.step), milliseconds)
            if (excess := len(self._evaluated) - _STEPS_REMEMBERED) > 0:
                saved = (one for one in self._waiting if isinstance(one, CheckpointSaved))
                needed = {str(one.step) for one in saved}  # by `linked`
                for old in [one for one in self._evaluated if one not in needed][:excess]:
                    del self._evaluated[old]
        goal = self._curves.goal
        if event.best and goal is not None:
            best = scalars.number(event.metrics.get(goal))
            self._change(best=best, best_step=event.step)
        return self.keep(_rows(event.metrics, event.step, event.time))

    def _queue_upload(self, event: UploadEvent) -> None:
        if is_others(event, self._curves):
            return
        if isinstance(event, CheckpointSaved):
            # `linked` looks these names up later, so they get their owners here.
            for key in event.metrics:
                self._name(key)
        self._waiting.append(event)

    def _upload_artifacts(self) -> None:
        if Task.ARTIFACTS not in self._waiting:
            self._waiting.append(Task.ARTIFACTS)

    def _name(self, key: str) -> str:
        """Return the metric's name in MLflow, and keep it for this metric. Remark a changed one."""
        if key not in self._names:
            name = metric_name(key, self._curves)
            if name not in self._owners:
                self._owners[name] = key
                if name != key:
                    self._remark(f"metric {key!r}", f"is called {name!r} in MLflow")
            self._names[key] = name
        return self._names[key]

    def _change(self, **changes: Any) -> None:
        self._curves = dataclasses.replace(self._curves, **changes)

    def _reject(self, what: str, reason: str) -> None:
        self._problems = self._problems.reject(what, reason)

    def _remark(self, what: str, became: str) -> None:
        self._problems = self._problems.remark(what, became)


def _rounded(value: object) -> object:
    """Return six digits of a number that is not whole: MLflow's table shows all that it has."""
    real = scalars.number(value)
    if real is None or not math.isfinite(real) or real.is_integer():
        return value
    return float(f"{real:.6g}")


def _curve_tags(curves: Curves) -> dict[str, str]:
    """Return the tags for what the points cannot show."""
    tags = {}
    if curves.best is not None:
        tags["rankzero.best"] = repr(curves.best)
    if curves.infinite:
        first = (f"{key} from step {step}" for key, step in curves.infinite.items())
        tags["rankzero.infinite"] = limits.head(", ".join(first), limits.TAG_LENGTH)
    return tags


def _batches(
    points: list[MetricPoint], size: int = limits.METRICS_PER_BATCH
) -> Iterator[MetricBatch]:
    return (MetricBatch(points[start : start + size]) for start in range(0, len(points), size))


def _rows(metrics: Mapping[str, object], step: object, time: object) -> Iterator[Row]:
    return ((key, step, time, value) for key, value in metrics.items())


def _rows_of(event: Event) -> Iterator[Row]:
    if isinstance(event, StepsLogged):
        yield from _column_rows(event)
    elif isinstance(event, Evaluated):
        yield from _rows(event.metrics, event.step, event.time)


def _column_rows(event: StepsLogged) -> Iterator[Row]:
    for key, values in event.metrics.items():
        for step, time, value in zip(event.steps, event.times, values, strict=False):
            if value is not None:  # not reported at that step
                yield key, step, time, value
