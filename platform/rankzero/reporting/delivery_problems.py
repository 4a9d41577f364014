"""The problems of a delivery as text: for a run's end, its page and ``rankzero doctor RUN``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankzero.run_store.delivery_state import DeliveryState, Retries

UNDELIVERED = "not everything is delivered"
"""The beginning of the line with the latest error."""


def trouble(state: DeliveryState) -> list[str]:
    """Return the lines of each kind of problem that the delivery had."""
    problems = state.problems
    return [
        *_retries(state.retries),
        *_listed(problems.rejected, "refused by MLflow, or no events", problems.reasons),
        *_listed(problems.altered, "not in MLflow as they were", problems.remarks),
    ]


def _retries(retries: Retries) -> Iterator[str]:
    if retries.failures:
        made_up = "" if retries.error else "; all was delivered later"
        yield (
            f"{_count(retries.failures, 'try', 'tries')} to deliver failed, MLflow was away "
            f"{retries.outages} times, {retries.away_seconds:.0f} s in all{made_up}"
        )
    if retries.error:
        yield f"{UNDELIVERED}: {retries.error}"


def _listed(count: int, what: str, lines: Sequence[str]) -> Iterator[str]:
    if count:
        yield f"{_count(count, 'thing', 'things')} {what}:"
        yield from (f"- {line}" for line in lines)
        # Only some of the lines are stored.
        if count > len(lines):
            yield f"- and {count - len(lines):,} more"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
