"""The host's readings, their names, their means and their intervals, without a GPU."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.telemetry.host import HostSampler
from rankzero.telemetry.sampling_thread import (
    SAMPLE_SECONDS,
    NodeSampler,
    mean_of,
    publish_interval,
)
from support.paths import SUPPORT

readings = st.floats(min_value=-1e12, max_value=1e12)
names = st.sampled_from(
    ["a", "b", "system/gpu_0_energy_joules", "system/network_receive_megabytes"]
)
samples = st.lists(st.dictionaries(names, readings), max_size=8)


class TestMean:
    def test_of_nothing_is_nothing(self) -> None:
        assert mean_of([]) == {} == mean_of([{}])

    def test_counts_only_samples_that_have_the_metric(self) -> None:
        assert mean_of([{"a": 1.0}, {"b": 5.0}, {"a": 2.0}]) == {"a": 1.5, "b": 5.0}

    def test_of_a_counter_is_its_last_value(self) -> None:
        names = (
            "system/gpu_0_energy_joules",
            "system/gpu_energy_joules",
            "system/node_1/network_transmit_megabytes",
        )
        for name in names:
            assert mean_of([{name: 1.0}, {name: 7.0}, {}]) == {name: 7.0}

    @given(samples)
    def test_is_between_the_extremes(self, samples: list[dict[str, float]]) -> None:
        means = mean_of(samples)
        assert set(means) == {name for sample in samples for name in sample}
        for name, mean in means.items():
            values = [sample[name] for sample in samples if name in sample]
            slack = 1e-9 * max(map(abs, values))
            assert min(values) - slack <= mean <= max(values) + slack

    @given(samples, readings)
    def test_of_constant_readings_is_that_reading(
        self, samples: list[dict[str, float]], value: float
    ) -> None:
        constant = [dict.fromkeys(sample, value) for sample in samples]
        assert all(math.isclose(mean, value, rel_tol=1e-9) for mean in mean_of(constant).values())


class TestPublishInterval:
    def test_slows_down(self) -> None:
        seconds = (0, 59.9, 60, 599, 600, 1e6)
        assert [publish_interval(elapsed) for elapsed in seconds] == [2, 2, 5, 5, 10, 10]

    @given(st.floats(min_value=0, max_value=1e7))
    def test_holds_several_samples(self, elapsed: float) -> None:
        assert publish_interval(elapsed) >= 2 * SAMPLE_SECONDS


def mlflows_host_metrics() -> dict[str, float]:
    script = str(SUPPORT / "mlflow_monitors.py")
    command = [sys.executable, "-W", "error", script, "CPU", "Disk", "Network"]
    metrics: dict[str, float] = json.loads(subprocess.check_output(command))
    return metrics


def two_samples(sampler: HostSampler | NodeSampler) -> dict[str, float]:
    """Return the second sample: the processor's load is known from then on."""
    sampler.sample()
    return sampler.sample()


