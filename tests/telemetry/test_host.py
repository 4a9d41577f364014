"""How many cores' time a process may use: what it sees, and what its control groups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero.telemetry import host


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {}, 16),
        ("0::/", {"cpu.max": "max 100000\n"}, 16),
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "10000 100000\n"}, 1),
        # Each group above has a quota of its own.
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        # A container's own groups are not below the mount that it sees.
        ("0::/kubepods/pod1", {"cpu.max": "400000 100000"}, 4),
        (
            "3:memory:/\n2:cpuacct,cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "250000", "cpu/job/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ("0::/", {"cpu.max": "no numbers"}, 16),
        (None, {}, 16),
    ],
)
def test_a_quota_of_the_container_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str | None,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: list(range(16)))
    if groups is not None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        path = tmp_path / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host.core_count(tmp_path) == cores
