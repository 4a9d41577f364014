"""From events to what MLflow is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from rankzero.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunEnded,
    RunStarted,
    StepsLogged,
    SystemSampled,
)
from rankzero.mlflow_store.items import MetricBatch, MetricPoint, MlflowItem, Tags
from rankzero.run_store.delivery_state import Curves, DeliveryState
from rankzero.tracking.translate import Before, ending, linked, steps_before, translate
from support.runs import T0, ended, evaluated, started, steps


def items(*events: Event) -> list[MlflowItem]:
    return translate(events, DeliveryState())[0]


def journal(*events: Event) -> Before:
    return lambda attempt: steps_before(attempt, events)


def points(found: Iterable[MlflowItem]) -> list[MetricPoint]:
    return [point for item in found if isinstance(item, MetricBatch) for point in item.points]


def test_columns_become_points() -> None:
    found = points(items(steps(1, 3)))
    assert found == [
        MetricPoint("train/loss", 1.0, int(T0 + 1) * 1000, 1),
        MetricPoint("train/loss", 0.5, int(T0 + 2) * 1000, 2),
        MetricPoint("train/loss", 1 / 3, int(T0 + 3) * 1000, 3),
    ]


def test_points_travel_in_full_batches_across_events() -> None:
    events = [steps(first, first + 99) for first in range(1, 2501, 100)]
    sizes = [len(item.points) for item in items(*events) if isinstance(item, MetricBatch)]
    assert sizes == [1000, 1000, 500]


def test_one_huge_event_is_cut_into_batches() -> None:
    sizes = [len(item.points) for item in items(steps(1, 5001)) if isinstance(item, MetricBatch)]
    assert sizes == [1000, 1000, 1000, 1000, 1000, 1]


def test_a_later_attempt_does_not_send_again_what_an_earlier_one_sent() -> None:
    sent, state = translate(earlier := [started(), steps(1, 10)], DeliveryState())
    later = [started(2, step=5), steps(6, 15, offset=7.0), steps(6, 15, key="new")]
    sent_later, state = translate(later, state, before=journal(*earlier, *later))
    first, second = points(sent), points(sent_later)
    assert [point.step for point in first] == list(range(1, 11))
    assert [point.step for point in second if point.key == "train/loss"] == list(range(11, 16))
    assert [point.step for point in second if point.key == "new"] == list(range(6, 16))
    assert state.curves.skipped == 5


def test_a_later_attempt_brings_only_the_tags_that_are_new() -> None:
    def starts(attempt: int, state: DeliveryState, **tags: str) -> tuple[Any, DeliveryState]:
        event = dataclasses.replace(started(attempt), environment=tags)
        (item,), after = translate([event], state)
        assert isinstance(item, RunStarted)
        return item.environment, after

    sent, state = starts(1, DeliveryState(), team="vision", stage="draft")
    assert sent == {"team": "vision", "stage": "draft"}
    sent, state = starts(2, state, team="vision", stage="final")
    assert sent == {"stage": "final"}
    assert starts(3, state, team="speech", stage="final")[0] == {"team": "speech"}
    _, state = starts(3, state)
    assert starts(4, state, team="vision")[0] == {}


def test_within_an_attempt_nothing_is_held_back() -> None:
    found, state = translate([started(), steps(5, 10), steps(1, 6)], DeliveryState())
    assert len(points(found)) == 12
    assert state.curves.skipped == 0


def test_both_attempts_in_one_chunk() -> None:
    events = [started(), steps(1, 4), started(2), steps(3, 6, offset=9.0)]
    found = points(translate(events, DeliveryState(), before=journal(*events))[0])
    assert [(point.step, point.value > 5) for point in found] == [
        (1, False),
        (2, False),
        (3, False),
        (4, False),
        (5, True),
        (6, True),
    ]


def test_a_later_attempt_sends_the_steps_that_no_earlier_one_has() -> None:
    """As if an evaluation is due more often, or episodes end at other steps."""
    first = [started(), *(evaluated(step, 0.5) for step in (1000, 2000, 3000, 4000))]
    later = [started(2), *(evaluated(step, 0.9) for step in (2500, 3000, 3500, 4500))]
    before = journal(*first, *later)
    _, state = translate(first, DeliveryState(), before=before)
    sent, state = translate(later, state, before=before)
    found = [one for one in points(sent) if one.key == "val/accuracy"]
    assert [one.step for one in found] == [2500, 3500, 4500]
    saved = CheckpointSaved(T0 + 99, 2500, "checkpoints/x", True, {"val/accuracy": 0.9})
    assert linked(saved, state.curves, "m-1", before=before) == [found[0]._replace(model_id="m-1")]
    sent, _ = translate([started(3), evaluated(3500, 0.1)], state, before=before)
    assert not points(sent)


def test_an_attempt_that_repeats_no_step_does_not_read_the_earlier_ones() -> None:
    events = [started(), evaluated(10, 0.5), started(2, step=10), evaluated(20, 0.6)]
    asked = list[int]()
    sent, state = translate(events, DeliveryState(), before=lambda at: asked.append(at) or {})
    saved = CheckpointSaved(T0 + 99, 20, "checkpoints/x", True, {"val/accuracy": 0.6})
    links = linked(saved, state.curves, "m-1", before=lambda at: asked.append(at) or {})
    assert [one._replace(model_id=None) for one in links] == points(sent)[2:3] and not asked


def test_the_checkpoint_of_a_negative_step_is_no_other_machines() -> None:
    saved = CheckpointSaved(T0, -1, "checkpoints/x", True, {})
    assert saved in translate([saved], DeliveryState())[1].queue.waiting


def test_infinity_becomes_nan_and_a_tag() -> None:
    found = items(StepsLogged([1, 2], [T0, T0], {"train/loss": [1.0, math.inf]}))
    assert math.isnan(points(found)[1].value)
    assert Tags({"rankzero.infinite": "train/loss from step 2"}) in found


def test_hostile_values_are_counted_and_the_rest_is_sent() -> None:
    metrics = {"ok": [1.0, 2.0], "text": ["x", 3.0], "missing": [None, 4.0], "short": [5.0]}
    event = StepsLogged([1, 2], [T0, T0], metrics)  # type: ignore[arg-type]
    sent, state = translate([event], DeliveryState())
    found = points(sent)
    assert {(point.key, point.step) for point in found} == {
        ("ok", 1),
        ("ok", 2),
        ("text", 2),
        ("missing", 2),
        ("short", 1),
    }
    assert state.problems.rejected == 1
    assert "metric text: not a number" in state.problems.reasons[0]


def test_illegal_steps_and_times_are_counted() -> None:
    no_time, no_step = (
        Evaluated(math.nan, 1, {"a": 1.0}, False),
        Evaluated(T0, 2**80, {"a": 1.0}, True),
    )
    sent, state = translate([no_time, no_step], DeliveryState())
    assert not points(sent)
    assert state.problems.rejected == 2


def test_malformed_events_are_counted_and_the_rest_is_sent() -> None:
    odd: Any = [
        StepsLogged(None, [], {"a": [1.0]}),
        StepsLogged("ab", [T0, T0], {"a": [1.0, 2.0]}),  # type: ignore[arg-type]
        Evaluated(T0, 1, None, True),
        SystemSampled(T0, "x", {"a": 1.0}),
        steps(1, 1),
    ]  # type: ignore[arg-type]
    sent, state = translate(odd, DeliveryState())
    assert len(points(sent)) == 1
    assert state.problems.rejected == 5


def test_the_best_goal_value_becomes_a_tag_once_a_chunk() -> None:
    found = items(started(), evaluated(1, 0.3), evaluated(2, 0.4), evaluated(3, 0.2, best=False))
    assert [item for item in found if isinstance(item, Tags)] == [Tags({"rankzero.best": "0.4"})]


def test_the_best_value_of_another_goal_is_forgotten() -> None:
    _, state = translate([started(), evaluated(1, 0.3)], DeliveryState())
    assert state.curves.best == 0.3
    _, same = translate([started(2, step=1)], state)
    _, other = translate([started(2, **{"goal.metric": "val/loss"})], state)
    assert (same.curves.best, other.curves.best) == (0.3, None)


def test_the_best_value_of_abandoned_weights_is_forgotten() -> None:
    _, state = translate([started(), evaluated(20, 0.5), evaluated(40, 0.95)], DeliveryState())
    _, back = translate([started(2, step=20)], state)
    found, after = translate([ended(metrics={"best": 0.5})], back)
    assert (back.curves.best, after.curves.best) == (None, 0.5)
    assert Tags({"rankzero.best": "0.5"}) in found


def test_samples_go_on_where_another_machine_stopped() -> None:
    state = DeliveryState(curves=Curves(sample_offset=7))
    event = SystemSampled(T0, 0, {"system/cpu_utilization_percentage": 50.0})
    found = points(translate([event], state)[0])
    assert [point.step for point in found] == [7]


def test_a_checkpoints_metrics_are_linked_as_the_points_of_its_evaluation() -> None:
    items_sent, state = translate([evaluated(10, 0.5)], DeliveryState())
    sent = points(items_sent)
    event = CheckpointSaved(
        T0 + 99, 10, "checkpoints/x", True, {"val/accuracy": 0.5, "val/loss": math.nan}
    )
    assert linked(event, state.curves, "m-1") == [sent[0]._replace(model_id="m-1")]


def test_a_checkpoint_of_a_step_trained_again_is_linked_to_the_value_that_mlflow_has() -> None:
    first = [started(), evaluated(10, 0.5), evaluated(20, 0.6)]
    sent, state = translate(first, DeliveryState())
    before = journal(*first)
    later = [started(2, step=5), evaluated(10, 0.9), evaluated(20, 0.6)]
    _, state = translate(later, state, before=before)
    curve = [point for point in points(sent) if point.key == "val/accuracy"]
    for step, value, links in ((10, 0.9, []), (20, 0.6, [curve[1]._replace(model_id="m-1")])):
        again = CheckpointSaved(T0 + 99, step, "checkpoints/x", True, {"val/accuracy": value})
        assert linked(again, state.curves, "m-1", lambda _: curve, before) == links


def test_a_checkpoint_that_waits_keeps_the_time_of_its_evaluation() -> None:
    saved = CheckpointSaved(T0 + 9, 5, "checkpoints/x", True, {"val/loss": 0.3})
    later = [evaluated(step, 0.5) for step in range(6, 1500)]
    _, state = translate([started(), evaluated(5, 0.7), saved, *later], DeliveryState())
    (point,) = linked(saved, state.curves, "m-1")
    assert point.milliseconds == (T0 + 5) * 1000 and len(state.curves.evaluated) == 1000


def test_the_end_sends_the_figures_that_have_no_curve() -> None:
    _, state = translate([started(), evaluated(10, 0.5)], DeliveryState())
    event = ended(
        metrics={
            "best": 0.9694444431198967,
            "samples_per_second": 1_234_567.0,
            "val/accuracy": 0.5,
            "val/new": 0.9694444431198967,
        },
        error="x" * 9000 + "ValueError: the end",
    )
    found, _ = ending(event, state)
    assert {point.key: point.value for point in points(found)} == {
        "whole_run/best": 0.969444,
        "whole_run/samples_per_second": 1_234_567.0,
        "val/new": 0.9694444431198967,
    }
    tags = next(item.tags for item in found if isinstance(item, Tags))
    assert tags["rankzero.error"].endswith("ValueError: the end")
    assert len(tags["rankzero.error"]) == 8000
    assert tags["rankzero.reason"] == "trained"
    assert isinstance(found[-1], RunEnded)


def test_the_figures_of_an_attempt_come_after_those_of_another_machine() -> None:
    key = "whole_run/best"
    there = Curves(marks={key: 1}, floor={key: 1}, attempt_offset=2)
    _, state = translate([started()], DeliveryState(curves=there))
    for _ in range(2):  # a replay sends the same point
        found, after = ending(ended(metrics={"best": 0.5}), state)
        assert [(one.step, one.value) for one in points(found)] == [(2, 0.5)]
    _, state = translate([started(2)], after)
    found, _ = ending(ended(metrics={"best": 0.6}), state)
    assert [(one.step, one.value) for one in points(found)] == [(3, 0.6)]


def test_a_journal_that_is_delivered_late_has_the_figures_of_each_attempt() -> None:
    """As in a copy, an import or a sync: at the steps that a delivery in time would give them."""
    first, second = ended("KILLED", metrics={"best": 0.5}), ended(metrics={"best": 0.6})
    events = [started(), steps(1, 3), first, started(2, 3), steps(4, 6), second]
    found, state = translate(events, DeliveryState())
    last, _ = ending(second, state)
    figures = [one for one in points([*found, *last]) if one.key == "whole_run/best"]
    assert [(one.step, one.value) for one in figures] == [(0, 0.5), (1, 0.6)]


def test_a_second_copy_sends_the_figures_of_the_new_attempt_alone() -> None:
    state = DeliveryState(curves=Curves(marks={"whole_run/best": 0}, floor={"whole_run/best": 0}))
    for attempt, sent in ((1, []), (2, [1])):
        _, state = translate([started(attempt)], state)
        found, state = ending(ended(metrics={"best": 0.5}), state)
        assert [one.step for one in points(found)] == sent


def test_the_end_of_a_killed_rank_has_the_best_value_of_the_evaluations() -> None:
    _, state = translate([started(), evaluated(10, 0.5)], DeliveryState())
    for _ in range(2):  # a replay sends the same point
        found, after = ending(ended("FAILED"), state)
        assert [(one.key, one.step, one.value) for one in points(found)] == [
            ("whole_run/best", 0, 0.5)
        ]
    _, state = translate([started(2)], after)
    found, _ = ending(ended(metrics={"best": 0.6}), state)
    assert [(one.step, one.value) for one in points(found)] == [(1, 0.6)]
    _, state = translate([started()], DeliveryState())
    assert not points(ending(ended("FAILED"), state)[0]), "nothing was evaluated"


def test_a_short_attempt_takes_back_the_interval_of_an_earlier_speed() -> None:
    speed, interval = "samples_per_second", "samples_per_second_half_width"
    _, state = translate([started()], DeliveryState())
    _, state = ending(ended("FAILED", metrics={speed: 9.0, interval: 1.0}), state)
    _, state = translate([started(2)], state)
    assert not points(ending(ended("FAILED"), state)[0]), "this attempt measured nothing"
    first, second = points(ending(ended(metrics={speed: 7.0}), state)[0])
    assert (first.key, first.value, first.step) == (f"whole_run/{speed}", 7.0, 1)
    assert (second.key, second.step) == (f"whole_run/{interval}", 1)
    assert math.isnan(second.value)


def test_the_end_sends_no_figure_twice_if_its_name_has_no_slash() -> None:
    curve = Evaluated(T0, 10, {"accuracy": 0.5, "best": 9.0}, best=True)
    _, state = translate([started(), curve], DeliveryState())
    found, _ = ending(ended(metrics={"accuracy": 0.5, "best": 0.5}), state)
    assert {point.key for point in points(found)} == {"whole_run/best"}, "the best of the goal"


def test_the_state_that_is_given_stays_as_it_is() -> None:
    events = [started(), evaluated(10, 0.5), steps(1, 3), ended()]
    _, before = translate(events, DeliveryState())
    as_text = repr(before)
    first, _ = translate([started(2), *events], before)
    assert repr(before) == as_text
    again, _ = translate([started(2), *events], before)
    assert first == again
