"""Trials of a remote host, without a search around them."""

from __future__ import annotations

from pathlib import Path

from rankzero.catalog import lookup
from rankzero.config import override
from rankzero.experiment import Experiment
from rankzero.launch.agent import Topology
from rankzero.launch.request import make_folder
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tuning.options import default_storage
from rankzero.tuning.places.remote_host import RemoteHost
from rankzero.tuning.study import find_study
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.follower import run_alone
from rankzero.tuning.trials.launcher import LaunchedTrial, TrainLauncher
from rankzero.tuning.verdict.confirm import CONFIRMATIONS
from support.commands import TINY, last_end, losses, wait_until

# A search of values that do not depend on time, so that two of them are equal.
TIMELESS = (
    *("search", str(TINY), "--name", "s", "--no-probe", "--pruner", "none", "--seeds", "2"),
    *("--objective", "quality", "--trial-minutes", "5", "--trials", "4", "--challengers", "1"),
)
QUICK = {"train.epochs": "1"}
ENDLESS = {"train.steps": 100_000, "step_seconds": 0.02}


def assert_same_results(one: Path, other: Path) -> None:
    """Check that two folders have the same search of `TIMELESS`, to its verdict."""
    trials, confirmed, winner = _results(one)
    trials_of_other, confirmed_of_other, winner_of_other = _results(other)
    assert trials == trials_of_other
    assert winner == winner_of_other
    assert "batch" in winner
    assert confirmed == confirmed_of_other and len(confirmed) >= 4


def _results(folder: Path) -> tuple[list[object], dict[object, float], str]:
    """Return the trials, the confirmation runs' values, and the verdict's configuration."""
    study = find_study(default_storage(folder / "mlruns"), "s")
    trials = [(one.parameters, one.state, one.value) for one in study.trials()]
    confirmed = study.facts[CONFIRMATIONS]
    values = {(one["trial"], one["seed"]): one["value"] for one in confirmed}
    end = last_end(lookup.require(folder / "mlruns" / "runs", "s"))
    return [*trials], values, end.reason.partition("accuracy: ")[2].partition(". ")[0]


def launcher_for(host: RemoteHost, folder: Path) -> TrainLauncher:
    """Return a launcher whose study and trials are below `folder`."""
    uri = f"sqlite:///{folder}/mlruns/mlflow.db"
    identity = Identity("study", "0" * 32, "tiny", uri, experiment_file=str(TINY))
    return TrainLauncher(host, make_folder(folder / "runs", identity), Topology(1), {})


def tiny(host: RemoteHost) -> Experiment:
    return describe.mirrored(host.describe(describe.Question(str(TINY), QUICK, 1)))


def started(launcher: TrainLauncher, experiment: Experiment, name: str) -> LaunchedTrial:
    """Start an endless trial, and wait until some steps of it have come over."""
    trial = launcher.start(override(experiment, ENDLESS), name)
    wait_until(lambda: trial.new_events() is not None and len(losses(run(launcher, name))) > 5, 100)
    return trial


def ended(trial: LaunchedTrial) -> None:
    """Wait until a trial has ended."""
    wait_until(lambda: trial.new_events() is not None and trial.has_ended, 100)
    trial.close()


def assert_a_prune_stops_it(launcher: TrainLauncher, experiment: Experiment) -> None:
    """Check that all processes of a pruned trial stop, with the reason in its journal."""
    trial = started(launcher, experiment, "pruned")
    trial.prune("cannot win")
    ended(trial)
    end = last_end(run(launcher, "pruned"))
    assert end.status == "KILLED" and end.reason.endswith(": cannot win") and not trial.was_lost


def run(launcher: TrainLauncher, name: str) -> RunFolder:
    return RunFolder(launcher.study.path.parent / name)


def assert_the_next_trains_elsewhere(
    launcher: TrainLauncher, experiment: Experiment, trial: LaunchedTrial, name: str
) -> None:
    """Check that a trial was lost with its machine, and that another one trains."""
    ended(trial)
    assert trial.was_lost and last_end(run(launcher, name)).status == "FAILED"
    assert run_alone(launcher, experiment, "again").state == "COMPLETE"
