"""Measure how long `import rankzero` and `rankzero --help` take, from the shell.

    python benchmarks/import_time.py [--rounds 20]

Takes about 10 seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import is_whole, save

WANTED = {"import rankzero": 0.1, "rankzero --help": 0.3}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    commands = {
        "python alone": [sys.executable, "-c", "pass"],
        "import rankzero": [sys.executable, "-c", "import rankzero"],
        "rankzero --help": [str(Path(sys.executable).with_name("rankzero")), "--help"],
    }
    readings: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            readings[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in readings.items()}
    for name, value in medians.items():
        print(
            f"{name:18} {value:.3f} s"
            + (f"   wanted <= {WANTED[name]} s" if name in WANTED else "")
        )
    if is_whole(parser, options):
        save("import_time", seconds=readings, medians=medians, wanted=WANTED)


if __name__ == "__main__":
    main()
