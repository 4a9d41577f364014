"""One attempt of a run: the values that wait, the checkpoints, and the end. For one thread."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from rankzero import ranks
from rankzero.events import Event, RunEnded, RunStarted
from rankzero.experiment import Goal
from rankzero.integrations.own_loop import process_end
from rankzero.integrations.own_loop.metric_history import MetricHistory, Row
from rankzero.integrations.own_loop.values import (
    Tell,
    is_number,
    is_on_host,
    shown,
    to_floats,
)
from rankzero.launch import failures
from rankzero.run_store import checkpoint_files, provenance
from rankzero.run_store.journal import read_all
from rankzero.tracking.run_log import RunLog

T = TypeVar("T")
# Values wait on their device until then. A reader sees a new step after two seconds at most.
_FLUSH_SECONDS = 2.0
FLUSH_ROWS = 500


class Attempt:
    """An attempt that is open until `end`. Its caller holds the run's lock.

    `tell`: gets what is odd, with a key under which it is said once. `lock`: returns that lock.
    """

    def __init__(
        self,
        log: RunLog,
        goal: Goal,
        keep: int,
        flush_rows: int,
        tell: Tell,
        lock: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.log, self._goal, self._keep = log, goal, keep
        self._lock, self._has_flusher = lock, False
        self._flush_rows, self._tell = flush_rows, tell
        self._rows: list[Row] = []
        self._read, self._events = list[Row](), list[Event]()
        self.begun = self._flushed = time.monotonic()
        self.used = 0.0
        """When the main thread used the run last."""
        self.note_use(time.time())
        self.history = MetricHistory(goal, log.attempt, tell)
        self.history.recall(read_all(log.folder.events))
        self.checkpoints: Any = None

    def start(self, params: Mapping[str, str]) -> None:
        """Log the start of the attempt."""
        environment = provenance.record(self.log.folder.artifacts, command(sys.argv, os.environ))
        environment |= {provenance.OWN_LOOP: "true", provenance.KEEP: str(self._keep)}
        if self._goal != Goal():
            environment[provenance.GOAL] = json.dumps(dataclasses.astuple(self._goal))
        self.log(RunStarted(time.time(), params, environment, self.log.attempt))

    def add(self, step: Any, values: Mapping[str, Any]) -> None:
        """Keep the values until the next flush, which is due now and then."""
        moment = time.time()
        self._rows.append((step, moment, values))
        self.note_use(moment)
        due = time.monotonic() - self._flushed > _FLUSH_SECONDS
        if due or len(self._rows) >= self._flush_rows:
            self.flush()
        elif not self._has_flusher:
            self._start_flusher()

    def note_use(self, moment: float) -> None:
        """Note that the program uses the run, and has not ended."""
        # Another thread goes on while the main thread's exception ends the process.
        if process_end.in_main_thread():
            self.used = moment

    def flush(self) -> None:
        """Log the values that wait."""
        self.note_use(time.time())
        process_end.forget()
        self._flush()

    def evaluated(
        self, metrics: Mapping[str, Any], step: Any, *, saves: bool = False
    ) -> tuple[int, dict[str, float], bool]:
        """Log validation metrics. Return their step, the metrics as logged, and if it is best."""
        self.flush()
        at = self.history.step_of_evaluation(step, metrics, saves=saves)
        numbers = dict(zip(metrics, self._floats(metrics.items()), strict=True))
        event, measured, better = self.history.evaluation(numbers, at)
        if event is not None:
            self.log(event)
        return at, measured, better

    def save(
        self,
        state_dict: Mapping[str, Any],
        at: int,
        measured: Mapping[str, float],
        better: bool,
        *,
        of_adapter: bool,
    ) -> None:
        """Copy a state, for a checkpoint. `of_adapter`: a framework resumes by files of its own."""
        # Imports torch, which a program without checkpoints may not even have.
        from rankzero.training.checkpoints.writer import Checkpoints

        if self.checkpoints is None:
            self.checkpoints = Checkpoints.of_run(self.log, self._keep, self._goal)
            if not of_adapter:
                self._note_higher(at)
        self._log_all(self.history.checkpoint(at))
        self._log_all(self.checkpoints.save(state_dict, at, measured, better))
        if not self._has_flusher:
            self._start_flusher()

    def _note_higher(self, at: int) -> None:
        """Note a checkpoint of an earlier attempt that stays the last one."""
        found = checkpoint_files.known(self.log.folder.checkpoints).values()
        last = max((one.step for one in found), default=at)
        if last > at and not self.history.is_continued:
            text = f"latest() still loads step {last} of an earlier attempt, not step {at}"
            self._tell("last", f"{text}: delete that checkpoint, or choose another name")

    def finish_checkpoints(self) -> None:
        """Return once the checkpoints so far are written."""
        if self.checkpoints is not None:
            self._log_all(self.checkpoints.finish())

    def end(self, error: BaseException | None) -> None:
        """Log the last values and the end, and close the journal."""
        is_finished = process_end.status_of(error)[0] == "FINISHED"
        try:
            # The end must reach the journal, even if a failed GPU cannot give the last values.
            guarded("the values logged last are lost", self._flush, self.log.notice)
            guarded(
                "the last checkpoint is not kept",
                lambda: self._close_checkpoints(finished=is_finished),
                self.log.notice,
            )
        except KeyboardInterrupt as stop:  # the user does not want to wait for a checkpoint
            error = error or stop
            guarded("the values logged last are lost", self._flush, self.log.notice)
            raise
        finally:
            self._log_end(error)
            self.checkpoints = None  # It holds the last state in host memory.

    def _log_end(self, error: BaseException | None) -> None:
        status, reason = process_end.status_of(error)
        if status == "FINISHED" and self.checkpoints and self.checkpoints.failure:
            status, reason = "FAILED", f"{reason}; {self.checkpoints.failure}"
        text = None
        if error is not None and status != "FINISHED":
            text = "".join(traceback.format_exception(error))
        best = {} if self.history.best is None else {"best": self.history.best}
        self.log(RunEnded(time.time(), status, reason, text, {**self.history.last, **best}))
        self.log.close(finished=status == "FINISHED")

    def _log_all(self, events: Iterable[Event]) -> None:
        """Log events as they come."""
        for event in events:
            self.log(event)

    def _flush(self, most: int | None = None) -> None:
        """Log the rows. At any line, a handler of a signal may flush, and end the process.

        So each row stays in one of the three queues until the journal has it.
        """
        rows = self._rows[:most]
        if len(rows) == len(self._rows):
            self._flushed = time.monotonic()
        if self.checkpoints is not None:
            self._log_all(self.checkpoints.poll())
        # All rows are read together: each read of a GPU waits until the GPU has caught up.
        floats = iter(self._floats([item for _, _, row in rows for item in row.items()]))
        read = [(step, moment, {name: next(floats) for name in row}) for step, moment, row in rows]
        if any(one is row for one in self._rows[:1] for row in rows[:1]):  # no handler flushed them
            self._read += read
            del self._rows[: len(rows)]
        _consume(self._read, self.history.take)
        self.history.drain(self._events)
        _consume(self._events, self.log)
        self.log.flush()

    def _start_flusher(self) -> None:
        self._has_flusher = True
        # While a process ends, Python starts no thread. The end of the run flushes, too.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._flush_late, name="flusher", daemon=True).start()

    def _flush_late(self) -> None:
        """Log what no later call flushes. Runs in a thread, while values or a checkpoint wait."""
        while True:
            time.sleep(_FLUSH_SECONDS)
            with self._lock():
                saves = self.checkpoints is not None and self.checkpoints.is_unlogged
                if not self._rows and not saves:
                    self._has_flusher = False
                    return
                # A read of a GPU would break a CUDA graph that the training captures meanwhile.
                waiting = ((step, *row.values()) for step, _, row in self._rows)
                on_host = [*itertools.takewhile(lambda row: all(map(is_on_host, row)), waiting)]
                if on_host or saves:
                    flush = functools.partial(self._flush, len(on_host))
                    guarded("values are lost", flush, self.log.notice)

    def _floats(self, items: Collection[tuple[str, Any]]) -> list[float]:
        """Return the values as floats. One note for each name says what is no number: it is NaN."""
        floats = to_floats([value for _, value in items], self.log.notice)
        for (name, value), number in zip(items, floats, strict=True):
            # `snapshot` replaces a value that cannot be logged by a text that describes it.
            if number != number and not is_number(value):
                self._tell(
                    f"{name} odd",
                    f"{name} is not a number but {shown(value)}: it is logged as NaN; log its "
                    "mean, for instance",
                )
        return floats

    def _close_checkpoints(self, *, finished: bool) -> None:
        if self.checkpoints is not None:
            patience_seconds = self.log.patience_seconds(finished=finished)
            self._log_all(self.checkpoints.close(patience_seconds))


def command(argv: Sequence[str], environ: Mapping[str, str], main: object = None) -> list[str]:
    """Return the command that started this program: with ``-m`` or torchrun, if it had them."""
    spec: Any = getattr(main or sys.modules["__main__"], "__spec__", None)
    is_module = spec is not None and [*argv[:1]] == [spec.origin]
    words = ["-m", spec.name.removesuffix(".__main__"), *argv[1:]] if is_module else [*argv]
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ["python", *words] if is_module else words
    mine = ranks.detect(environ)
    counts = f"--nnodes={mine.node_count}", f"--nproc-per-node={mine.local_world_size}"
    return ["torchrun", *counts, *words]


def _consume(queue: list[T], action: Callable[[T], object]) -> None:
    while first := queue[:1]:
        action(first[0])
        if queue[:1] == first:  # no handler has logged it
            del queue[:1]


def guarded(consequence: str, action: Callable[[], None], notice: Callable[[str], None]) -> bool:
    """Run the action. Return whether it succeeds; if not, `notice` gets the consequence."""
    try:
        action()
    except Exception as error:  # Tracking must not end a training, as with a failed GPU.
        notice(f"{consequence}: {failures.reason(error)}")
        return False
    return True
