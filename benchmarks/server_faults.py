"""Steps/s with an MLflow server that misbehaves over the same with one that does not.   about 6 minutes

    python benchmarks/server_faults.py [--blocks 3] [--quick]

Two gloo processes, one thread each, fully tracked to a server on the same two cores; the proxy of the fault-injection
campaign stands between, for both. For the disturbed one it refuses, hangs, drops or cuts answers, answers 500, 429 or
garbage, or takes five seconds for an answer: two seconds of each in random order, a second of good manners between,
until its training is over. Then MLflow gets the rest, and has every step. Interleaved in one pair of processes:
undisturbed, disturbed, disturbed, undisturbed; a block's ratio is that of the two means, over all but the first fifth
of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from harness import HERE, line, ratios, save
from side_by_side import TRAINING
from tracking_overhead import STEPS, mean_rates, server, side_by_side

sys.path.insert(0, str(HERE.parent / "tests"))

from torture.proxy import MODES, Proxy

BAD_SECONDS, GOOD_SECONDS = 2.0, 1.0
WORKLOAD = "Convnet"
WANTED = 0.99


@contextlib.contextmanager
def misbehaving(proxy: Proxy, seed: int, training: Path) -> Iterator[list[str]]:
    """Have a proxy misbehave while its contestant trains, for the duration of the block; yield the faults so far."""
    over, faults, chosen = threading.Event(), list[str](), random.Random(seed)

    def misbehave() -> None:
        while not over.wait(GOOD_SECONDS):
            if not _trains(training, "disturbed"):
                continue
            proxy.mode = chosen.choice(MODES)
            faults.append(proxy.mode)
            over.wait(BAD_SECONDS)
            proxy.mode = "good"

    thread = threading.Thread(target=misbehave)
    thread.start()
    try:
        yield faults
    finally:
        over.set()
        thread.join()


def _trains(training: Path, who: str) -> bool:
    with contextlib.suppress(OSError):
        return training.read_text() == who
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short block, to see that it works")
    options = parser.parse_args()
    steps, blocks = (STEPS[WORKLOAD] // 10, 1) if options.quick else (STEPS[WORKLOAD], options.blocks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with server(folder / "server") as uri, Proxy(uri) as good, Proxy(uri) as bad:
            uris: dict[str, str | None] = {"undisturbed": good.uri, "disturbed": bad.uri}
            with misbehaving(bad, 7, folder / TRAINING) as faults:
                turns = side_by_side(WORKLOAD, steps, blocks, uris, folder)
    ratio = ratios(mean_rates(turns, "disturbed", "steady"), mean_rates(turns, "undisturbed", "steady"))
    print(line(f"{WORKLOAD}, {len(faults)} faults", ratio, f">= {WANTED}"))
    if not options.quick:
        save("server_faults", steps=steps, wanted=WANTED, ratio=ratio, faults=len(faults), turns=turns)


if __name__ == "__main__":
    main()
