"""The problems of a delivery as text: for a run's end, its page and ``rankzero doctor RUN``."""

from __future__ import annotations

from rankzero.run_store.delivery_state import DeliveryState

# The beginning of the line with the latest error. The end of a command replaces that line.
UNDELIVERED = "not everything is delivered"


def trouble(state: DeliveryState) -> list[str]:
    """Return the lines of each kind of problem that the delivery had."""
    retries, problems, found = state.retries, state.problems, list[str]()
    if retries.failures:
        made_up = "" if retries.error else "; all was delivered later"
        tries = f"{retries.failures:,} {'try' if retries.failures == 1 else 'tries'}"
        times = "once" if retries.outages == 1 else f"{retries.outages} times"
        away = f", MLflow was away {times}, {retries.away_seconds:.0f} s in all"
        found.append(f"{tries} to deliver failed{away if retries.outages else ''}{made_up}")
    if retries.error:
        found.append(f"{UNDELIVERED}: {retries.error}")
    for count, what, lines in (
        (problems.rejected, "refused by MLflow, or no events", problems.reasons),
        (problems.altered, "not in MLflow as logged", problems.remarks),
    ):
        if count:
            things = f"{count:,} thing{'s' * (count != 1)}"
            # The state keeps only some of the lines.
            left_out = [f"- and {count - len(lines):,} more"] if count > len(lines) else []
            found += [f"{things} {what}:", *(f"- {line}" for line in lines), *left_out]
    return found
