"""Hooks observe; one that fails is disabled and told."""

import pytest

from rankzero.events import Event, RunEnded
from rankzero.tracking.run_log import Emitter

EVENT = RunEnded(0.0, "FINISHED", "done", None, {})


def test_a_failing_hook_is_disabled_and_the_others_go_on() -> None:
    seen: list[Event] = []
    calls: list[Event] = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("of its own")

    emit = Emitter([broken, seen.append])
    emit(EVENT)
    emit(EVENT)
    assert seen == [EVENT, EVENT] and calls == [EVENT]
    assert emit.problems == ["the hook broken failed and was disabled: RuntimeError: of its own"]


def test_hooks_are_called_in_order_and_an_object_goes_by_its_class() -> None:
    seen: list[str] = []

    class Broken:
        def __call__(self, event: Event) -> None:
            seen.append("broken")
            raise OSError("disk full")

    emit = Emitter(
        [lambda _: seen.append("first"), Broken(), Broken(), lambda _: seen.append("last")]
    )
    emit(EVENT)
    emit(EVENT)
    assert seen == ["first", "broken", "broken", "last", "first", "last"]
    assert [problem.split(":")[0] for problem in emit.problems] == [
        "the hook Broken failed and was disabled"
    ] * 2


def test_an_interrupt_is_no_failure_of_a_hook() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    emit = Emitter([interrupted])
    with pytest.raises(KeyboardInterrupt):
        emit(EVENT)
    assert emit.problems == []
