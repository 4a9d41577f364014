"""The watchdog: which ranks hang, which wait, and how a hang is reported."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankzero.launch import failures
from rankzero.training.distributed.watchdog import WAITING_IN, Watchdog, is_busy, stopped_ranks
from rankzero.training.distributed.world import World
from rankzero.training.metrics.window import reduce_window

LIMIT_SECONDS = 0.4
BEATS = """
with watchdog.watching(), watchdog.training():
    watchdog.beat()
    watchdog.beat()
"""


def watched(tmp_path: Path, body: str) -> tuple[int, dict[str, Any] | None, str]:
    """Run `body` in its own watched process. Return its exit code, its failure, its stderr."""
    script = tmp_path / "users.py"
    script.write_text(
        textwrap.dedent(f"""
        import dataclasses, json, time
        from pathlib import Path
        from rankzero.training.distributed.watchdog import Watchdog
        def report(failure):
            text = json.dumps(dataclasses.asdict(failure))
            Path({str(tmp_path / "failure.json")!r}).write_text(text)
        watchdog = Watchdog({LIMIT_SECONDS / 60}, 3, [report])
        """)
        + textwrap.dedent(body)
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=60
    )
    path = tmp_path / "failure.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else None, done.stderr


def hung(tmp_path: Path, before: str, hang: str = "time.sleep(100)") -> tuple[dict[str, Any], str]:
    """Let a watched process hang after two beats. Return its failure, its stderr."""
    code, failure, stderr = watched(tmp_path, f"{textwrap.dedent(before)}{BEATS}    {hang}\n")
    assert code == -signal.SIGKILL and failure is not None
    return failure, stderr


def test_a_hung_process_reports_where_and_ends(tmp_path: Path) -> None:
    failure, stderr = hung(tmp_path, "def step():\n    time.sleep(100)", "step()")
    assert failure["reason"].startswith("rank 3 hung for 0 s (") and "in step" in failure["reason"]
    assert failure["rank"] == 3 and "time.sleep(100)" in failure["error"]
    assert "most recent call first" in stderr and "in step" in stderr


def test_a_report_leaves_out_the_command_of_which_the_rank_is_a_fork(tmp_path: Path) -> None:
    imports = "import threading\nfrom rankzero.launch import agent"
    failure, _ = hung(tmp_path, imports, "agent.enter(threading.Event().wait, None)")
    assert failure["reason"] == "rank 3 hung for 0 s"
    assert "threading.py" in failure["error"] and "users.py" not in failure["error"]


def test_a_report_names_what_the_process_waited_for(tmp_path: Path) -> None:
    step = "watchdog.beat('the checkpoint of step 7 to be written'); time.sleep(100)"
    failure, _ = hung(tmp_path, "", step)
    named = "rank 3 hung for 0 s, waiting for the checkpoint of step 7 to be written ("
    assert failure["reason"].startswith(named)


def test_a_report_that_hangs_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    before = """
        def hang(failure):
            time.sleep(100)  # as the store of a stopped rank 0
        watchdog = Watchdog(0.4 / 60, 3, [hang, report])
        """
    assert "rank 3 hung" in hung(tmp_path, before)[1]


def test_a_full_disk_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    before = """
        import sys
        def refuse(failure):
            raise OSError(28, "No space left on device")
        sys.stderr = open("/dev/full", "w")
        watchdog = Watchdog(0.4 / 60, 3, [refuse, report])
        """
    hung(tmp_path, before)


def test_suspended_time_does_not_count(tmp_path: Path) -> None:
    code, failure, _ = watched(
        tmp_path,
        """
        import os, signal, subprocess, sys
        watchdog = Watchdog(1 / 60, 3, [report])
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            go_on = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.2)  # the step that was under way
            assert 2 < watchdog.suspended_seconds() < 20, "at once"
            go_on.wait()
            time.sleep(0.2)
            assert 2 < watchdog.suspended_seconds() < 20, "once"
        """,
    )
    assert code == 0 and failure is None


def test_suspended_time_is_known_without_a_limit_too() -> None:
    watchdog, deadline = Watchdog(None, 0, ()), time.monotonic() + 10
    with watchdog.watching():
        while watchdog._looked[0] == math.inf and time.monotonic() < deadline:
            time.sleep(0.01)
        watchdog._looked = watchdog._looked[0] - 60, 0.0
        assert 40 < watchdog.suspended_seconds() < 70


def test_progress_is_reported_once() -> None:
    reports = list[float]()
    watchdog = Watchdog(
        LIMIT_SECONDS / 60, 0, (), on_progress=lambda: reports.append(time.monotonic())
    )
    with watchdog.watching():
        time.sleep(0.1)
        assert not reports
        watchdog.beat()
        deadline = time.monotonic() + 10
        while not reports and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    assert len(reports) == 1


def test_a_report_of_progress_that_hangs_holds_up_no_watchdog() -> None:
    reports, disk = list[int](), threading.Event()

    def report() -> None:
        reports.append(1)
        disk.wait(30)

    watchdog = Watchdog(LIMIT_SECONDS / 60, 0, (), on_progress=report)
    began = time.monotonic()
    with watchdog.watching():
        while len(reports) < 1 or time.monotonic() < began + 0.3:
            watchdog.beat()
            time.sleep(0.01)
    disk.set()
    assert time.monotonic() - began < 20 and len(reports) == 1


def test_a_process_that_beats_is_not_ended(tmp_path: Path) -> None:
    code, failure, _ = watched(
        tmp_path,
        """
        with watchdog.watching(), watchdog.training():
            time.sleep(1.2)  # the first step may take six times as long
            for _ in range(12):
                watchdog.beat()
                time.sleep(0.1)
            watchdog.expect_slow_step()
            time.sleep(1.2)  # another first step
            watchdog.beat()
        time.sleep(0.8)  # nothing watches now
        """,
    )
    assert code == 0 and failure is None


def test_rank_released_after_long_wait_is_not_reported_as_hung(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text("import time\ndef wait(s):\n    time.sleep(s)\n")
    code, failure, _ = watched(
        tmp_path,
        """
        import peer
        watchdog = Watchdog(2 / 60, 3, [report], waiting_in=[peer.__file__])
        with watchdog.watching(), watchdog.training():
            watchdog.beat()
            watchdog.beat()
            peer.wait(2.3)
            time.sleep(1)
        """,
    )
    assert code == 0 and failure is None


def test_a_rank_whose_gpu_is_busy_waits_for_it(tmp_path: Path) -> None:
    """Under NCCL, a rank that waits for a hung one does so in its own code."""
    before = "watchdog = Watchdog(0.4 / 60, 3, [report], is_gpu_busy=lambda: True)"
    failure, _ = hung(tmp_path, before)
    # It gives the rank that hangs the time to end first.
    assert failure["reason"].startswith("rank 3 waited for its GPU, or the others, for 1 s (")


@pytest.mark.parametrize(
    ("query", "busy"),
    [(lambda: True, False), (lambda: False, True), (dict[str, int]().popitem, True)],
)
def test_a_gpu_that_has_work_left_or_gives_no_answer_is_busy(
    monkeypatch: pytest.MonkeyPatch, query: Any, busy: bool
) -> None:
    stream = types.SimpleNamespace(query=query)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert is_busy(torch.device("cuda", 0)) is busy
    assert not is_busy(torch.device("cpu"))


@pytest.mark.parametrize("phase", ["in set-up", "after the last step"])
def test_a_hang_outside_of_the_training_has_a_longer_limit(tmp_path: Path, phase: str) -> None:
    code, failure, _ = watched(
        tmp_path,
        f"""
        watchdog = Watchdog({LIMIT_SECONDS / 60}, 3, [report], setup_seconds=3.0)
        with watchdog.watching():
            time.sleep(2.5)  # longer than the first step's limit
            if {phase!r} != "in set-up":
                with watchdog.training():
                    watchdog.beat()
                time.sleep(2.5)  # the limit starts again
            time.sleep(100)
        """,
    )
    assert code == -signal.SIGKILL and failure is not None
    assert re.match(rf"rank 3 hung for [3-9] s {phase} \(.*users.py", str(failure["reason"]))


@pytest.mark.parametrize(
    "function",
    [
        dist.all_reduce,
        torch.autograd.graph._engine_run_backward,
        torch.nn.parallel.DistributedDataParallel.forward,
        torch.cuda.synchronize,
        World.sum,
        reduce_window,
    ],
)
def test_code_that_waits_for_ranks_or_a_device_is_known_by_its_file(function: Any) -> None:
    assert inspect.unwrap(function).__code__.co_filename.startswith(WAITING_IN)
    for file in (__file__, torch.nn.modules.linear.__file__):
        assert not file.startswith(WAITING_IN)


def test_stopped_ranks_are_found_by_their_process_ids() -> None:
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(2)]
        for process in started:
            stack.callback(process.kill)
        processes = {rank: process.pid for rank, process in enumerate(started, start=4)}
        assert stopped_in_a_child(processes) == []
        started[1].send_signal(signal.SIGSTOP)
        os.waitpid(started[1].pid, os.WUNTRACED)
        assert stopped_in_a_child(processes) == [5]
        stranger = {4: os.getpid(), 5: 2**22 + 1}
        assert stopped_ranks(stranger) == [], "another parent's process, and none at all"


def stopped_in_a_child(processes: dict[int, int]) -> list[int]:
    """Return the stopped ranks as a process sees them that has the same parent."""
    code = "from rankzero.training.distributed.watchdog import stopped_ranks"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*stopped_ranks({processes}))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [int(rank) for rank in done.stdout.split()]


def test_a_secret_in_the_line_that_hangs_is_redacted(tmp_path: Path) -> None:
    failures.write(
        failures.Failure(
            1.0, 0, "hung in get('https://me:hunter2@x')", 'get("https://me:hunter2@x")'
        ),
        tmp_path,
    )
    (word,) = tmp_path.glob("rank_*.json")
    assert "hunter2" not in word.read_text() and failures.first(tmp_path) is not None
