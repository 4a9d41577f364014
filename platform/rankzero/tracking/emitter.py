"""Hands events to hooks. A hook observes; one that fails is disabled, counted and shown, never silent."""

from __future__ import annotations

from collections.abc import Iterable

from rankzero.events import Event, Hook


class Emitter:
    """Calls every hook with every event, in order. A `Hook` itself; never raises."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self._hooks = list(hooks)
        self.problems: list[str] = []

    def __call__(self, event: Event) -> None:
        for hook in tuple(self._hooks):
            try:
                hook(event)
            except Exception as error:  # telemetry cannot kill a run
                self._hooks.remove(hook)
                name = getattr(hook, "__name__", type(hook).__name__)
                self.problems.append(f"the hook {name} failed and was disabled: {type(error).__name__}: {error}")
