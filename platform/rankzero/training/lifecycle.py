"""What an attempt tells of itself: that it began, and, however it is left, how it ended and whose fault that was."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

from rankzero import config
from rankzero.events import DataDescribed, RunEnded, RunStarted, Status
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.redaction.text import settings_without_secrets
from rankzero.tracking.run_log import RunLog
from rankzero.training.distributed import device
from rankzero.training.distributed.world import World, is_lost_connection
from rankzero.training.metrics.throughput import RunTotals


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended."""

    status: Status
    reason: str


class RunLifecycle:
    """Sees to it that a run's beginning and end are each told once."""

    def __init__(
        self, log: RunLog, params: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        self._log, self._params, self._environment = log, params, environment
        self._begun = False
        self.outcome = AttemptOutcome("FAILED", "ended without saying why")

    def started(
        self, step: int = 0, total_steps: int | None = None, data: Sequence[DataDescribed] = ()
    ) -> None:
        if not self._begun:
            self._begun = True
            tags = {
                **self._environment,
                **{f"rankzero.data.{one.context}": one.digest for one in data},
            }
            self._log(
                RunStarted(time.time(), self._params, tags, self._log.attempt, step, total_steps)
            )
            for one in data:
                self._log(one)

    def ended(self, error: str | None, summary: Mapping[str, float]) -> None:
        self.started()
        self._log(RunEnded(time.time(), self.outcome.status, self.outcome.reason, error, summary))


@contextlib.contextmanager
def told(
    log: RunLog,
    experiment: Experiment,
    environment: Mapping[str, str],
    world: World,
    tally: RunTotals,
) -> Iterator[RunLifecycle]:
    """Tell the run's end however the block is left: return, exception, Ctrl-C, SystemExit."""
    telling = RunLifecycle(
        log, _params(experiment, world), {**environment, **device.describe(world)}
    )
    error: str | None = None
    try:
        yield telling
    except BaseException as raised:
        cause = _root_cause(raised, world)
        error = cause.error
        telling.outcome = AttemptOutcome(
            "KILLED" if isinstance(raised, KeyboardInterrupt) else "FAILED", cause.reason
        )
        raise
    finally:
        telling.ended(
            error, {**tally.summary(), "peak_memory_megabytes": device.peak_memory_megabytes(world)}
        )
        log.close()


def _root_cause(error: BaseException, world: World) -> failures.Failure:
    """Return what failed first: a rank whose peers are gone only sees a broken connection."""
    mine = failures.describe(error, world.ranks.rank)
    if not world.is_distributed:
        return mine
    if not is_lost_connection(error):
        world.report_failure(dataclasses.asdict(mine))
        return mine
    found = world.first_failure()
    if found is None:
        return dataclasses.replace(
            mine, reason=f"{mine.reason} [another rank may have failed first]"
        )
    return failures.parse(found)


def _params(experiment: Experiment, world: World) -> dict[str, str]:
    settings = config.rendered(experiment)
    return {
        **settings_without_secrets(settings),
        "world_size": str(world.size),
        "device": world.device.type,
    }
