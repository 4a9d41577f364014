"""Emit RunStarted and RunEnded exactly once per attempt, also if an exception ends it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence

from rankzero import experiment_file
from rankzero.events import DataDescribed, RunEnded, RunStarted, Status
from rankzero.experiment import Experiment
from rankzero.launch import failures
from rankzero.launch.request import OUT_OF_MEMORY, write_config
from rankzero.redaction.text import rendered_without_secrets
from rankzero.tracking.run_log import RunLog
from rankzero.training.distributed import device
from rankzero.training.distributed.torch_compat import is_lost_connection
from rankzero.training.distributed.world import World
from rankzero.training.metrics.throughput import RunTotals

_DATA = "rankzero.data."
_NO_DIGEST = "not computed: a stream"  # of older attempts


@dataclasses.dataclass(frozen=True)
class AttemptOutcome:
    """How an attempt ended."""

    status: Status
    reason: str


class RunLifecycle:
    """Emits RunStarted once. Set `outcome` before the block of `tracked` ends."""

    def __init__(
        self, log: RunLog, experiment: Experiment, params: Mapping[str, str], tags: dict[str, str]
    ) -> None:
        self.outcome = AttemptOutcome("FAILED", "ended without a reason")
        self._log, self._experiment, self._params, self._tags = log, experiment, params, tags
        self.is_started = False

    def start(
        self,
        step: int = 0,
        total_steps: int | None = None,
        data: Sequence[DataDescribed] = (),
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Emit RunStarted, with `tags` and the digests of `data` as tags, and `data` itself.

        Rank 0 writes the settings before it: those of an attempt that ends in set-up are not kept.
        """
        if self.is_started:
            return
        self.is_started = True
        if self._log.attempt and total_steps is not None:
            try:
                write_config(self._log.folder, self._experiment)
            except OSError as error:
                self._log.notice(f"config.yaml lacks the settings of this attempt: {error}")
        digests = {f"{_DATA}{event.context}": event.digest for event in data}
        every, attempt = {**self._tags, **digests, **(tags or {})}, self._log.attempt
        self._log(RunStarted(time.time(), self._params, every, attempt, step, total_steps))
        for event in data:
            self._log(event)
        before = self._log.tags_before
        for kind, prefix in (("data", _DATA), ("code", experiment_file.CODE)):
            own = (k for k, text in every.items() if before.get(k, text) not in (text, _NO_DIGEST))
            listed = ", ".join(key.removeprefix(prefix) for key in own if key.startswith(prefix))
            if listed and step:
                self._log.notice(
                    f"other {kind} than in the attempt before ({listed}): the values before and "
                    f"after step {step} may not be comparable"
                )


@contextlib.contextmanager
def tracked(
    log: RunLog, experiment: Experiment, tags: Mapping[str, str], world: World, totals: RunTotals
) -> Iterator[RunLifecycle]:
    """Emit RunEnded and close `log`, however the block ends: also by Ctrl-C or SystemExit."""
    params = {
        **rendered_without_secrets(experiment),
        "world_size": str(world.size),
        "device": world.device.type,
    }
    lifecycle = RunLifecycle(log, experiment, params, {**tags, **device.describe(world)})
    error: str | None = None
    try:
        yield lifecycle
    except BaseException as raised:  # also SystemExit and Ctrl-C: every attempt gets its end
        failure = _root_cause(raised, world)
        error = failure.error
        status: Status = "KILLED" if isinstance(raised, KeyboardInterrupt) else "FAILED"
        # Lists of batches() may not divide among the smaller micro-batches.
        halved = "" if lifecycle.is_started else tags.get(OUT_OF_MEMORY)
        after = f" (after out of memory: {halved})" if halved else ""
        lifecycle.outcome = AttemptOutcome(status, failure.reason + after)
        if failure.rank != world.ranks.rank:
            # The command of this machine reads this rank's failure.
            raise failures.DescribedError(failure, of_peer=True) from raised
        raise
    finally:
        # A failure in data() or model() comes before the start.
        lifecycle.start()
        outcome = lifecycle.outcome
        # An error ends this rank alone, so no other one answers.
        own = {"peak_memory_megabytes": device.peak_memory_megabytes(world)}
        summary = {**own, **totals.summary()}
        log(RunEnded(time.time(), outcome.status, outcome.reason, error, summary))
        log.close(finished=outcome.status == "FINISHED")


def _root_cause(error: BaseException, world: World) -> failures.Failure:
    """Return the failure that came first: a rank only sees a lost connection if a peer failed."""
    own = failures.describe(error, world.ranks.rank)
    if not world.is_distributed:
        return own
    if not is_lost_connection(error):
        world.report_failure(own)
        return own
    unknown = "" if failures.shows_lost_rank(error) else " [another rank may have failed first]"
    return world.first_failure() or dataclasses.replace(own, reason=own.reason + unknown)
