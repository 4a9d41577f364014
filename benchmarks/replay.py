"""Run searchers on the recorded table, with the same accounting for all.

    python benchmarks/replay.py [--replays 50] [--longer 10]

Takes about 10 minutes and trains nothing.

Every searcher pays, by the recorded clock, for each training: the training seconds until it stops
and the fixed cost of a run. It also pays for probes and confirmations. The configuration that it
would return is judged on seeds that no searcher saw. Its regret is its time to the target there
over the best cell's, minus 1. The searcher `ours` is the real search, on the table's clock.

With --longer, training takes so many times longer. Starting a run and probing a cell do not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
from harness import RESULTS, save

from rankzero import Experiment, Goal, Train
from rankzero.events import Evaluated, Event, RunEnded, RunStarted, Status, StepsLogged
from rankzero.search_ranges import LogUniform
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.options import Pruner, Sampler, SearchOptions
from rankzero.tuning.probe import grid as ladder
from rankzero.tuning.probe import probe_map as probe
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.session import Session
from rankzero.tuning.space import Space, narrowed
from rankzero.tuning.study import open_study
from rankzero.tuning.verdict.confirm import NEW_SEED

SEARCH_SEEDS, CONFIRM_SEEDS = (0, 1), (2, 3, 4, 5, 6, 7)  # the other seeds are held out
GRID_SEEDS = 3  # seeds per cell of the grid, as in a confirmation
TARGET, SAMPLES, METRIC = 0.3, 1437, "val/loss"
# The seconds of a cell of the probe map with such short runs, by `rankzero probe`: see the README.
PROBE_SECONDS = 1.2
NEVER = 1e9
MOST_TRIALS = 60
Key = tuple[int, str, float]
Step = tuple[float, Key]  # cost so far, configuration that would be returned


class NoisyDigits(Experiment):
    """The recorded experiment's settings."""

    train: Train = Train(batch_size=32, epochs=12)
    goal: Goal = Goal(METRIC, "min", target=TARGET)
    lr: float = 1e-3


OWN = NoisyDigits()


@dataclasses.dataclass(frozen=True)
class Table:
    """The recorded runs by configuration and seed."""

    rows: dict[tuple[Key, int], dict[str, Any]]
    batch_sizes: tuple[int, ...]
    precisions: tuple[str, ...]
    factors: tuple[float, ...]
    exponent: float
    fixed_seconds: float
    """Seconds that a run costs in addition to its steps."""

    @property
    def keys(self) -> list[Key]:
        return sorted({key for key, _ in self.rows})

    def seconds_to_target(self, key: Key, seed: int) -> float:
        """Return the training seconds to the target, or `NEVER` if it is missed."""
        curve = LearningCurve(OWN.goal)
        for event in journal(self.rows[key, seed], key[0]):
            curve(event)
        found = curve.seconds_to(TARGET)
        return NEVER if found is None else found

    def cost(self, key: Key, seed: int, *, to_target: bool) -> float:
        """Return a run's cost in seconds: to its end, or to the first evaluation at the target."""
        points: list[tuple[float, float]] = self.rows[key, seed]["points"]
        reached = (seconds for seconds, value in points if OWN.goal.reached(value))
        return self.fixed_seconds + (next(reached, points[-1][0]) if to_target else points[-1][0])

    def truth(self, key: Key) -> float:
        """Return the geometric mean of the time to target on the held-out seeds."""
        known = [
            seed
            for found, seed in self.rows
            if found == key and seed not in SEARCH_SEEDS + CONFIRM_SEEDS
        ]
        return statistics.geometric_mean(self.seconds_to_target(key, seed) for seed in known)

    def speed(self, key: Key, seed: int) -> float:
        return float(self.rows[key, seed]["samples_per_second"])


def load(longer: float = 1.0) -> Table:
    """Return the recorded table, with training that takes `longer` times as long."""
    found = json.loads((RESULTS / "digits_table.json").read_text())
    fixed = statistics.median(row["wall_seconds"] - row["points"][-1][0] for row in found["rows"])
    for row in found["rows"]:
        row["points"] = [(longer * seconds, value) for seconds, value in row["points"]]
        row["samples_per_second"] /= longer
    rows = {
        ((row["batch_size"], row["precision"], row["factor"]), row["seed"]): row
        for row in found["rows"]
    }
    return Table(
        rows,
        tuple(found["batch_sizes"]),
        tuple(found["precisions"]),
        tuple(found["factors"]),
        found["lr_exponent"],
        fixed,
    )


