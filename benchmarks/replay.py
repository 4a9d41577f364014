"""Run searchers on a recorded table, with the same accounting for all. It trains nothing.

    python benchmarks/replay.py [--table digits] [--replays 100] [--longer 10]

Every searcher pays, by the recorded clock, for each training: the training seconds until it stops
and the fixed cost of a run. It also pays for probes and confirmations. The configuration that it
would return is judged on seeds that no searcher saw. Its regret is its time to the target there
over the best cell's, minus 1. The searcher `ours` is the real search, on the table's clock.

With --longer, training takes so many times longer. Starting a run and probing a cell do not. The
best training of a noisy table takes --best-seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import recorded_tables
from hard_tasks import TASKS
from harness import RESULTS, machine, save
from recorded_tables import CONFIRM_SEEDS, METRIC, NEVER, SEARCH_SEEDS, Key, Row, Table

from rankzero import Choice, Experiment
from rankzero.confidence import half_width
from rankzero.config import flatten
from rankzero.events import Evaluated, Event, RunEnded, Status, StepsLogged
from rankzero.search_ranges import LogUniform
from rankzero.tuning.options import Pruner, Sampler, SearchOptions
from rankzero.tuning.probe import grid as ladder
from rankzero.tuning.probe import probe_map as probe
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.session import FIRST, Session
from rankzero.tuning.space import PRECISION, Space, narrowed
from rankzero.tuning.study import open_study
from rankzero.tuning.verdict.confirm import NEW_SEED
from rankzero.tuning.verdict.decide import Verdict

GRID_SEEDS = 3  # seeds per cell of the grid, as in a confirmation
# The seconds of a cell of the probe map with such short runs, by `rankzero probe`: see the README.
PROBE_SECONDS = 1.2
# The search waits until a trial's handle is readable. This one always is, since its end is closed.
_READABLE, _WRITER = multiprocessing.Pipe()
_WRITER.close()
Step = tuple[float, Key]  # cost so far, configuration that would be returned
FEWEST_SAVED = 40
SHARES = [number / 50 for number in range(1, 51)]


class ReplayLauncher:
    """Gives the search the recorded runs, and sums their cost."""

    def __init__(self, table: Table, space: Space, number: int) -> None:
        self.table, self.space, self.number, self.seconds = table, space, number, 0.0
        self.host: object = None

    def start(
        self, experiment: Experiment, name: str, processes: int | None = None
    ) -> ReplayRunning:
        key = key_of(self.table, self.space, experiment)
        asked = experiment.train.seed
        again = asked - self.table.own.train.seed
        luck = self.table.search_seed(self.number, experiment.lr, again)
        confirmed = self.table.confirm_seeds(self.number)
        seed = luck if again < NEW_SEED else confirmed[(again - NEW_SEED) % len(confirmed)]
        self.seconds += self.table.fixed_seconds
        return ReplayRunning(self, experiment, name, self.table.row(key, seed))


class ReplayRunning:
    """Replays a recorded run, one epoch at a time."""

    def __init__(
        self, launcher: ReplayLauncher, experiment: Experiment, name: str, row: Row
    ) -> None:
        self.name, self.has_ended, self._pruned = name, False, False
        self.handles, self.was_lost, self.is_starting = (_READABLE,), False, False
        self._launcher, self._goal = launcher, experiment.goal
        self._samples_per_second = row.samples_per_second
        self._stop_at_target, self._spent = experiment.train.limits.stop_at_target, 0.0
        self._events = launcher.table.journal(row, experiment.train.batch_size)

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
        end = RunEnded(0.0, status, "", None, {"samples_per_second": self._samples_per_second})
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
    chosen = flatten(experiment)
    return batch, tuple(chosen[name] for name in table.settings), nearest


def space_of(table: Table) -> Space:
    settings = {name: Choice(*values) for name, values in table.settings.items()}
    precisions = settings.pop(PRECISION, Choice("fp32")).options
    return Space(
        table.own,
        table.batch_sizes,
        precisions,
        LogUniform(table.factors[0], table.factors[-1]),
        table.exponent,
        settings,
    )


def ours(table: Table, number: int, **options: Any) -> list[Step]:
    """Run the real search on the table, with a budget of a quarter of the grid's cost."""
    return searched(table, number, budget(table), **options)[0]


