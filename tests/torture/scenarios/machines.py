"""Two machines train one run: one of them is lost, the link is cut, or one is preempted.

The machines are namespaces. Each has its own network, name and folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from rankzero.errors import FAILED, FINISHED, RESUMABLE
from torture import promises
from torture.ground import MARK, Broken, Command, Ground, NotRun, wait_for
from torture.promises import Curves
from torture.room import shared_memory
from torture.scenarios.training import (
    EVERY,
    SETTINGS,
    STEPS,
    TINY,
    finished,
    finished_without_sync,
    is_consistent,
    the_run,
)

FIRST, SECOND = "first", "second"
MEETING = ("--nnodes", 2, "--rdzv-endpoint", "10.77.0.1:29400")
VICTIMS = ("rank", "launcher", "machine")
# Seconds without a link. None: it stays cut until both commands have ended.
CUTS = (2.0, 8.0, 20.0, None)
# Until both commands have ended after a fault, and MLflow has the status.
STATUS_SECONDS = 120.0
HANG_MINUTES = 0.3
SCRIPT = """
set -e
hostname first
ip link set lo up
unshare --net --uts sh -c 'hostname second; ip link set lo up; exec sleep infinity' &
second=$!
until [ "$(readlink /proc/$second/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add eth0 type veth peer name eth0 netns $second
ip address add 10.77.0.1/24 dev eth0
ip link set eth0 up
nsenter --target $second --net ip address add 10.77.0.2/24 dev eth0
nsenter --target $second --net ip link set eth0 up
echo $second
exec sleep infinity
"""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two machines, by a process that holds the namespaces of each."""

    ground: Ground
    holders: Mapping[str, int]

    def start(self, machine: str, *words: object) -> Command:
        """Start a command on a machine. Only the store is on a disk that both share."""
        folder = self.ground.runs_folder.parent
        if machine == SECOND:
            folder = self.ground.folder / SECOND / "mlruns"
        enter = ("nsenter", f"--target={self.holders[machine]}", "--net", "--uts")
        return self.ground.start(*words, "--dir", folder, inside=enter)

    def both(self, *words: object) -> dict[str, Command]:
        """Start a command on both machines."""
        return {machine: self.start(machine, *words, *MEETING) for machine in self.holders}

    def processes(self, machine: str) -> list[psutil.Process]:
        """Return the scenario's processes on a machine."""
        place = _network(self.holders[machine])
        return [one for one in self.ground.processes() if _network(one.pid) == place]

    def link(self, state: str) -> None:
        """Set the link between the machines up or down."""
        words = ["nsenter", f"--target={self.holders[FIRST]}", "--net"]
        subprocess.run([*words, "ip", "link", "set", "eth0", state], check=True)


def lost_machine(ground: Ground, reference: Curves) -> None:
    """Kill a rank, the launcher or all processes of one machine: both end, and a resume finishes.

    The recorder of the first machine brings the status to MLflow, unless it is killed, too.
    """
    victim, machine = ground.next_pair(VICTIMS, (FIRST, SECOND))
    with _two_machines(ground) as pair:
        commands = _training(pair, "step_seconds=0.05")
        _kill(pair, victim, machine)
        _all_end(commands, {FAILED, RESUMABLE, -signal.SIGKILL})
        promises.no_process_is_left(ground)
        if victim == "machine":
            # A real machine's shared memory goes with it.
            ground.shared_memory |= shared_memory()
        if (victim, machine) == ("machine", FIRST):
            # Only this machine knows that its processes are gone.
            _all_end({FIRST: pair.start(FIRST, "sync")}, {FINISHED})
        else:
            promises.delivered_without_sync(the_run(ground))
        is_consistent(ground, reference, ("FAILED", "KILLED"))
        _resume(pair, reference)


def cut_link(ground: Ground, reference: Curves) -> None:
    """Cut the link. Healed in time, the training goes on; else it fails, and can be resumed."""
    seconds = ground.next_of(CUTS)
    with _two_machines(ground) as pair:
        hang = f"train.limits.hang_minutes={1.0 if seconds else HANG_MINUTES}"
        commands = _training(pair, "step_seconds=0.05", hang)
        pair.link("down")
        ground.note_fault(f"link cut for {seconds or 'ever'} s")
        if seconds:
            time.sleep(seconds)
            pair.link("up")
            _all_end(commands, {FINISHED})
            finished_without_sync(ground, reference)
            return
        _all_end(commands, {FAILED})
        promises.no_process_is_left(ground)
        promises.delivered_without_sync(the_run(ground))
        pair.link("up")
        is_consistent(ground, reference, ("FAILED",))
        _resume(pair, reference)


def preempted_machine(ground: Ground, reference: Curves) -> None:
    """Stop one machine, and after a resume the other: both stop with a checkpoint each time."""
    order = ground.next_of(((FIRST, SECOND), (SECOND, FIRST), (SECOND, SECOND), (FIRST, FIRST)))
    with _two_machines(ground) as pair:
        commands = _training(pair, "step_seconds=0.05")
        for count, machine in enumerate(order):
            commands[machine].process.send_signal(signal.SIGTERM)
            ground.note_fault(f"SIGTERM to the {machine} machine, {'again' if count else 'once'}")
            _all_end(commands, {RESUMABLE})
            promises.no_process_is_left(ground)
            promises.delivered_without_sync(the_run(ground))
            is_consistent(ground, reference, ("KILLED",))
            if not count:
                commands = pair.both("resume", "run")
                _wait_for_steps(ground, commands)
        _resume(pair, reference)


def _training(pair: Pair, *settings: str) -> dict[str, Command]:
    """Start a training on both machines, and wait for some of its steps."""
    words = ("--run-name", "run", "--nproc", 1, *SETTINGS[4:], *settings)
    uri = ("--tracking-uri", pair.ground.store)
    commands = pair.both("train", TINY, *words, *uri)
    _wait_for_steps(pair.ground, commands)
    return commands


def _wait_for_steps(ground: Ground, commands: Mapping[str, Command]) -> None:
    run, before = ground.the_run(), 0
    if run is not None and run.events.exists():
        before = max(promises.journaled(run), default=0)
    # After the first checkpoint, for a resume.
    wanted = before + ground.random.randrange(EVERY + 4, 70)

    def is_there() -> bool:
        if any(not command.running for command in commands.values()):
            return True
        run = ground.the_run()
        return run is not None and run.events.exists() and _steps(ground) >= wanted

    wait_for(is_there, 120.0)
    if _steps(ground) < wanted or _steps(ground) >= STEPS:
        tails = [f"{name}: {command.tail()}" for name, command in commands.items()]
        raise Broken(f"error: step {wanted} was not reached in time: {'; '.join(tails)}")


def _steps(ground: Ground) -> int:
    run = ground.the_run()
    return 0 if run is None or not run.events.exists() else max(promises.journaled(run), default=0)


def _kill(pair: Pair, victim: str, machine: str) -> None:
    there = pair.processes(machine)
    roles = pair.ground.roles(there)
    names = ("rank 0", "other rank") if victim == "rank" else ("launcher",)
    chosen = there if victim == "machine" else [roles[name] for name in names if name in roles]
    if not chosen:
        raise Broken(f"error: there is no {victim} on the {machine} machine")
    for process in chosen:
        with contextlib.suppress(psutil.Error):
            process.kill()
    pair.ground.note_fault(f"SIGKILL of the {victim} on the {machine} machine")


def _all_end(commands: Mapping[str, Command], codes: set[int]) -> None:
    """Check that both commands end in time, with one of these exit codes."""
    began = time.monotonic()
    for machine, command in commands.items():
        code = command.wait()
        if code not in codes:
            raise Broken(f"wrong status: exit code {code} on {machine}: {command.tail()}")
    if (took := time.monotonic() - began) > STATUS_SECONDS:
        raise Broken(f"hang: the commands ended after {took:.0f} s")


def _resume(pair: Pair, reference: Curves) -> None:
    """Resume on both machines, and check the finished run."""
    _all_end(pair.both("resume", "run", "step_seconds=0.01"), {FINISHED})
    finished(pair.ground, reference)


def _network(process: int) -> str:
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{process}/ns/net").readlink())
    return ""


@contextlib.contextmanager
def _two_machines(ground: Ground) -> Iterator[Pair]:
    """Yield two machines with a link between them. Raises NotRun where that is not allowed."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        raise NotRun("two machines need root, unshare and ip")
    environ = {name: value for name, value in ground.environ.items() if name != MARK}
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", SCRIPT],
        cwd="/",
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        second = holder.stdout.readline().strip()
        if not second:
            raise NotRun("this machine allows no namespaces")
        yield Pair(ground, {FIRST: holder.pid, SECOND: int(second)})
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
