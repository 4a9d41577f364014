"""Compare steps/s with an MLflow server that misbehaves, or is away, with an undisturbed server.

    python benchmarks/server_faults.py [--blocks 8] [--quick]

Takes about half an hour.

Two gloo processes, with one thread each, train fully tracked to a server on the same two cores.
The proxy of the fault-injection campaign stands between them and the server for every candidate.

- Undisturbed: the proxy forwards everything.
- Disturbed: it refuses, hangs, drops or cuts answers, answers 500, 429 or garbage, or takes five
  seconds for an answer. Or the server's database is locked, or its disk is full (if this user may
  mount one). One kind follows another. Each lasts until a request has met it, and at least twelve
  seconds: longer than the courier's five seconds between two batches. Then the server is healthy
  until it has answered a request.
- Away: there is no server from the first step to the last.

After each run, MLflow receives the rest and must have every step.

One pair of processes runs all candidates, interleaved, after a warm-up turn: undisturbed,
disturbed, away, disturbed, undisturbed. A block's ratio is that of the means, without the first
fifth of the steps. Many short turns are better than a few long ones, because a shared machine's
speed drifts. Only faults that a request has met count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from harness import HERE, interval, line, ratios, save
from side_by_side import ORDERS, TRAINING
from tracking_overhead import mean_rates, server, side_by_side

from rankzero.mlflow_store.uris import DATABASE

sys.path.insert(0, str(HERE.parent / "tests"))

from torture.disks import Disk, small_disk
from torture.proxy import MODES, Proxy

BAD_SECONDS, GOOD_SECONDS, POLL_SECONDS = 12.0, 1.0, 0.05
LOCKED, FULL, AWAY = "database locked", "disk full", "refuse"
UNDISTURBED, DISTURBED, ABSENT = "undisturbed", "disturbed", "away"
WORKLOAD = "Convnet"
STEPS = 2000  # 25 s
DISK_MEGABYTES = 256
WANTED = 0.99


@dataclasses.dataclass
class Trouble:
    """Injects the faults: one kind after another for `disturbed`, no server for `away`.

    `met` counts the faults of each kind that a request has met.
    """

    proxy: Proxy
    database: Path
    disk: Disk | None
    training: Path
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    met: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self._kinds = collections.deque((*MODES, LOCKED, *([] if self.disk is None else [FULL])))

    @property
    def kinds(self) -> int:
        return len(self._kinds)

    def make(self) -> None:
        """Inject faults until `over` is set."""
        while not self.over.wait(POLL_SECONDS):
            if self._trains(ABSENT):
                with self._hurt(AWAY):
                    self._lasts(ABSENT, float("inf"))
            elif self._trains(DISTURBED):
                self._disturb()

    def _disturb(self) -> None:
        """Inject the next kind of fault.

        A kind that no request has met before the training's end is injected again next time.
        """
        with self._hurt(self._kinds[0]):
            met = self._lasts(DISTURBED, BAD_SECONDS)
        if met:
            self.met[self._kinds[0]] += 1
            self._kinds.rotate(-1)
        self._lasts(DISTURBED, GOOD_SECONDS)

    def _lasts(self, who: str, seconds: float) -> bool:
        """Wait `seconds`, and until a request has arrived, while candidate `who` trains.

        Return whether a request has arrived.
        """
        before, begin = self.proxy.requests, time.monotonic()
        while time.monotonic() - begin < seconds or self.proxy.requests == before:
            if self.over.wait(POLL_SECONDS) or not self._trains(who):
                break
        return self.proxy.requests > before

    @contextlib.contextmanager
    def _hurt(self, kind: str) -> Iterator[None]:
        if kind == LOCKED:
            with contextlib.closing(
                sqlite3.connect(self.database, timeout=60, isolation_level=None)
            ) as other:
                other.execute("BEGIN EXCLUSIVE")
                yield
                other.execute("ROLLBACK")
        elif kind == FULL and self.disk is not None:
            self.disk.fill()
            yield
            self.disk.empty()
        else:
            self.proxy.misbehave(kind)
            yield
            self.proxy.behave()

    def _trains(self, who: str) -> bool:
        with contextlib.suppress(OSError):
            return self.training.read_text() == who
        return False


@contextlib.contextmanager
def made(trouble: Trouble) -> Iterator[None]:
    """Inject faults for the duration of the block."""
    thread = threading.Thread(target=trouble.make)
    thread.start()
    try:
        yield
    finally:
        trouble.over.set()
        thread.join()


@contextlib.contextmanager
def disk_for(path: Path) -> Iterator[Disk | None]:
    """Yield a disk that can be filled, mounted at `path`, or None if mounting is not allowed."""
    with contextlib.ExitStack() as stack:
        disk = None
        try:
            disk = stack.enter_context(small_disk(path, DISK_MEGABYTES))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"full disks are left out: {error}", flush=True)
        yield disk


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="one block, to check that it works")
    options = parser.parse_args()
    blocks = 1 if options.quick else options.blocks
    with tempfile.TemporaryDirectory() as temporary, disk_for(Path(temporary) / "disk") as disk:
        folder, store = Path(temporary), Path(temporary) / "disk" / "server"
        with server(store) as uri, Proxy(uri) as good, Proxy(uri) as bad:
            trouble = Trouble(bad, store / DATABASE, disk, folder / TRAINING)
            uris: dict[str, str | None] = {
                UNDISTURBED: good.uri,
                DISTURBED: bad.uri,
                ABSENT: bad.uri,
            }
            with made(trouble):
                turns = side_by_side(WORKLOAD, STEPS, blocks, uris, folder)
    block = len(ORDERS[len(uris)])
    undisturbed = mean_rates(turns, UNDISTURBED, "steady", block)
    rates = {who: mean_rates(turns, who, "steady", block) for who in (DISTURBED, ABSENT)}
    found = {
        who: ratios(mine, undisturbed) | interval(mine, undisturbed) for who, mine in rates.items()
    }
    met = dict(trouble.met)
    print(
        line(
            f"{WORKLOAD}, {sum(met.values())} faults, {len(met)} of {trouble.kinds} kinds",
            found[DISTURBED],
            f">= {WANTED}",
        )
    )
    print(line(f"{WORKLOAD}, away", found[ABSENT], f">= {WANTED}"))
    for who, ratio in found.items():
        print(
            f"{who}: geometric mean {ratio['mean']:.3f}, "
            f"95 % interval {ratio['low']:.3f} to {ratio['high']:.3f}"
        )
    print(met)
    if not options.quick:
        save(
            "server_faults",
            steps=STEPS,
            wanted=WANTED,
            ratio=found,
            kinds=trouble.kinds,
            faults=met,
            turns=turns,
        )


if __name__ == "__main__":
    main()
