"""Hooks observe; one that fails is disabled and told."""

from rankzero.events import Event, RunEnded
from rankzero.tracking.emitter import Emitter

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
