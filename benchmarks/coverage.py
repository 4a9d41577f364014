"""Count how often the interval of a verdict covers the gain on seeds that no searcher saw.

    python benchmarks/coverage.py [digits rows letters chapters] [--replays 120]

It trains nothing: the real search runs on the recorded tables, as in `replay.py`. In each replay
the user begins with another configuration, one that reaches the target on most seeds, and other
seeds are the unseen ones. The gain on these is computed as `live_search.py` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import random
from typing import Any

import recorded_tables
from harness import is_whole, save
from live_search import gain, summary
from recorded_tables import CONFIRM_SEEDS, HELD_OUT, Key, Table
from replay import budget, searched

from rankzero import config
from rankzero.tuning.verdict.decide import ConfirmationRun

TABLES = ("digits", "rows", "letters", "chapters", "images", "knobs")
BEST_SECONDS = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=TABLES)
    parser.add_argument("--replays", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for name in options.tables:
        is_digits = name == "digits"
        table = recorded_tables.digits() if is_digits else recorded_tables.hard(name, BEST_SECONDS)
        one = functools.partial(replay, name, table, budget(table))
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            rows += pool.map(one, range(options.replays), chunksize=5)
        print(summary(rows), flush=True)
    if is_whole(parser, options, "jobs"):
        save("coverage", rows=rows)


def replay(name: str, table: Table, seconds: float, number: int) -> dict[str, Any]:
    """Search from a user's configuration. Return the stated gain and that on unseen seeds."""
    table = shuffled(table, number)
    own = random.Random(number).choice(candidates(table))
    theirs = centred(table, own)
    _, verdict, (batch, values, factor) = searched(theirs, number, seconds)
    # The table's own factors name its cells.
    winner = (batch, values, table.factors[theirs.factors.index(factor)])
    return {
        "task": name,
        "number": number,
        "own": own,
        "winner": winner,
        "won": verdict.beaten,
        "stated": [verdict.gain, verdict.gain_low, verdict.gain_high],
        "checked": gain(runs_of(table, own), runs_of(table, winner)),
    }


def shuffled(table: Table, number: int) -> Table:
    """Return the table with other seeds for confirmations and for the check: each replay's luck."""
    rows = dict(table.rows)
    for key in table.keys:
        seeds = [seed for seed in (*CONFIRM_SEEDS, *HELD_OUT) if (key, seed) in table.rows]
        drawn = random.Random(f"{number} {key}").sample(seeds, len(seeds))
        rows |= {(key, new): table.rows[key, old] for new, old in zip(seeds, drawn, strict=True)}
    return dataclasses.replace(table, rows=rows)


def candidates(table: Table) -> list[Key]:
    """Return the configurations that reach the target on more than half of the unseen seeds."""
    found = {key: runs_of(table, key) for key in table.keys}
    return [
        key
        for key, runs in found.items()
        if len(runs) > 2 and sum(run.value is not None for run in runs) > len(runs) / 2
    ]


def runs_of(table: Table, key: Key) -> list[ConfirmationRun]:
    """Return a configuration's trainings on unseen seeds. A hopeless one has two seeds at all."""
    runs = []
    for seed in (seed for seed in HELD_OUT if (key, seed) in table.rows):
        whole = table.row(key, seed).points[-1][0]
        reached = table.seconds_to_target(key, seed)
        missed = reached > whole
        runs.append(
            ConfirmationRun(
                0, seed, None if missed else reached, None, lost=whole if missed else None
            )
        )
    return runs


def centred(table: Table, own: Key) -> Table:
    """Return the table of a user who begins with this configuration."""
    batch, values, factor = own
    scaled = table.own.lr * (batch / table.own.train.batch_size) ** table.exponent
    others = dict(zip(table.settings, values, strict=True))
    settings = {"train.batch_size": batch, "lr": scaled * factor, **others}
    return dataclasses.replace(
        table,
        own=config.override(table.own, settings),
        rows={((*key[:2], key[2] / factor), seed): row for (key, seed), row in table.rows.items()},
        factors=tuple(known / factor for known in table.factors),
    )


if __name__ == "__main__":
    main()
