"""A trial as the study has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

State = Literal["COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial as the study has it."""

    number: int
    state: State
    parameters: Mapping[str, Any]
    value: float | None
    constraints: Mapping[str, float]
    facts: Mapping[str, Any]
    """What the search noted about it: its run, seconds, quality, samples/s, how it ended."""

    @property
    def feasible(self) -> bool:
        return self.state == "COMPLETE" and all(
            violation <= 0 for violation in self.constraints.values()
        )
