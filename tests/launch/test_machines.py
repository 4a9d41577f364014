"""The machines of a run: what launchers give, and the address that others reach."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
import socket
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from rankzero.errors import UserError
from rankzero.launch import agent, machines
from rankzero.launch.machines import Machines, meet
from rankzero.launch.signals import SignalForwarder
from support.commands import free_port
from support.two_machines import add_up

STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
}


@pytest.mark.parametrize(("text", "count"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4))])
def test_count_of_machines(text: str, count: tuple[int, int]) -> None:
    assert machines.count_of(text) == count


@pytest.mark.parametrize("text", ["0", "3:2", "two", "1:2:3", ""])
def test_count_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        machines.count_of(text)


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("gpu1", "gpu1"),
        ("a-1,a-2", "a-1"),
        ("gpu[01-03,7],login", "gpu01"),
        ("n[2,4]-ib", "n2-ib"),
    ],
)
def test_first_machine_of_slurms_list(listed: str, first: str) -> None:
    step = machines.of_slurm(STEP | {"SLURM_STEP_NODELIST": listed})
    assert step is not None and step.endpoint.startswith(f"{first}:")


def test_tasks_of_a_slurm_step_are_machines_of_one_run() -> None:
    step, again = machines.of_slurm(STEP), machines.of_slurm({**STEP, "SLURM_RESTART_COUNT": "1"})
    assert step is not None and again is not None
    host, _, port = step.endpoint.partition(":")
    assert (step.least, step.most, host, step.number) == (2, 2, "gpu03", 1)
    assert 20_000 <= int(port) < 30_000
    assert (step.job, again.job) == ("41.0.0", "41.0.1")


@pytest.mark.parametrize("changes", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": None}])
def test_one_task_and_the_script_of_a_job_are_no_step_of_many(changes: dict[str, None]) -> None:
    environ = {key: value for key, value in (STEP | changes).items() if value is not None}
    assert machines.of_slurm(environ) is None


@pytest.mark.parametrize("tasks", ["2", "8"])
def test_a_shell_of_srun_pty_is_one_machine(tasks: str) -> None:
    assert machines.of_slurm(STEP | {"SLURM_STEP_NUM_TASKS": tasks}, typed=True) is None


@pytest.mark.parametrize(("shell", "typed"), [(["bash", "-ic"], True), (["bash", "-c"], False)])
def test_a_command_of_an_interactive_shell_is_typed(shell: list[str], typed: bool) -> None:
    code = "from rankzero.launch import machines; print('typed', machines.is_typed())"
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(shell[0], [*shell, f'{sys.executable} -c "{code}"; true'])  # noqa: S606
    output = b""
    with contextlib.suppress(OSError):  # the terminal has closed
        while part := os.read(terminal, 1024):
            output += part
    os.close(terminal)
    os.waitpid(child, 0)
    assert f"typed {typed}".encode() in output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "--ntasks-per-node=1"),
        ({"SLURM_STEP_NODELIST": ""}, "give --nnodes"),
    ],
)
def test_a_step_that_cannot_be_one_run_is_refused(changes: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        machines.of_slurm(STEP | changes)


@pytest.mark.parametrize(
    ("endpoint", "divided"),
    [
        ("[fd77::1]", ("fd77::1", 29400)),
        ("[fd77::1]:7", ("fd77::1", 7)),
        ("10.0.0.5", ("10.0.0.5", 29400)),
        ("10.0.0.5:7", ("10.0.0.5", 7)),
        ("first:7", ("first", 7)),
    ],
)
def test_an_endpoint_may_be_an_address_with_colons(endpoint: str, divided: object) -> None:
    assert machines._divided(endpoint) == divided


@pytest.mark.parametrize("endpoint", ["fd77::1", "fd77::1:8080", "first:x"])
def test_an_endpoint_that_may_be_read_in_two_ways_is_refused(endpoint: str) -> None:
    with pytest.raises(UserError, match=r"write HOST:PORT or \[ADDRESS\]:PORT"):
        machines._divided(endpoint)


def test_who_serves_the_rendezvous() -> None:
    asked = Machines(2, 2, "127.0.0.1:7", address=None)
    here, second = meet(asked), meet(dataclasses.replace(asked, number=1))
    assert (here.endpoint, here.address, here.settings) == ("localhost:7", "127.0.0.1", {})
    assert second.endpoint == "127.0.0.1:7"
    assert second.settings == {"is_host": "false", "read_timeout": "600"}
    assert (here.number, second.number) == (0, 1)
    chosen = meet(Machines(2, 2, "[::1]", address="10.1.2.3", settings={"is_host": "true"}))
    assert (chosen.endpoint, chosen.address) == ("[::1]:29400", "10.1.2.3")
    # As behind a NAT, where no address of the machine is that of the endpoint.
    behind = meet(Machines(2, 2, "127.0.0.1:7", "job", None, {"is_host": "False"}))
    assert (behind.number, behind.settings["read_timeout"]) == (None, "600")
    assert meet(dataclasses.replace(behind, settings={"is_host": "Yes"})).number == 0
    assert meet(Machines()) == Machines()


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Machines(2, 2, "nobody.invalid:7"), "no machine is called nobody.invalid"),
        (Machines(2, 2, "127.0.0.1:port"), "write HOST:PORT"),
        (Machines(2, 2, "127.0.0.1:7", settings={"timeout": "1"}), "--rdzv-conf has no timeout"),
        (Machines(2, 2, "127.0.0.1:7", settings={"join_timeout": "x"}), "=x: give a number"),
        (Machines(2, 2, "127.0.0.1:7", settings={"read_timeout": "0.5"}), "give a number"),
        (Machines(2, 2, "127.0.0.1:7", settings={"is_host": "maybe"}), "give true or false"),
    ],
)
def test_machines_that_cannot_meet(asked: Machines, says: str) -> None:
    with pytest.raises(UserError, match=says):
        meet(asked, name_seconds=0.01)


def test_a_machine_waits_for_a_name_as_long_as_for_the_others() -> None:
    begun = time.monotonic()
    with pytest.raises(UserError, match="no machine is called"):
        meet(Machines(2, 2, "nobody.invalid:7", settings={"join_timeout": "1"}))
    assert time.monotonic() - begun < 30  # without the setting, it waits for a minute


def test_fewer_machines_than_the_most_begin(tmp_path: Path) -> None:
    patience = {"last_call_timeout": "1"}
    alone = meet(Machines(1, 2, f"127.0.0.1:{free_port()}", "few", None, patience))
    numbers: list[int] = []
    with SignalForwarder() as signals:
        topology = agent.Topology(2, machines=alone)
        result = agent.run(topology, add_up, "few", tmp_path / "logs", signals, numbers.append)
    assert (result.status, numbers) == ("few 3 127.0.0.1", [0])


def test_a_launch_that_finds_no_other_machine_names_the_place_and_the_command(
    tmp_path: Path,
) -> None:
    with socket.socket() as other, SignalForwarder() as signals:
        other.bind(("", 0))
        for port, says in (
            (other.getsockname()[1], "no rendezvous answers at localhost:{port} (The client"),
            (free_port(), "fewer than 2 came to localhost:{port} in 2 s: start the same command"),
        ):
            patience = {"join_timeout": "2", "read_timeout": "1"}
            place = meet(Machines(2, 2, f"127.0.0.1:{port}", "none", None, patience))
            topology = agent.Topology(1, machines=place)
            result = agent.run(topology, add_up, "none", tmp_path / "logs", signals)
            assert result.reason.startswith(
                f"the machines did not find each other: {says.format(port=port)}"
            )


def test_a_machine_that_is_lost_later_is_no_matter_of_ports() -> None:
    lost = RendezvousConnectionError("See inner exception for details.")
    lost.__cause__ = BrokenPipeError("Broken pipe")
    why = agent._why(lost, Machines(2, 2, "first:29400"), have_met=True)
    assert why.startswith("no rendezvous answers at first:29400 (Broken pipe): continue the run by")
    lost.__cause__ = TimeoutError()
    why = agent._why(lost, Machines(2, 2, "first:29400"), have_met=True)
    assert "(TimeoutError): continue the run by" in why
