"""Machines that join a training, or that are one too many, as commands on addresses of loopback."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rankzero.events import RunStarted
from rankzero.run_store.folder import RunFolder
from support.commands import TINY, Command, events, free_port, losses, wait_until

ENDLESS = ("step_seconds=0.02", "train.epochs=1000", "train.log_every=2", "--offline")
# As texts, the second is less than the first: torchrun would take it for the first machine.
FIRST, SECOND = ("--local-addr", "127.0.0.2"), ("--local-addr", "127.0.0.10")


def starts(folder: RunFolder) -> list[RunStarted]:
    return [event for event in events(folder) if isinstance(event, RunStarted)]


@pytest.mark.cluster
@pytest.mark.timeout(200)
@pytest.mark.parametrize("disk", ["own", "shared", "shared, and the command of a job"])
def test_a_machine_that_joins_continues_the_run(rankzero: Command, disk: str) -> None:
    words = (
        *("train", TINY, "--nproc", 1, "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}", *ENDLESS),
        *(() if disk == "own" else ("--name", "shared")),
        *(() if disk in ("own", "shared") else ("--resume-if-there",)),
    )
    first = rankzero.start(*words, *FIRST)
    folder = rankzero.wait_for_step(10)
    second = rankzero.start(*words, *SECOND, *(("--dir", "b") if disk == "own" else ()))
    wait_until(lambda: len(starts(folder)) == 2, 100.0)
    begun, again = starts(folder)
    assert (begun.step, begun.params["world_size"]) == (0, "1")
    assert again.step >= 10 and again.params["world_size"] == "2"
    wait_until(lambda: max(losses(folder)) > again.step + 4)
    second.send_signal(signal.SIGTERM)
    outputs = [one.communicate(timeout=100)[0] for one in (first, second)]
    assert [first.returncode, second.returncode] == [75, 75], outputs
    # The machine that has the run shows it, before and after.
    assert "KILLED" in outputs[0] and "KILLED" not in outputs[1], outputs
    assert [*rankzero.folder.glob("*/runs/*/events.jsonl")] == [folder.events]


@pytest.mark.timeout(200)
def test_a_command_too_many_and_another_training_wait_for_nothing_without_a_word(
    rankzero: Command, tmp_path: Path
) -> None:
    machines = ("--nproc", 1, "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    words = ("train", TINY, *machines, *ENDLESS)
    both = [rankzero.start(*words, "--dir", f"node_{number}") for number in (0, 1)]
    wait_until(lambda: [*rankzero.folder.glob("node_*/runs/*/events.jsonl")], 100.0)
    third = rankzero.start(*words, "--dir", "node_2")
    layered = TINY.with_name("layered.py")
    code, output = rankzero("train", layered, *machines, "--offline", "--dir", "other")
    assert code == 1 and "'tiny.py' trains at" in output and "--rdzv-endpoint" in output, output
    assert third.stdout is not None
    assert "2 machines train tiny.py already: this one waits" in third.stdout.readline()
    both[0].send_signal(signal.SIGTERM)
    outputs = [one.communicate(timeout=100)[0] for one in (*both, third)]
    assert [one.returncode for one in (*both, third)] == [75, 75, 1], outputs
    assert "did not need this one" in outputs[2] and "Traceback" not in outputs[2], outputs