def journal(row: dict[str, Any], batch_size: int) -> Iterator[Event]:
    """Yield the events of a recorded run, as in its journal."""
    yield RunStarted(0.0, {}, {}, 1)
    before, per_epoch = 0.0, SAMPLES // batch_size
    for epoch, (seconds, value) in enumerate(row["points"], start=1):
        yield StepsLogged(
            [epoch * per_epoch],
            [seconds],
            {"throughput/step_seconds": [(seconds - before) / per_epoch]},
        )
        yield Evaluated(seconds, epoch * per_epoch, {METRIC: value}, best=True)
        before = seconds


class ReplayLauncher:
    """Gives the search the recorded runs, and sums their cost."""

    def __init__(self, table: Table, space: Space, seed: int) -> None:
        self.table, self.space, self.seed, self.seconds = table, space, seed, 0.0

    def start(
        self, experiment: Experiment, name: str, processes: int | None = None
    ) -> ReplayRunning:
        key = key_of(self.table, self.space, experiment)
        asked = experiment.train.seed
        seed = self.seed if asked < NEW_SEED else CONFIRM_SEEDS[asked - NEW_SEED]
        self.seconds += self.table.fixed_seconds
        return ReplayRunning(self, experiment, name, self.table.rows[key, seed])


class ReplayRunning:
    """Replays a recorded run, one epoch at a time."""

    def __init__(
        self, launcher: ReplayLauncher, experiment: Experiment, name: str, row: dict[str, Any]
    ) -> None:
        self.name, self.has_ended, self._pruned = name, False, False
        self.handles, self.was_lost = (), False
        self._launcher, self._row, self._goal = launcher, row, experiment.goal
        self._stop_at_target, self._spent = experiment.train.limits.stop_at_target, 0.0
        self._events = journal(row, experiment.train.batch_size)

    def new_events(self) -> list[Event]:
        if self.has_ended:
            return []
        event = None if self._pruned else next(self._events, None)
        if isinstance(event, StepsLogged):
            self._launcher.seconds += event.times[0] - self._spent
            self._spent = event.times[0]
        reached = isinstance(event, Evaluated) and self._goal.reached(event.metrics[METRIC])
        self.has_ended = event is None or (reached and self._stop_at_target)
        status: Status = "KILLED" if self._pruned else "FINISHED"
        end = RunEnded(
            0.0, status, "", None, {"samples_per_second": self._row["samples_per_second"]}
        )
        return [*([event] if event else []), *([end] if self.has_ended else [])]

    @property
    def failure(self) -> None:
        return None

    def prune(self, reason: str) -> None:
        self._pruned = True

    def stop(self) -> None:
        self._pruned = True

    def kill(self, reason: str) -> None:
        self._pruned = True

    def close(self) -> None:
        self.has_ended = True


def key_of(table: Table, space: Space, experiment: Experiment) -> Key:
    """Return the table's cell nearest to a configuration."""
    batch = experiment.train.batch_size
    factor = experiment.lr / space.scaled_lr(batch)
    nearest = min(table.factors, key=lambda known: abs(math.log(known / factor)))
    return batch, experiment.train.precision, nearest


def space_of(table: Table) -> Space:
    return Space(
        OWN,
        table.batch_sizes,
        table.precisions,
        LogUniform(table.factors[0], table.factors[-1]),
        table.exponent,
        {},
    )


def ours(
    table: Table,
    number: int,
    *,
    pruner: Pruner = "asha",
    probes: bool = True,
    confirm: bool = True,
    guesses: bool = True,
    sampler: Sampler = "tpe",
) -> list[Step]:
    """Run the real search on the table, with a budget of a quarter of the grid's cost."""
    space, seed = space_of(table), SEARCH_SEEDS[number % 2]
    measured = probe_map(table, seed) if probes else []
    if measured:
        space = narrowed(
            space,
            [one.batch_size for one in ladder.fastest(measured)],
            ladder.worth_searching(measured, table.precisions),
        )
    launcher = ReplayLauncher(table, space, seed)
    launcher.seconds = spent = PROBE_SECONDS * len(measured)
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(dir=_fast()) as folder:
        study = open_study(
            f"sqlite:///{folder}/s.db", "s", sampler=sampler, pruner=pruner, seed=1000 * number
        )
        study.draw_from(space.parameters())

        def said(_text: str) -> None:
            known = [
                trial for trial in study.trials() if trial.feasible and trial.value is not None
            ]
            if known:
                best = min(known, key=lambda trial: trial.value or 0.0)
                steps.append(
                    (launcher.seconds, key_of(table, space, space.experiment(best.parameters)))
                )

        options = SearchOptions(
            trials=None, minutes=budget(table) / 60, challengers=3 if confirm else 0
        )
        # It has the methods of a launcher that the search calls.
        launchers: list[Any] = [launcher]
        session = Session(
            study, space, launchers, options, said, lambda: launcher.seconds, already_seconds=spent
        )
        found = session.run(probe.guesses(space, measured) if guesses else [])
        chosen = next(trial for trial in study.trials() if trial.number == found.winner.trial)
        if confirm:
            steps.append(
                (launcher.seconds, key_of(table, space, space.experiment(chosen.parameters)))
            )
    return steps


