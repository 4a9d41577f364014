"""Many runs at once."""

from __future__ import annotations

from rankzero.catalog.lookup import folders
from support.stores import list_runs
from torture import curves, promises
from torture.ground import DEADLINE_SECONDS, Broken, Command, Ground, wait_for
from torture.promises import Curves
from torture.scenarios.training import TINY, ends, kill_one_of

STEPS = 20
SMALL = (
    "--nproc",
    1,
    f"train.steps={STEPS}",
    "train.log_every=4",
    "train.eval_every=10",
    "train.checkpoints.keep=1",
    "train.mlflow.log_pictures=true",
)
SECONDS_EACH = 30.0


def crowd(ground: Ground, _: Curves) -> None:
    """Many runs on one embedded store, begun in the same second: each is another, each is whole. One dies, perhaps."""
    asked = [ground.start("train", TINY, *SMALL) for _ in range(ground.crowd)]
    named = [ground.start("train", TINY, *SMALL, "--run-name", "same") for _ in range(2)]
    ground.note_fault(f"{len(asked) + len(named)} runs at once")
    killed = kill_one_of(ground, "courier") if ground.random.random() < 0.5 else False
    _all_end([*asked, *named])
    for command in asked:
        ends(command, 0)
    _one_has_the_name(named)
    seconds = SECONDS_EACH * ground.crowd
    promises.no_process_is_left(ground, seconds, seconds)
    promises.no_run_is_running(ground)
    _all_are_whole(ground, 1 + len(asked))
    _none_was_refused([*asked, *named], killed)


def _all_end(commands: list[Command]) -> None:
    """Wait longer for many."""
    if not wait_for(
        lambda: not any(one.running for one in commands),
        DEADLINE_SECONDS + SECONDS_EACH * len(commands),
    ):
        raise Broken(
            f"hang: {sum(one.running for one in commands)} of {len(commands)} runs have no end"
        )


def _one_has_the_name(named: list[Command]) -> None:
    """Of two that ask for the same name one gets it, and the other is told."""
    codes = sorted(command.wait() for command in named)
    told = [command.tail() for command in named if "already" in command.tail()]
    if codes != [0, 2] or len(told) != 1:
        raise Broken(
            f"wrong status: two runs of one name ended with {codes}: {' / '.join(one.tail() for one in named)}"
        )


def _all_are_whole(ground: Ground, wanted: int) -> None:
    """There are as many runs as were begun, all of them the same training, each complete here and in MLflow."""
    runs = folders(ground.runs_folder)
    if len(runs) != wanted:
        raise Broken(f"lost: {wanted} runs were begun, {len(runs)} are there")
    reference = curves.latest(runs[0])
    for run in runs:
        promises.nothing_is_lost(run, reference, steps=STEPS)
        promises.status_is(run, "FINISHED")
        promises.checkpoints_are_intact(run)
    found = list_runs(ground.store)
    if len({one.run_id for one in found}) != wanted or len({one.name for one in found}) != wanted:
        raise Broken(f"lost: {wanted} runs were begun, MLflow has {len(found)}")


def _none_was_refused(commands: list[Command], killed: bool) -> None:
    locked = [
        command.tail() for command in commands if "database is locked" in command.output.read_text()
    ]
    if locked and not killed:
        raise Broken(f"lost: the store was locked: {locked[0]}")
