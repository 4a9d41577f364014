"""The thread that samples a node: its notices, in a process of its own with a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from rankzero.events import Noticed, SystemSampled
from rankzero.reporting.run_facts import fold
from rankzero.run_store.folder import RunFolder
from rankzero.telemetry import sampling_thread
from rankzero.telemetry.sampling_thread import NodeSampler
from support.runs import make_folder
from support.stubbed_nvml import GPU_IS_LOST, card, compile_stub, uuid

SAMPLE = """
import json, sys, time
from pathlib import Path
from rankzero.run_store.folder import RunFolder
from rankzero.telemetry.sampling_thread import SamplingThread
sampling = SamplingThread(RunFolder(Path(sys.argv[1])), json.loads(sys.argv[2]), 0, 1, 1)
time.sleep(3.5)
sampling.stop()
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_folder(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}")


def notices(folder: RunFolder, environment: Mapping[str, str], gpus: str) -> list[str]:
    """Sample for a few seconds and return the notices."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    }
    command = [sys.executable, "-c", SAMPLE, str(folder.path), gpus]
    subprocess.run(command, env={**kept, **environment}, check=True, timeout=60)
    events = list(folder.all_events())
    assert any(isinstance(event, SystemSampled) for event in events)
    assert fold(events).notices == [event.text for event in events if isinstance(event, Noticed)]
    return fold(events).notices


def test_a_lost_gpu_is_one_notice_in_the_journal_of_the_node(
    folder: RunFolder, tmp_path: Path
) -> None:
    lost = card(1, nvmlDeviceGetTemperature=f"52,{GPU_IS_LOST}")
    told = notices(
        folder, {**compile_stub(tmp_path), **card(0), **lost}, f'["{uuid(0)}", "{uuid(1)}"]'
    )
    assert len(told) == 1 and told[0].startswith(
        f"GPU 1 (NVIDIA H200, {uuid(1)}, index 1) gives no more metrics"
    )


def test_an_error_that_ends_the_sampling_is_a_notice(folder: RunFolder) -> None:
    def fail(*arguments: object, **options: object) -> NodeSampler:
        raise RuntimeError("no /proc")

    sampling_thread.SamplingThread(folder, [], 0, 1, 1, make_sampler=fail).stop()
    assert fold(folder.all_events()).notices == [
        "no more system metrics of this machine: RuntimeError: no /proc",
    ]


def test_a_missing_driver_is_a_notice_only_for_a_job_that_names_gpus(
    folder: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    without = {"LD_LIBRARY_PATH": str(tmp_path)}
    assert notices(folder, without, "null") == []
    assert notices(folder, without, f'["{uuid(0)}"]') == [
        "no GPU metrics: NVML Shared Library Not Found"
    ]


def test_a_thread_that_cannot_start_is_a_notice(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    sampling_thread.SamplingThread(folder, [], 0, 1, 1).stop()
    assert "no more system metrics of this machine" in folder.system(0).read_text()
