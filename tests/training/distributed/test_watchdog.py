"""A rank that hangs: told from one that gets on, and from one that waits."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rankzero.launch import failures
from rankzero.training.distributed.watchdog import waits

LIMIT_SECONDS = 0.4


def watched(tmp_path: Path, body: str) -> tuple[int, dict[str, object] | None, str]:
    """Run `body` in a process of its own, watched; return its exit code, what it said of its end, its stderr."""
    script = tmp_path / "users.py"
    script.write_text(
        textwrap.dedent(f"""
        import dataclasses, json, time
        from pathlib import Path
        from rankzero.training.distributed.watchdog import Watchdog
        told = lambda failed: Path({str(tmp_path / "told.json")!r}).write_text(json.dumps(dataclasses.asdict(failed)))
        watchdog = Watchdog({LIMIT_SECONDS / 60}, 3, told)
        """)
        + textwrap.dedent(body)
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=60
    )
    path = tmp_path / "told.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else None, done.stderr


def test_a_process_that_hangs_says_where_and_ends(tmp_path: Path) -> None:
    code, told, stderr = watched(
        tmp_path,
        """
        def step():
            time.sleep(100)
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            step()
        """,
    )
    assert code == -signal.SIGKILL and told is not None
    assert str(told["reason"]).startswith("rank 3 hung for 0 s (") and "in step" in str(
        told["reason"]
    )
    assert told["rank"] == 3 and "time.sleep(100)" in str(told["error"])
    assert "most recent call first" in stderr and "in step" in stderr


def test_a_word_that_nobody_hears_keeps_no_process_alive(tmp_path: Path) -> None:
    code, _, stderr = watched(
        tmp_path,
        """
        def tell(failed):
            print("tells", failed.rank, flush=True)
            time.sleep(100)  # as the store of a rank 0 that is stopped has it
        watchdog = Watchdog(0.4 / 60, 3, tell)
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            time.sleep(100)
        """,
    )
    assert code == -signal.SIGKILL and "rank 3 hung" in stderr


def test_a_full_disk_keeps_no_process_alive(tmp_path: Path) -> None:
    code, told, _ = watched(
        tmp_path,
        """
        import sys
        def refuse(failed):
            raise OSError(28, "No space left on device")
        sys.stderr = open("/dev/full", "w")
        watchdog = Watchdog(0.4 / 60, 3, refuse, told)
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            time.sleep(100)
        """,
    )
    assert code == -signal.SIGKILL and told is not None


def test_a_job_that_was_suspended_has_not_hung(tmp_path: Path) -> None:
    code, told, _ = watched(
        tmp_path,
        """
        import os, signal, subprocess, sys
        watchdog = Watchdog(1 / 60, 3, told)
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            go_on = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.2)  # the step that was under way
            go_on.wait()
        """,
    )
    assert code == 0 and told is None


def test_a_process_that_gets_on_is_left_alone(tmp_path: Path) -> None:
    code, told, _ = watched(
        tmp_path,
        """
        with watchdog.watching(), watchdog.training():
            time.sleep(1.2)  # the first step may take six times as long
            for _ in range(12):
                watchdog.beat()
                time.sleep(0.1)
            watchdog.begin()
            time.sleep(1.2)  # another first step
            watchdog.beat()
        time.sleep(0.8)  # nobody watches any more
        """,
    )
    assert code == 0 and told is None


def test_who_is_let_go_after_a_long_wait_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    (tmp_path / "torch" / "distributed" / "peer.py").write_text(
        "import time\ndef wait(s):\n    time.sleep(s)\n"
    )
    code, told, _ = watched(
        tmp_path,
        """
        import runpy
        wait = runpy.run_path(str(Path(__file__).parent / "torch/distributed/peer.py"))["wait"]
        watchdog = Watchdog(2 / 60, 3, told)
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            wait(2.3)
            time.sleep(1)
        """,
    )
    assert code == 0 and told is None


@pytest.mark.parametrize("phase", ["in set-up", "after the last step"])
def test_what_hangs_outside_of_the_training_has_longer_and_is_told(
    tmp_path: Path, phase: str
) -> None:
    code, told, _ = watched(
        tmp_path,
        f"""
        from rankzero.train import watchdog as module
        module.AROUND_SECONDS = 3.0
        with watchdog.watching():
            time.sleep(2.5)  # more than the first step's
            if {phase!r} != "in set-up":
                with watchdog.training():
                    watchdog.beat()
                time.sleep(2.5)  # counted anew
            time.sleep(100)
        """,
    )
    assert code == -signal.SIGKILL and told is not None
    assert re.match(rf"rank 3 hung for [3-9] s {phase} \(.*users.py", str(told["reason"]))


@pytest.mark.parametrize(
    "file",
    [
        "torch/distributed/core.py",
        "torch/autograd/graph.py",
        "rankzero/training/distributed/world.py",
    ],
)
def test_who_waits_for_others_is_known_by_where_it_is(file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("import sys\ndef inner():\n    return sys._getframe()\n")
    assert waits(runpy.run_path(str(path))["inner"]())
    assert not waits(sys._getframe())


def test_who_is_stopped_is_known_by_where_it_writes(tmp_path: Path) -> None:
    log = tmp_path / "attempt_0" / "5" / "stdout.log"
    log.parent.mkdir(parents=True)
    with log.open("w") as file:
        begun = [subprocess.Popen(["sleep", "60"], stdout=file) for _ in range(2)]
    try:
        assert stopped_in_a_child() == []
        begun[0].send_signal(signal.SIGSTOP)
        os.waitpid(begun[0].pid, os.WUNTRACED)
        assert stopped_in_a_child() == [5]
    finally:
        for process in begun:
            process.kill()
            process.wait()


def stopped_in_a_child() -> list[int]:
    """Ask in a process whose parent is this one, as it is of those that may be stopped."""
    code = "from rankzero.training.distributed.watchdog import stopped_beside; print(*stopped_beside())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return [int(word) for word in done.stdout.split()]


def test_a_secret_in_the_line_that_hangs_is_not_passed_on(tmp_path: Path) -> None:
    failures.write(
        failures.Failure(
            1.0, 0, "hung in get('https://me:hunter2@x')", 'get("https://me:hunter2@x")'
        ),
        tmp_path,
    )
    (word,) = tmp_path.glob("rank_*.json")
    assert "hunter2" not in word.read_text() and failures.first(tmp_path) is not None