def budget(table: Table) -> float:
    """Return a quarter of the grid's cost, in seconds."""
    return grid(table, 0)[-1][0] / 4


def probe_map(table: Table, seed: int) -> list[ProbeResult]:
    """Return the probe map of the recorded speeds."""
    return [
        ProbeResult(
            batch,
            batch // 2,
            precision,
            "ok",
            table.speed((batch, precision, 1.0), seed),
            0.02,
            batch / table.speed((batch, precision, 1.0), seed),
        )
        for precision in table.precisions
        for batch in table.batch_sizes
    ]


def grid(table: Table, number: int) -> list[Step]:
    """Train every cell on some seeds, in a random order. Return the best mean so far."""
    spent, best, steps = 0.0, (math.inf, table.keys[0]), list[Step]()
    draw = random.Random(number)
    seeds = draw.sample(SEARCH_SEEDS + CONFIRM_SEEDS, GRID_SEEDS)
    for key in draw.sample(table.keys, len(table.keys)):
        spent += sum(table.cost(key, seed, to_target=True) for seed in seeds)
        best = min(
            best,
            (statistics.geometric_mean(table.seconds_to_target(key, seed) for seed in seeds), key),
        )
        steps.append((spent, best[1]))
    return steps


def random_search(table: Table, number: int) -> list[Step]:
    """Draw cells at random, with repetition."""
    draw = random.Random(1000 + number)
    return _sequence(table, number, [draw.choice(table.keys) for _ in range(MOST_TRIALS)])


def _sequence(table: Table, number: int, keys: Sequence[Key]) -> list[Step]:
    seed, spent, best, steps = SEARCH_SEEDS[number % 2], 0.0, (math.inf, keys[0]), list[Step]()
    for key in keys:
        spent += table.cost(key, seed, to_target=True)
        best = min(best, (table.seconds_to_target(key, seed), key))
        steps.append((spent, best[1]))
    return steps


def tpe(table: Table, number: int, what: str) -> list[Step]:
    """Run Optuna's default sampler on the final quality, or on samples/s (of one epoch)."""
    seed, spent, steps = SEARCH_SEEDS[number % 2], 0.0, list[Step]()
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=number)
    )
    for _ in range(MOST_TRIALS):
        trial = study.ask()
        key = _suggest(table, trial)
        if what == "quality":
            spent += table.cost(key, seed, to_target=False)
            value = -table.rows[key, seed]["points"][-1][1]
        else:
            spent += table.fixed_seconds + table.rows[key, seed]["points"][0][0]
            value = table.speed(key, seed)
        study.tell(trial, value)
        best = study.best_trial.params
        steps.append((spent, (best["batch"], best["precision"], best["factor"])))
    return steps


def two_objectives(table: Table, number: int) -> list[Step]:
    """Run Optuna's default sampler on samples/s and quality.

    Returns the fastest configuration of the Pareto front that reached the target.
    """
    seed, spent, steps = SEARCH_SEEDS[number % 2], 0.0, list[Step]()
    study = optuna.create_study(
        directions=["maximize", "maximize"], sampler=optuna.samplers.TPESampler(seed=number)
    )
    for _ in range(MOST_TRIALS):
        trial = study.ask()
        key = _suggest(table, trial)
        spent += table.cost(key, seed, to_target=False)
        study.tell(trial, [table.speed(key, seed), -table.rows[key, seed]["points"][-1][1]])
        front = [one for one in study.best_trials if -one.values[1] <= TARGET] or study.best_trials
        best = max(front, key=lambda one: one.values[0]).params
        steps.append((spent, (best["batch"], best["precision"], best["factor"])))
    return steps


def _suggest(table: Table, trial: optuna.Trial) -> Key:
    batch = trial.suggest_categorical("batch", table.batch_sizes)
    precision = trial.suggest_categorical("precision", table.precisions)
    return batch, precision, trial.suggest_categorical("factor", table.factors)


def largest(table: Table, number: int) -> list[Step]:
    """Return the largest batch that fits, with the user's learning rate."""
    own, batch = 32, table.batch_sizes[-1]
    factor = min(
        table.factors, key=lambda known: abs(math.log(known / (own / batch) ** table.exponent))
    )
    return [(PROBE_SECONDS * len(table.batch_sizes), (batch, "fp32", factor))]


