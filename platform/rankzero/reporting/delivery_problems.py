"""What went wrong on the way to MLflow, in words: for the end of a run, its page, and `rankzero doctor RUN`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankzero.run_store.delivery_state import DeliveryState, Retries

UNDELIVERED = "not everything is delivered"
"""How the line begins that says what the latest try failed with."""


def trouble(state: DeliveryState) -> list[str]:
    """Return a line for each kind of trouble that the delivery had; none where all went well."""
    return [
        *_retries(state.retries),
        *_listed(
            state.problems.rejected, "refused by MLflow, or no events", state.problems.reasons
        ),
        *_listed(state.problems.altered, "not in MLflow as they were", state.problems.remarks),
    ]


def _retries(retries: Retries) -> Iterator[str]:
    if retries.failures:
        made_up = "" if retries.error else "; all was delivered later"
        yield (
            f"{_count(retries.failures, 'try', 'tries')} to deliver failed, MLflow was away {retries.outages} times, "
            f"{retries.away_seconds:.0f} s in all{made_up}"
        )
    if retries.error:
        yield f"{UNDELIVERED}: {retries.error}"


def _listed(count: int, what: str, lines: Sequence[str]) -> Iterator[str]:
    if count:
        more = count - len(lines)
        yield f"{_count(count, 'thing', 'things')} {what}:"
        yield from (f"- {line}" for line in lines)
        if more > 0:
            yield f"- and {more:,} more"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
