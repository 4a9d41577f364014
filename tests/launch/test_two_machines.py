"""Two machines, which are namespaces with names, /etc/hosts and addresses of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.two_machines import NAMESPACES, SCRIPT

ENDPOINTS = ("10.77.0.1:29400", "first:29401", "[fd77::1]:29402")


@pytest.mark.slow
def test_machines_meet_although_their_own_names_are_loopback_addresses(
    tmp_path: Path, namespaces: None
) -> None:
    program = (sys.executable, "-m", "support.two_machines", tmp_path, *ENDPOINTS)
    done = subprocess.run(
        (*NAMESPACES, SCRIPT, "bash", *program),
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = (
        [json.loads(line) for line in (tmp_path / f"{name}.json").read_text().splitlines()]
        for name in ("first", "second")
    )
    for endpoint, one, other in zip(ENDPOINTS, first, second, strict=True):
        version_6 = endpoint.startswith("[")
        addresses = ("fd77::1", "fd77::2") if version_6 else ("10.77.0.1", "10.77.0.2")
        assert (one[1], other[1]) == addresses
        assert one[0] == other[0] == endpoint
        # Each rank's worker has told the sum of both ranks, and rank 0's address.
        assert (one[3], other[3]) == ([0], [1])
        assert one[2] == other[2] == f"eth0 3 {addresses[0]}"
