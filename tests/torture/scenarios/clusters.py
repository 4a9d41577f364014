"""Searches on real clusters: a machine, its daemon, a trial's program or the search is killed.

Slurm's and Ray's daemons run on this machine. Each has two machines with two processors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from rankzero.tuning.options import default_storage
from rankzero.tuning.study import find_study
from support import ray_cluster, slurm
from torture import promises
from torture.ground import Broken, Command, Ground, NotRun, wait_for
from torture.promises import Curves
from torture.scenarios.search import SEARCH, TRIALS, decide, study_is_whole

NODE, SEARCHER = "rankzero.tuning.places.node", "rankzero"
SLURM_VICTIMS = ("slurmd", "node", "srun", "machine", "search")
RAY_VICTIMS = ("raylet", "node", "actor's program", "search")
# Until no job of a dead search is left.
JOBS_END_SECONDS = 120.0


def slurm_search(ground: Ground, _: Curves) -> None:
    """Kill a part of Slurm, a trial's program or the search, twice; the same command finishes."""
    if text := slurm.needs():
        raise NotRun(text)
    with slurm.running() as cluster:
        ground.environ |= cluster.environ
        inside = cluster.words([], ground.folder)
        words = (*SEARCH, "--slurm", "--parallel", 2, "--", "--cpus-per-task", 2)
        for victim in _two_of(ground, SLURM_VICTIMS):
            command = ground.start(*words, inside=inside)
            if not _trial_runs(ground, command):
                break
            if victim == "machine":
                found = cluster(["squeue", "--noheader", "--format=%N"], ground.folder, {})
                down = f"NodeName={found.split()[0]}", "Reason=test"
                cluster(["scontrol", "update", *down, "State=down"], ground.folder, {})
                ground.note_fault("a machine of Slurm goes down")
            elif victim == "slurmd":
                _kill(ground, victim, _daemons(ground, "slurmd"))
            else:
                _kill(ground, victim, _parts(ground, victim))
            command.wait()
            promises.no_process_is_left(ground)
            # Slurm ends no job on a machine without its daemon.
            cluster.restore()
            _no_job_is_left(lambda: cluster(["squeue", "--noheader"], ground.folder, {}))
        decide(ground, words, inside)
        study_is_whole(ground, find_study(default_storage(ground.runs_folder.parent), "s"), TRIALS)


def ray_search(ground: Ground, _: Curves) -> None:
    """Kill a part of Ray, a trial's program or the search, twice; the same command finishes."""
    if importlib.util.find_spec("ray") is None:
        raise NotRun("Ray: pip install 'rankzero[ray]'")
    # Else a token in the user's home, if any, counts for some of Ray's processes only.
    ground.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    with ray_cluster.running({name: ground.environ[name] for name in names}) as cluster:
        cluster.add_machine()
        words = (*SEARCH, "--ray", cluster.address, "--parallel", 2, "--", "num_cpus=2")
        for victim in _two_of(ground, RAY_VICTIMS):
            command = ground.start(*words)
            if not _trial_runs(ground, command):
                break
            if victim == "raylet":
                _kill(ground, victim, _daemons(ground, "raylet"))
                cluster.add_machine()
            else:
                _kill(ground, victim, _parts(ground, victim))
            command.wait()
            promises.no_process_is_left(ground)
        decide(ground, words)
        study_is_whole(ground, find_study(default_storage(ground.runs_folder.parent), "s"), TRIALS)


def _two_of(ground: Ground, victims: Sequence[str]) -> Iterator[str]:
    found = ground.turn.of(victims, 2)
    yield next(found)
    yield next(found)


def _trial_runs(ground: Ground, command: Command) -> bool:
    """Wait for a random moment of a trial; return whether the search still runs then."""
    wait_for(lambda: bool(_parts(ground, "node")) or not command.running, 100)
    time.sleep(ground.random.uniform(0.0, 8.0))
    return command.running


def _kill(ground: Ground, victim: str, found: Sequence[psutil.Process]) -> None:
    if found:
        with contextlib.suppress(psutil.NoSuchProcess):
            ground.random.choice(found).kill()
            ground.note_fault(f"SIGKILL of {victim}")


def _parts(ground: Ground, part: str) -> list[psutil.Process]:
    """Return the scenario's processes that are a part of its search."""
    found = []
    for process in ground.processes():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_part = {
                "node": NODE in words and process.name() != "srun",
                "srun": process.name() == "srun",
                "actor's program": "rankzero.tuning.places.ray_actor" in words,
                "search": words[1:4] == ["-m", SEARCHER, "search"],
            }
            if is_part[part]:
                found.append(process)
    return found


def _daemons(ground: Ground, name: str) -> list[psutil.Process]:
    """Return the cluster's daemons of this name on machines with a trial; all if there is none."""
    of_all = [one for one in psutil.process_iter(["name"]) if one.info["name"] == name]
    with_trials = {parent.pid for node in _parts(ground, "node") for parent in _ancestors(node)}
    return [one for one in of_all if one.pid in with_trials] or of_all


def _ancestors(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.parents()
    return []


def _no_job_is_left(jobs: Callable[[], str]) -> None:
    if not wait_for(lambda: not jobs().strip(), JOBS_END_SECONDS):
        raise Broken(f"orphan: a job of the search is left: {jobs()}")
