"""Many runs at the same time."""

from __future__ import annotations

from rankzero.catalog.lookup import folders
from support.stores import list_runs
from torture import curves, promises
from torture.ground import DEADLINE_SECONDS, Broken, Command, Ground, wait_for
from torture.promises import Curves
from torture.scenarios.training import TINY, ends, kill_one_of

STEPS = 20
SMALL = (
    *("--nproc", 1, f"train.steps={STEPS}", "train.log_every=4", "train.eval_every=10"),
    *("train.checkpoints.keep=1", "train.mlflow.log_pictures=true"),
)
SECONDS_EACH = 30.0
LATER_CROWD = 12


def crowd(ground: Ground, _: Curves) -> None:
    """Start many runs on one embedded store in the same second. Half the time, kill a courier."""
    # A crowd has the machine to itself, so only the campaign's first one is as large as allowed.
    size = ground.crowd if ground.turn.number == 0 else min(ground.crowd, LATER_CROWD)
    asked = [ground.start("train", TINY, *SMALL) for _ in range(size)]
    named = [ground.start("train", TINY, *SMALL, "--run-name", "same") for _ in range(2)]
    ground.note_fault(f"{len(asked) + len(named)} runs at once")
    killed = kill_one_of(ground, "courier") if ground.random.random() < 0.5 else False
    _all_end([*asked, *named])
    for command in asked:
        ends(command, 0)
    _one_has_the_name(named)
    seconds = SECONDS_EACH * size
    promises.no_process_is_left(ground, seconds, seconds)
    promises.no_run_is_running(ground)
    _all_are_whole(ground, 1 + len(asked))
    _none_was_refused([*asked, *named], killed)


def _all_end(commands: list[Command]) -> None:
    """Wait for all commands, longer for more of them."""
    if not wait_for(
        lambda: not any(one.running for one in commands),
        DEADLINE_SECONDS + SECONDS_EACH * len(commands),
    ):
        raise Broken(
            f"hang: {sum(one.running for one in commands)} of {len(commands)} runs do not end"
        )


def _one_has_the_name(named: list[Command]) -> None:
    """Check that one of two runs gets the name, and that the other is refused with the reason."""
    codes = sorted(command.wait() for command in named)
    refused = [command for command in named if "already" in command.tail()]
    if codes != [0, 2] or len(refused) != 1:
        tails = " / ".join(one.tail() for one in named)
        raise Broken(f"wrong status: two runs of one name ended with {codes}: {tails}")


def _all_are_whole(ground: Ground, wanted: int) -> None:
    """Check that each started run is complete, on the disk and in MLflow, with equal metrics."""
    runs = folders(ground.runs_folder)
    if len(runs) != wanted:
        raise Broken(f"lost: {wanted} runs were started, {len(runs)} exist")
    reference = curves.latest(runs[0])
    for run in runs:
        promises.nothing_is_lost(run, reference, steps=STEPS)
        promises.status_is(run, "FINISHED")
        promises.checkpoints_are_intact(run)
    found = list_runs(ground.store)
    if len({one.run_id for one in found}) != wanted or len({one.name for one in found}) != wanted:
        raise Broken(f"lost: {wanted} runs were started, MLflow has {len(found)}")


def _none_was_refused(commands: list[Command], killed: bool) -> None:
    locked = [
        command.tail() for command in commands if "database is locked" in command.output.read_text()
    ]
    if locked and not killed:
        raise Broken(f"lost: the store was locked: {locked[0]}")