def plateau(table: Table, number: int) -> list[Step]:
    """Return the smallest batch within 5 % of the peak speed, with a scaled learning rate."""
    measured = probe_map(table, SEARCH_SEEDS[number % 2])
    peak = max(one.samples_per_second for one in measured)
    chosen = min(
        (one for one in measured if one.samples_per_second >= 0.95 * peak),
        key=lambda one: one.batch_size,
    )
    return [(PROBE_SECONDS * len(measured), (chosen.batch_size, chosen.precision, 1.0))]


CONTESTANTS: dict[str, Callable[[Table, int], list[Step]]] = {
    "exhaustive grid": grid,
    "random": random_search,
    "TPE on quality": lambda table, number: tpe(table, number, "quality"),
    "TPE on throughput": lambda table, number: tpe(table, number, "throughput"),
    "TPE on both": two_objectives,
    "largest batch, same lr": largest,
    "smallest batch within 5 % of peak": plateau,
    "ours": ours,
    "ours, no probe map": lambda table, number: ours(table, number, probes=False),
    "ours, no pruning": lambda table, number: ours(table, number, pruner="none"),
    "ours, no guesses": lambda table, number: ours(table, number, guesses=False),
    "ours, no confirmation": lambda table, number: ours(table, number, confirm=False),
}


def judge(table: Table, steps: Sequence[Step], budget: float) -> dict[str, float]:
    """Return the regret at the budget and at the end, the cost, and the cost to 5 %.

    From that last cost on, the searcher never returns a configuration with a regret above 5 %.
    """
    oracle = min(map(table.truth, table.keys))
    regrets = [(spent, table.truth(key) / oracle - 1) for spent, key in steps]
    at_budget = [regret for spent, regret in regrets if spent <= budget]
    bad = max((number for number, (_, regret) in enumerate(regrets) if regret > 0.05), default=-1)
    # After the last bad step, the regret stays at or below 5 %.
    good = [spent for spent, _ in regrets[bad + 1 :]]
    return {
        "regret_at_budget": at_budget[-1] if at_budget else math.inf,
        "regret": regrets[-1][1],
        "cost": regrets[-1][0],
        "cost_to_5_percent": good[0] if good else math.inf,
    }


def regret_at(steps: Sequence[Step], truth: dict[Key, float], cost: float) -> float:
    """Return the regret after this cost, or infinity before the first configuration."""
    known = [key for spent, key in steps if spent <= cost]
    return truth[known[-1]] / min(truth.values()) - 1 if known else math.inf


def draw(curves: dict[str, list[float]], shares: Sequence[float], path: Path) -> None:
    """Draw the median regret against the cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        shown = [min(max(regret, 0.005), 10.0) for regret in curve]
        axes.plot(
            shares,
            shown,
            label=name,
            linewidth=3 if name == "ours" else 1.2,
            color="black" if name == "ours" else None,
            linestyle=":" if name.startswith("ours, ") else "-",
        )
    axes.axvline(0.25, color="grey", linewidth=0.8)
    axes.axhline(0.05, color="grey", linewidth=0.8)
    axes.set(
        yscale="log",
        xlabel="cost, as a share of the grid's",
        ylabel="median regret in time to target",
        title="Regret of the configuration that a searcher would return",
    )
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--longer", type=float, default=1.0)
    options = parser.parse_args()
    replays, longer = options.replays, options.longer
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load(longer)
    quarter = budget(table)
    print(
        f"the grid: {len(table.keys)} cells, {GRID_SEEDS} seeds, {4 * quarter:.0f} s; "
        f"a quarter of it: {quarter:.0f} s"
    )
    truth = {key: table.truth(key) for key in table.keys}
    shares = [number / 100 for number in range(2, 102, 2)]
    found, curves = {}, {}
    for name, search in CONTESTANTS.items():
        runs = [search(table, number) for number in range(replays)]
        judged = [judge(table, steps, quarter) for steps in runs]
        curves[name] = [
            statistics.median(regret_at(steps, truth, 4 * quarter * share) for steps in runs)
            for share in shares
        ]
        found[name] = {key: statistics.median(one[key] for one in judged) for key in judged[0]}
        found[name]["share_within_5_percent"] = statistics.fmean(
            one["regret"] <= 0.05 for one in judged
        )
        print(
            f"{name:36}" + "  ".join(f"{key} {value:8.3f}" for key, value in found[name].items()),
            flush=True,
        )
    name = "replay" if longer == 1 else f"replay_{longer:g}_times_longer"
    save(name, replays=replays, grid_seconds=4 * quarter, target=TARGET, contestants=found)
    draw(curves, shares, RESULTS / f"{name}.png")


def _fast() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
