"""Run two or three candidates interleaved in one pair of processes.

    torchrun --nproc-per-node 2 side_by_side.py Mlp 9 3 '{"bare": null, "tracked": "URI"}' out.json

The order of two is one, other, other, one. The order of three is one, other, third, other, one.

A candidate without a tracking URI is the bare loop. Each tracked turn is a complete run with its
own recorder and courier. All candidates share one pair of processes, because a new pair runs up to
15 % faster or slower than the previous one.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import bare
import torch
import torch.distributed as dist
import workloads
from harness import step_times

from rankzero import config, ranks
from rankzero.catalog.lookup import mlflow_id
from rankzero.events import StepsLogged
from rankzero.launch.request import JobRequest
from rankzero.mlflow_store.client import MlflowRuns
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.run_store.journal import read_all
from rankzero.tracking import delivery_status
from rankzero.training import worker
from rankzero.training.distributed.world import World
from rankzero.training.stop import StopRequest

# By the number of candidates. The symmetry cancels a drift of the machine's speed.
ORDERS = {2: (0, 1, 1, 0), 3: (0, 1, 2, 1, 0)}
TRAINING = "training"  # a file next to the result with the candidate that trains now
# A pause before each turn, because a shared machine runs faster for a while after it was idle.
REST_SECONDS = 4.0
DELIVERY_SECONDS = 300.0  # longest wait for the delivery without progress


@dataclasses.dataclass(frozen=True)
class Turn:
    """One candidate's steps per second (all steps, and all but the first fifth) and last loss."""

    who: str
    whole: float
    steady: float
    loss: float


def turn(who: str, times: list[float], loss: float) -> Turn:
    return Turn(who, rate(times, 0), rate(times, len(times) // 5), loss)


def rate(times: list[float], first: int) -> float:
    """Return steps per second from step `first` (0-based) on."""
    return (len(times) - 1 - first) / (times[-1] - times[first])


def tracked(
    name: str, steps: int, runs: Path, uri: str, world: World, who: str
) -> tuple[list[float], float]:
    """Make a run. Return the steps' end times and the last loss, once MLflow has every step."""
    label = f"{name}-{time.monotonic_ns()}"
    experiment = config.override(
        getattr(workloads, name)(),
        {"train.steps": steps, "train.eval_every": steps, "train.mlflow.log_model": False},
    )
    request = JobRequest(
        experiment_file=f"{workloads.__file__}:{name}",
        config=config.to_yaml(experiment),
        runs=str(runs),
        identity=Identity(label, label, name, uri),
        environment={},
        failures=str(runs / "failures"),
    )
    with (
        told(runs.parent / TRAINING, who) if world.ranks.first else contextlib.nullcontext(),
        contextlib.ExitStack() as watched,
    ):
        worker.attempt(request, world, StopRequest(), watched)
    return ([], 0.0) if not world.ranks.first else found(runs, steps)


def found(runs: Path, steps: int) -> tuple[list[float], float]:
    """Return the newest run's times and last loss. Raises AssertionError if MLflow lacks a step."""
    folder = RunFolder(max(runs.glob("*/run.json"), key=lambda path: path.stat().st_mtime).parent)
    assert delivery_status.wait(folder, DELIVERY_SECONDS).done, "not delivered"
    assert steps_in_mlflow(folder) == list(range(1, steps + 1)), "MLflow does not have every step"
    losses = [
        event.metrics["train/loss"]
        for event in read_all(folder.events)
        if isinstance(event, StepsLogged) and "train/loss" in event.metrics
    ]
    return step_times(folder.events), losses[-1][-1]


@contextlib.contextmanager
def told(path: Path, who: str) -> Iterator[None]:
    """Write the candidate that trains, for the thread that injects faults into its turns."""
    path.write_text(who)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def steps_in_mlflow(folder: RunFolder) -> list[int]:
    points = MlflowRuns(folder.identity.tracking_uri).history(mlflow_id(folder) or "", "train/loss")
    return [point.step for point in points]


def main(name: str, steps: int, blocks: int, uris: dict[str, str | None], out: str) -> None:
    dist.init_process_group("gloo")
    world, turns = World(ranks.detect(), torch.device("cpu")), []
    runs = Path(out).parent / "runs"
    order = ORDERS[len(uris)]
    for number in (order[0], *order * blocks):
        who, uri = list(uris.items())[number]
        time.sleep(REST_SECONDS)
        dist.barrier()
        times, loss = (
            bare.loop(name, steps) if uri is None else tracked(name, steps, runs, uri, world, who)
        )
        if world.ranks.first:
            turns.append(turn(who, times, loss))
            print(f"  {name} {turns[-1]}", flush=True)
    dist.barrier()
    if world.ranks.first:
        # The first turn is a warm-up.
        Path(out).write_text(json.dumps([dataclasses.asdict(one) for one in turns[1:]]))
    bare.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5])
