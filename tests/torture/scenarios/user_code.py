"""User code that treats its process badly, and a memory limit that it hits."""

from __future__ import annotations

import contextlib
import itertools

import psutil

from torture import promises
from torture.ground import Broken, Command, Ground, wait_for
from torture.limits import MemoryLimit, memory_limit
from torture.promises import Curves
from torture.scenarios.training import (
    EVERY,
    SETTINGS,
    STEPS,
    TINY,
    ends,
    finished,
    finished_without_sync,
    is_consistent,
    resumes,
    the_run,
)

RUDE = TINY.with_name("rude.py")
# Deeds after which the training still finishes, with the same values.
HARMLESS = (
    "changes directory",
    "sets umask 0777",
    "sets a locale",
    "ignores all signals",
    "closes descriptors 0-2",
    "prints 100 MB",
    "forks",
    "clears the environment",
    "sets sys.stdout to None",
    "makes warnings errors",
    "starts a thread that never ends",
    "registers an exit handler that hangs",
)
HARMLESS_EACH = 12
FATAL = (
    "closes descriptors above 2",
    "calls os._exit(0)",
    "calls sys.exit(0)",
    "raises KeyboardInterrupt",
    "raises a BaseException",
    "raises what cannot be printed",
    "raises with 10 MB of text",
    "recurses for ever",
    "aborts",
    "kills itself",
    "ignores signals and hangs",
)
FATAL_EACH = 3
# Megabytes by role: what a rank may allocate more, and less than a helper needs.
LIMITS = {"rank 0": 400, "other rank": 400, "courier": 24, "recorder": 2}
MOST_LIMITED, MEET_SECONDS = 2, 20.0
WORDS = ("train", RUDE, *SETTINGS, "train.limits.hang_minutes=0.1")


def harmless_code(ground: Ground, reference: Curves) -> None:
    """User code changes its process in many ways: the training finishes with the same values."""
    deeds = ground.turn.of(tuple(itertools.product(HARMLESS, (0, 1))), HARMLESS_EACH)
    orders = [
        f"{deed}:{rank}:{ground.random.randrange(2, STEPS - EVERY)}"
        for deed, rank in itertools.islice(deeds, HARMLESS_EACH)
    ]
    ground.environ["TORTURE_RUDE"] = "|".join(orders)
    ends(ground.start(*WORDS), 0)
    for order in orders:
        deed, rank, _ = order.rsplit(":", 2)
        ground.note_fault(f"user code {deed} on rank {rank}")
    finished(ground, reference)


def fatal_code(ground: Ground, reference: Curves) -> None:
    """User code ends its process in an odd way, three times: FAILED, and a resume finishes it."""
    deeds = ground.turn.of(tuple(itertools.product(FATAL, (0, 1))), FATAL_EACH)
    words: tuple[object, ...] = WORDS
    for deed, rank in itertools.islice(deeds, FATAL_EACH):
        step = ground.random.randrange(EVERY + 1, STEPS // FATAL_EACH)
        ground.environ["TORTURE_RUDE"] = f"{deed}:{rank}:{step}"
        command = ground.start(*words)
        code = command.wait()
        ground.note_fault(f"user code {deed} on rank {rank}")
        promises.no_process_is_left(ground)
        # Only a Ctrl-C in the code may count as a stop that the user wants.
        status = is_consistent(ground, reference, ("FAILED", "KILLED"))
        if (code, status) not in ((1, "FAILED"), (75, "KILLED")):
            raise Broken(f"wrong status: exit code {code} of a run that is {status}: {deed}")
        words = ("resume", "run")
    del ground.environ["TORTURE_RUDE"]
    ground.run(*words)
    finished_without_sync(ground, reference)


def little_memory(ground: Ground, reference: Curves) -> None:
    """The kernel kills what exceeds a memory limit: the run ends truly, and nothing is lost."""
    role = ground.next_of(tuple(LIMITS))
    hungry = role.endswith("rank") or role == "rank 0"
    if hungry:
        rank = 0 if role == "rank 0" else 1
        ground.environ["TORTURE_RUDE"] = f"needs more memory than there is:{rank}:{STEPS // 2}"
    with memory_limit(f"{ground.seed}", LIMITS[role]) as limit:
        command = ground.start(*WORDS, "step_seconds=0.03")
        for _ in range(MOST_LIMITED):
            if not _is_killed(ground, command, limit, role):
                break
            ground.note_fault(f"{role} exceeds a memory limit")
        ends(command, 1 if hungry else 0)
    ground.environ.pop("TORTURE_RUDE", None)
    if not hungry:
        finished(ground, reference)
        return
    promises.no_process_is_left(ground)
    promises.delivered_without_sync(the_run(ground))
    resumes(ground, reference, ("FAILED",))


def _is_killed(ground: Ground, command: Command, limit: MemoryLimit, role: str) -> bool:
    """Put the process of a role under the limit once there is one. Return whether it dies."""
    wait_for(lambda: not command.running or role in ground.roles())
    process = ground.roles().get(role)
    if process is None or not limit.add(process):
        return False
    with contextlib.suppress(psutil.TimeoutExpired):
        process.wait(MEET_SECONDS)
        return True
    return False
