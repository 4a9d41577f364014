"""How often the ranks talk to each other: about once a second, or once a step or batch that takes longer."""

from __future__ import annotations

import torch

from rankzero.train.stop import REASONS, Stop, foremost
from rankzero.train.world import World

REPORT_SECONDS = 1.0
LONGEST_WINDOW = 1000  # steps: bounds what a SIGKILL can take, and the host's list of tensors
LEAST_SECONDS = 1.0  # of an evaluation that is left: a short one is soon over, and worth having
MOST_BATCHES = 32  # from one agreement to the next: they may get slower on the way


def next_length(length: int, step_seconds: float, most: int = LONGEST_WINDOW) -> int:
    """Return the next window's steps: about a second's worth, at most twice the last. The same on every rank."""
    fitting = int(REPORT_SECONDS / max(step_seconds, 1e-9))
    return max(1, min(2 * length, fitting, most, LONGEST_WINDOW))


class Left(Exception):
    """An evaluation was left: `code` says what for."""

    def __init__(self, code: int) -> None:
        super().__init__(REASONS[code])
        self.code = code


class Interruption:
    """Whether an evaluation, which begins now, is left between two batches, because a rank was told to stop.

    Ranks agree on it after as many batches: a forward may be a collective, which all must enter or none.
    """

    def __init__(self, world: World, stop: Stop) -> None:
        self._world, self._stop = world, stop
        self._length, self._batches = 1, 0
        self._seconds, self._asked = 0.0, world.now()

    def check(self) -> None:
        """Raise Left on every rank, if the evaluation is to be left now. Every rank calls it before each batch.

        A collective, and a wait for the device, every `MOST_BATCHES` batches, or about once a second where those take
        longer; otherwise it costs nothing.
        """
        if self._batches < self._length:
            self._batches += 1
            return
        now = self._world.now()
        mine = torch.tensor([self._stop.urgent, now - self._asked], dtype=torch.float64)
        codes, seconds = self._world.gather(mine).T.tolist()
        self._length = next_length(self._length, max(seconds) / self._batches, MOST_BATCHES)
        self._batches, self._seconds, self._asked = 1, self._seconds + max(seconds), now
        if any(codes) and self._seconds >= LEAST_SECONDS:
            raise Left(foremost(map(int, codes)))
