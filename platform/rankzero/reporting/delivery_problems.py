"""What went wrong on the way to MLflow, in words: for the end of a run, its page, and `rankzero doctor RUN`. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rankzero.run_store.delivery_state import DeliveryState

UNDELIVERED = "not everything is delivered"
"""How the line begins that says what the latest try failed with."""


def trouble(progress: DeliveryState) -> list[str]:
    """Return a line for each kind of trouble that the delivery had; none where all went well."""
    return [
        *_retries(progress),
        *_listed(progress.rejected, "refused by MLflow, or no events", progress.reasons),
        *_listed(progress.altered, "not in MLflow as they were", progress.remarks),
    ]


def _retries(progress: DeliveryState) -> Iterator[str]:
    if progress.failures:
        made_up = "" if progress.error else "; all was delivered later"
        yield (
            f"{_count(progress.failures, 'try', 'tries')} to deliver failed, MLflow was away {progress.outages} times, "
            f"{progress.away_seconds:.0f} s in all{made_up}"
        )
    if progress.error:
        yield f"{UNDELIVERED}: {progress.error}"


def _listed(count: int, what: str, lines: list[str]) -> Iterator[str]:
    if count:
        more = count - len(lines)
        yield f"{_count(count, 'thing', 'things')} {what}:"
        yield from (f"- {line}" for line in lines)
        if more > 0:
            yield f"- and {more:,} more"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