def searched(
    table: Table,
    number: int,
    seconds: float,
    *,
    pruner: Pruner = "asha",
    probes: bool = True,
    confirm: bool = True,
    guesses: bool = True,
    sampler: Sampler = "tpe",
) -> tuple[list[Step], Verdict, Key]:
    """Run the real search on the table for so long. Return the verdict and its winner, too."""
    space = space_of(table)
    measured = probe_map(table, SEARCH_SEEDS[number % 2]) if probes else []
    if measured:
        space = narrowed(
            space,
            list(ladder.fastest(measured)),
            ladder.worth_searching(measured, space.precisions),
        )
    launcher = ReplayLauncher(table, space, number)
    launcher.seconds = spent = PROBE_SECONDS * len(measured)
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(dir=_fast()) as folder:
        study = open_study(
            f"journal:///{folder}/s.log", "s", sampler=sampler, pruner=pruner, seed=1000 * number
        )
        study.draw_from(space.parameters())
        study.note(FIRST, probe.guesses(space, measured) if guesses else [])

        def said(_text: str) -> None:
            known = [
                trial for trial in study.trials() if trial.feasible and trial.value is not None
            ]
            if known:
                best = min(known, key=lambda trial: trial.value or 0.0)
                steps.append(
                    (launcher.seconds, key_of(table, space, space.experiment(best.parameters)))
                )

        options = SearchOptions(trials=None, minutes=seconds / 60, challengers=3 if confirm else 0)
        # It has the methods of a launcher that the search calls.
        launchers: list[Any] = [launcher]
        session = Session(
            study, space, launchers, options, said, lambda: launcher.seconds, already_seconds=spent
        )
        found = session.run()
        chosen = next(trial for trial in study.trials() if trial.number == found.winner.trial)
        key = key_of(table, space, space.experiment(chosen.parameters))
        if confirm or not steps:
            steps.append((launcher.seconds, key))
    return steps, found, key


@functools.cache
def budget(table: Table) -> float:
    """Return a search's budget: a quarter of the grid's cost, or of 100 random trainings."""
    if table.has_precision:
        return _grid_seconds(table) / 4
    return statistics.median(random_search(table, number)[-1][0] for number in range(50)) / 4


def most_trials(table: Table) -> int:
    return 60 if table.has_precision else 100


def _grid_seconds(table: Table) -> float:
    return grid(table, 0)[-1][0]


def probe_map(table: Table, seed: int) -> list[ProbeResult]:
    """Return the probe map of the recorded speeds."""
    middle = min(table.factors, key=_distance)
    # The probe measures the user's own values of settings that it does not know.
    values = [(one,) for one in table.settings[PRECISION]] if table.has_precision else []
    return [
        ProbeResult(
            batch,
            batch // 2,
            each[0] if table.has_precision else "fp32",
            "ok",
            table.speed((batch, each, middle), seed),
            0.02,
            batch / table.speed((batch, each, middle), seed),
        )
        for each in values or [table.own_values]
        for batch in table.batch_sizes
    ]


def _distance(factor: float) -> float:
    return abs(math.log(factor))


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
    return _sequence(table, number, [draw.choice(table.keys) for _ in range(most_trials(table))])


def random_confirmed(table: Table, number: int) -> list[Step]:
    """Draw cells at random for three quarters of the budget; train the best three on new seeds."""
    limit, draw = 0.75 * budget(table), random.Random(1000 + number)
    searched = [step for step in random_search(table, number) if step[0] <= limit]
    spent = searched[-1][0] if searched else 0.0
    found = [
        (table.seconds_to_target(key, table.search_seed(number, count)), key)
        for count, key in enumerate(draw.choice(table.keys) for _ in searched)
    ]
    best = list(dict.fromkeys(key for _, key in sorted(found)))[:3]
    seeds = table.confirm_seeds(number)[:3]
    spent += sum(table.cost(key, one, to_target=True) for key in best for one in seeds)
    chosen = min(
        best,
        key=lambda key: statistics.geometric_mean(
            table.seconds_to_target(key, one) for one in seeds
        ),
    )
    return [*searched, (spent, chosen)]


