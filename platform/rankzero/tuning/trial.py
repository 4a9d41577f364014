"""A trial as the study has it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

State = Literal["COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING"]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial of a study."""

    number: int
    state: State
    parameters: Mapping[str, Any]
    value: float | None
    constraints: Mapping[str, float]
    facts: Mapping[str, Any]
    """The search's attributes of it: run, seconds, quality, samples/s, why it ended."""
    abandoned: bool = False
    """Whether it was interrupted: it counts as if it had never been, and is tried again."""

    @property
    def feasible(self) -> bool:
        """Return whether the trial is complete and violates no constraint."""
        return self.state == "COMPLETE" and all(
            violation <= 0 for violation in self.constraints.values()
        )

    @property
    def rank(self) -> float:
        """Return its value to sort by: infinite for a trial without one."""
        return math.inf if self.value is None else self.value
