"""`rankzero.track` under MPI, and with Horovod's environment variables."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from frameworks.examples import (
    EXAMPLES,
    SECONDS,
    best,
    checkpoints,
    end,
    free_ports,
    start,
    steps_of,
    tracked,
)

pytestmark = pytest.mark.timeout(2 * SECONDS)

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: Debian's package is openmpi-bin"
)


def assert_one_whole_run(folder: Path) -> None:
    found = tracked(folder)
    assert found.status == "FINISHED" and best(found) > 0.8
    assert steps_of(folder, found, "train/loss") == list(range(1, 45))
    assert checkpoints(folder)


@needs_mpi
def test_two_processes_of_mpirun_are_one_run(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    code, output = end(
        start(
            tmp_path,
            "mpirun",
            "-np",
            "2",
            "--oversubscribe",
            "-x",
            f"MASTER_PORT={port}",
            sys.executable,
            str(EXAMPLES / "mpirun_digits.py"),
            "2",
            **AS_ROOT,
        ),
    )
    assert code == 0, output
    assert_one_whole_run(tmp_path)


@needs_mpi
def test_two_processes_with_horovods_variables_are_one_run(tmp_path: Path) -> None:
    """Rank 0 by Horovod's variables, which is rank 1 by MPI's: what Horovod says counts."""
    (port,) = free_ports(1)
    command = ["mpirun", "--oversubscribe"]
    for rank in (1, 0):
        said = {
            "RANK": rank,
            "SIZE": 2,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": 2,
            "CROSS_RANK": 0,
            "CROSS_SIZE": 1,
        }
        command += [":"] * (len(command) > 2) + ["-np", "1", "-x", f"MASTER_PORT={port}"]
        command += [
            word for name, value in said.items() for word in ("-x", f"HOROVOD_{name}={value}")
        ]
        command += [sys.executable, str(EXAMPLES / "mpirun_digits.py"), "2"]
    code, output = end(start(tmp_path, *command, **AS_ROOT))
    assert code == 0, output
    assert_one_whole_run(tmp_path)