def _sequence(table: Table, number: int, keys: Sequence[Key]) -> list[Step]:
    spent, best, steps = 0.0, (math.inf, keys[0]), list[Step]()
    for count, key in enumerate(keys):
        seed = table.search_seed(number, count)
        spent += table.cost(key, seed, to_target=True)
        best = min(best, (table.seconds_to_target(key, seed), key))
        steps.append((spent, best[1]))
    return steps


def tpe(table: Table, number: int, what: str) -> list[Step]:
    """Run Optuna's default sampler on the final quality, or on samples/s (of one epoch)."""
    spent, steps = 0.0, list[Step]()
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=number)
    )
    for _ in range(most_trials(table)):
        trial = study.ask()
        key, seed = _suggest(table, trial), table.search_seed(number, trial.number)
        if what == "quality":
            spent += table.cost(key, seed, to_target=False)
            value = -table.row(key, seed).points[-1][1]
        else:
            spent += table.fixed_seconds + table.row(key, seed).points[0][0]
            value = table.speed(key, seed)
        study.tell(trial, value)
        best = study.best_trial.params
        steps.append((spent, _key(table, best)))
    return steps


def two_objectives(table: Table, number: int) -> list[Step]:
    """Run Optuna's default sampler on samples/s and quality.

    Returns the fastest configuration of the Pareto front that reached the target.
    """
    spent, steps = 0.0, list[Step]()
    study = optuna.create_study(
        directions=["maximize", "maximize"], sampler=optuna.samplers.TPESampler(seed=number)
    )
    for _ in range(most_trials(table)):
        trial = study.ask()
        key, seed = _suggest(table, trial), table.search_seed(number, trial.number)
        spent += table.cost(key, seed, to_target=False)
        study.tell(trial, [table.speed(key, seed), -table.row(key, seed).points[-1][1]])
        front = [
            one for one in study.best_trials if -one.values[1] <= table.target
        ] or study.best_trials
        best = max(front, key=lambda one: one.values[0]).params
        steps.append((spent, _key(table, best)))
    return steps


def on_time(
    table: Table,
    number: int,
    sampler: optuna.samplers.BaseSampler,
    pruner: optuna.pruners.BasePruner,
    most: int | None = None,
) -> list[Step]:
    """Run Optuna on the time to the target, from the user's own configuration on.

    A trial that misses the target is worse than all that reach it, the more the further it is away.
    """
    spent, steps = 0.0, list[Step]()
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    batch, values, factor = _own(table)
    own = dict(zip(table.settings, values, strict=True))
    study.enqueue_trial({"batch": batch, **own, "factor": factor})
    for _ in range(most or most_trials(table)):
        trial = study.ask()
        key, seed = _suggest(table, trial), table.search_seed(number, trial.number)
        points = table.row(key, seed).points
        spent += table.fixed_seconds
        for epoch, (_, loss) in enumerate(points, start=1):
            trial.report(loss, epoch)
            if table.own.goal.reached(loss) or trial.should_prune():
                break
        seconds, value = points[epoch - 1]
        spent += seconds
        if table.own.goal.reached(value):
            study.tell(trial, table.seconds_to_target(key, seed))
        elif epoch < len(points):
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(trial, NEVER * (1 + min(value - table.target, 10.0)))
        done = [one for one in study.trials if one.value is not None]
        best = min(done, key=lambda one: one.value or 0.0, default=trial).params
        steps.append((spent, _key(table, best)))
    return steps


def _key(table: Table, parameters: dict[str, Any]) -> Key:
    values = tuple(parameters[name] for name in table.settings)
    return parameters["batch"], values, parameters["factor"]


def _suggest(table: Table, trial: optuna.Trial) -> Key:
    batch = trial.suggest_categorical("batch", table.batch_sizes)
    values = tuple(trial.suggest_categorical(*one) for one in table.settings.items())
    return batch, values, trial.suggest_categorical("factor", table.factors)


def _own(table: Table) -> Key:
    factor = min(table.factors, key=_distance)
    return table.own.train.batch_size, table.own_values, factor