class TestHost:
    def test_agrees_with_mlflows_own_monitors(self) -> None:
        theirs, ours = mlflows_host_metrics(), two_samples(HostSampler())
        assert set(ours) == set(theirs)
        for name in theirs:
            if name.startswith(("disk", "system_memory")):
                assert ours[name] == pytest.approx(theirs[name], rel=0.05, abs=1)

    def test_memory_in_use_is_not_what_is_unavailable(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = types.SimpleNamespace(total=100e6, available=30e6, used=40e6, percent=70.0)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        sample = HostSampler().sample()
        assert (
            sample["system_memory_usage_megabytes"] == 40
            and sample["system_memory_usage_percentage"] == 40
        )

    def test_the_disk_is_that_of_the_folder(self) -> None:
        shared_memory = Path("/dev/shm")
        sample = HostSampler(shared_memory).sample()
        size = sample["disk_usage_megabytes"] + sample["disk_available_megabytes"]
        assert size == pytest.approx(psutil.disk_usage(str(shared_memory)).total / 1e6, rel=0.01)

    def test_a_missing_folder_leaves_out_only_the_disk(self, tmp_path: Path) -> None:
        sample = two_samples(HostSampler(tmp_path / "gone"))
        assert {name.split("_")[0] for name in sample} == {"cpu", "system", "network"}

    def test_the_network_starts_at_zero(self) -> None:
        sample = HostSampler().sample()
        assert 0 <= sample["network_receive_megabytes"] < 1000

    def test_without_a_network_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(psutil, "net_io_counters", lambda: None)
        assert not any(name.startswith("network") for name in HostSampler().sample())

    def test_the_first_sample_has_no_processor_load(self) -> None:
        """psutil returns 0, which is wrong."""
        sampler = HostSampler()
        seen = ["cpu_utilization_percentage" in sampler.sample() for _ in range(2)]
        assert seen == [False, True]

    def test_a_busy_processor_is_seen(self) -> None:
        sampler = HostSampler()
        sampler.sample()
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            pass
        assert sampler.sample()["cpu_utilization_percentage"] > 0

    def test_the_memory_of_the_job_is_its_process_tree(self) -> None:
        hold = "held = b'x' * 200_000_000; print('ready', flush=True); input()"
        # A grandchild, as a launcher's worker is.
        command = ["sh", "-c", f'{sys.executable} -c "{hold}"; true']
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout and child.stdout.readline() == "ready\n"
            # Not this process, whose own memory and children change meanwhile.
            held = HostSampler(process=child.pid).sample()["process_memory_megabytes"]
            child.communicate("\n")
        assert 200 * 0.9 < held < 400

    def test_a_dead_process_has_no_memory(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as child:
            child.wait()
        assert "process_memory_megabytes" not in HostSampler(process=child.pid).sample()


class TestSampler:
    def test_one_node_has_the_names_of_mlflow(self, tmp_path: Path) -> None:
        sample = two_samples(NodeSampler((), 0, 1, folder=tmp_path))
        assert "system/cpu_utilization_percentage" in sample
        assert all(re.fullmatch(r"system/[a-z_]+", name) for name in sample)

    def test_several_nodes_have_their_number_in_the_name(self) -> None:
        sample = NodeSampler((), 3, 4).sample()
        assert sample and all(re.fullmatch(r"system/node_3/[a-z_]+", name) for name in sample)

    def test_a_job_without_gpus_has_no_notices(self) -> None:
        sampler = NodeSampler((), 0, 1)
        assert list(sampler.notices) == []

    def test_closes_twice(self) -> None:
        sampler = NodeSampler((), 0, 1)
        sampler.close()
        sampler.close()
        assert sampler.sample()

    @pytest.mark.parametrize(
        "broken", ["cpu_percent", "virtual_memory", "disk_usage", "net_io_counters"]
    )
    def test_a_failing_reading_leaves_out_only_itself(
        self, monkeypatch: pytest.MonkeyPatch, broken: str
    ) -> None:
        sampler = NodeSampler((), 0, 1)
        everything = two_samples(sampler)
        monkeypatch.setattr(psutil, broken, failing(PermissionError("/proc")))
        assert 0 < len(sampler.sample()) < len(everything)

    def test_a_network_that_was_hidden_from_the_start_leaves_out_only_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hidden = failing(FileNotFoundError("/proc/net/dev"))
        monkeypatch.setattr(psutil, "net_io_counters", hidden)
        sample = two_samples(NodeSampler((), 0, 1))
        assert sample and not any("network" in name for name in sample)

    def test_an_unexpected_error_is_one_notice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sampler = NodeSampler((), 0, 1)
        monkeypatch.setattr(psutil, "virtual_memory", failing(KeyError("MemTotal")))
        assert [sampler.sample(), sampler.sample()] == [{}, {}]
        assert list(sampler.notices) == ["no system metrics: KeyError('MemTotal')"]


def failing(error: Exception) -> Callable[..., Mapping[str, float]]:
    def fail(*args: object) -> Mapping[str, float]:
        raise error

    return fail
