"""What a launcher asks of its workers, where several machines share the run's folder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rankzero.experiment import Experiment
from rankzero.launch.request import request_for
from support.runs import make_folder


def test_machines_that_share_a_folder_may_delete_old_failures_at_the_same_time(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path)
    folder.failures.mkdir()
    for _ in range(5):
        for rank in range(200):
            (folder.failures / f"rank_{rank}.json").touch()
        with ThreadPoolExecutor() as machines:
            made = [machines.submit(request_for, folder, Experiment(), {}) for _ in range(4)]
        assert all(one.result().runs == str(tmp_path / "runs") for one in made)
    assert not list(folder.failures.iterdir())