def largest(table: Table, number: int) -> list[Step]:
    """Return the largest batch that fits, with the user's learning rate."""
    own, batch = table.own.train.batch_size, table.batch_sizes[-1]
    factor = min(
        table.factors, key=lambda known: abs(math.log(known / (own / batch) ** table.exponent))
    )
    return [(PROBE_SECONDS * len(table.batch_sizes), (batch, _own(table)[1], factor))]


def plateau(table: Table, number: int) -> list[Step]:
    """Return the smallest batch within 5 % of the peak speed, with a scaled learning rate."""
    measured = probe_map(table, SEARCH_SEEDS[number % 2])
    peak = max(one.samples_per_second for one in measured)
    chosen = min(
        (one for one in measured if one.samples_per_second >= 0.95 * peak),
        key=lambda one: one.batch_size,
    )
    values = (chosen.precision,) if table.has_precision else table.own_values
    middle = min(table.factors, key=_distance)
    return [(PROBE_SECONDS * len(measured), (chosen.batch_size, values, middle))]


def _tpe(number: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=number)


def _gp(number: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.GPSampler(seed=number)


SLOW = "GP on time"
"""A slow one. It runs only if `--only` names it."""
CONTESTANTS: dict[str, Callable[[Table, int], list[Step]]] = {
    "exhaustive grid": grid,
    "random": random_search,
    "random, best three confirmed": random_confirmed,
    "TPE on quality": lambda table, number: tpe(table, number, "quality"),
    "TPE on throughput": lambda table, number: tpe(table, number, "throughput"),
    "TPE on both": two_objectives,
    "TPE on time": lambda table, number: on_time(
        table, number, _tpe(number), optuna.pruners.NopPruner()
    ),
    "TPE on time, ASHA": lambda table, number: on_time(
        table, number, _tpe(number), optuna.pruners.SuccessiveHalvingPruner()
    ),
    "TPE on time, Hyperband": lambda table, number: on_time(
        table, number, _tpe(number), optuna.pruners.HyperbandPruner()
    ),
    SLOW: lambda table, number: on_time(table, number, _gp(number), optuna.pruners.NopPruner(), 40),
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
    regrets = [(spent, regret_of(table, key)) for spent, key in steps]
    at_budget = [regret for spent, regret in regrets if spent <= budget]
    return {
        "regret_at_budget": at_budget[-1] if at_budget else math.inf,
        "regret": regrets[-1][1],
        "cost": regrets[-1][0],
        "cost_to_5_percent": _cost_to_5_percent(table, steps),
        "area": area(table, steps, budget),
    }


def regret_of(table: Table, key: Key) -> float:
    return table.truths[key] / min(table.truths.values()) - 1


def _cost_to_5_percent(table: Table, steps: Sequence[Step]) -> float:
    bad = [number for number, (_, key) in enumerate(steps) if regret_of(table, key) > 0.05]
    # After the last bad step, the regret stays at or below 5 %.
    good = steps[1 + max(bad, default=-1) :]
    return good[0][0] if good else math.inf


def area(table: Table, steps: Sequence[Step], budget: float) -> float:
    """Return the mean regret up to the budget, of 1 at most: the area under the anytime curve."""
    costs = [budget * (number + 0.5) / 200 for number in range(200)]
    return statistics.fmean(min(regret_at(table, steps, cost), 1.0) for cost in costs)


def regret_at(table: Table, steps: Sequence[Step], cost: float) -> float:
    """Return the regret after this cost, or infinity before the first configuration."""
    known = [key for spent, key in steps if spent <= cost]
    return regret_of(table, known[-1]) if known else math.inf


def percentile_90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the median regret against the cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        shown = [min(max(regret, 0.005), 10.0) for regret in curve]
        axes.plot(
            SHARES,
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
        xlabel="cost, as a share of the grid's, or of 100 random trainings",
        ylabel="median regret in time to target",
        title="Regret of the configuration that a searcher would return",
    )
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=110)


USUAL = [name for name in CONTESTANTS if name != SLOW]


@dataclasses.dataclass(frozen=True)
class Replay:
    """What one replay of a searcher showed."""

    judged: dict[str, float]
    curve: list[float]
    """The regret after each fiftieth of the grid's cost, or of 100 random trainings."""


def replays_of(name: str, table: Table, count: int, jobs: int) -> list[Replay]:
    """Replay a searcher, in `jobs` processes."""
    one = functools.partial(_replay, name, table)
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        return pool.map(one, range(count), chunksize=5)


def _replay(name: str, table: Table, number: int) -> Replay:
    quarter, steps = budget(table), CONTESTANTS[name](table, number)
    curve = [regret_at(table, steps, 4 * quarter * share) for share in SHARES]
    return Replay(judge(table, steps, quarter), curve)


def summary(replays: Sequence[Replay]) -> dict[str, Any]:
    """Return medians and other figures of a searcher's replays, and those of each replay."""
    judged = [one.judged for one in replays]
    regrets = [one["regret"] for one in judged]
    luck = random.Random(0)
    medians = sorted(statistics.median(luck.choices(regrets, k=len(regrets))) for _ in range(1000))
    return {
        **{key: statistics.median(one[key] for one in judged) for key in judged[0]},
        "regret_90": percentile_90(regrets),
        "share_within_5_percent": statistics.fmean(regret <= 0.05 for regret in regrets),
        "replays": len(replays),
        # Of 1,000 draws with replacement (the bootstrap's percentiles).
        "regret_interval": [medians[25], medians[974]],
        "regrets": [round(regret, 3) for regret in regrets],
        "areas": [round(one["area"], 4) for one in judged],
        "curve": [
            statistics.median(each) for each in zip(*(r.curve for r in replays), strict=True)
        ],
    }


def add_differences(found: dict[str, dict[str, Any]]) -> None:
    """Add each searcher's mean area over that of `ours`, with half its 95 % interval."""
    own = found.get("ours", {}).get("areas", [])
    for one in found.values():
        one.pop("area_over_ours", None)
        areas = one.get("areas", [])
        if own and len(areas) == len(own):
            over = [area - mine for area, mine in zip(areas, own, strict=True)]
            one["area_over_ours"] = [statistics.fmean(over), half_width(over)]


def earlier(path: Path, task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the kept replays of the same task. Those of older versions are medians only."""
    before = json.loads(path.read_text()) if path.exists() else {}
    if not task.items() <= before.items():
        return {}
    return {name: one for name, one in before["contestants"].items() if name in CONTESTANTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=("digits", *TASKS), default="digits")
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--longer", type=float, default=1.0, help="of digits")
    parser.add_argument("--best-seconds", type=float, default=60.0, help="of the other tables")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=USUAL)
    options = parser.parse_args()
    is_hard = options.table != "digits"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    table = (
        recorded_tables.hard(options.table, options.best_seconds)
        if is_hard
        else recorded_tables.digits(options.longer)
    )
    quarter, best = budget(table), min(table.truths.values())
    close = sum(truth <= 1.05 * best for truth in table.truths.values())
    print(
        f"the grid: {len(table.keys)} cells, {close} of them within 5 % of the best, "
        f"{GRID_SEEDS} seeds, {_grid_seconds(table):.0f} s; the budget: {quarter:.0f} s"
    )
    longer = "" if options.longer == 1 else f"_{options.longer:g}_times_longer"
    known = RESULTS / f"replay{f'_{options.table}' if is_hard else ''}{longer}.json"
    task = {"target": table.target, "best_seconds": best, "budget_seconds": quarter}
    found = earlier(known, task)
    for name in options.only:
        replays = replays_of(name, table, options.replays, options.jobs)
        found[name] = {"machine": machine(), **summary(replays)}
        shown = ((key, found[name][key]) for key in (*replays[0].judged, "regret_90"))
        print(f"{name:36}" + "  ".join(f"{key} {value:8.3f}" for key, value in shown), flush=True)
        if options.replays >= FEWEST_SAVED:
            # Each says when it was replayed: it takes minutes, and is replayed alone again.
            add_differences(found)
            save(known.stem, cells=len(table.keys), near_best=close, **task, contestants=found)
            curves = {name: one["curve"] for name, one in found.items() if "curve" in one}
            draw(curves, known.with_suffix(".png"))


def _fast() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
