"""What a launcher asks of its workers, where several machines share the run's folder."""

from __future__ import annotations

import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.launch.machines import Machines
from rankzero.launch.request import make_folder as folder_for
from rankzero.launch.request import refuse_new, request_for, takes_more
from rankzero.run_store import run_locks
from rankzero.run_store.attempt import sole_launcher
from rankzero.run_store.folder import RunFolder
from support.runs import append, ended, make_folder, started


def test_field_that_no_setting_can_be_is_refused_in_new_runs() -> None:
    @dataclasses.dataclass(frozen=True)
    class Group:
        hidden: int = dataclasses.field(init=False, default=0)

    class Never(Experiment):
        hidden: int = dataclasses.field(init=False, default=0)

    class Within(Experiment):
        group: Group = Group()

    for cls in (Never, Within):
        with pytest.raises(UserError, match=r"^hidden is a field with init=False"):
            refuse_new(cls, {})
    refuse_new(Experiment, {})


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


def test_a_rank_finds_the_store_after_the_users_file_has_changed_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_folder(tmp_path).path
    monkeypatch.chdir(tmp_path)
    request = request_for(RunFolder(path.relative_to(tmp_path)), Experiment(), {})
    assert (request.runs, request.failures) == (str(path.parent), str(path / "failures"))


def test_a_run_takes_one_more_machine_while_others_train_and_meet(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    run_locks.claim(folder, 0)
    append(folder, started())
    mine = dataclasses.replace(folder.identity, uuid="0" * 32)
    with socket.create_server(("127.0.0.1", 0)) as server:
        machines = Machines(1, 2, f"127.0.0.1:{server.getsockname()[1]}")
        assert folder_for(tmp_path / "runs", mine, machines=machines) == folder
        with pytest.raises(UserError, match="there is a run"):  # all machines have met already
            folder_for(tmp_path / "runs", mine, machines=dataclasses.replace(machines, least=2))
        # The machines of the attempt that has ended are about to meet again.
        append(folder, ended())
        assert not takes_more(folder, machines)
        with sole_launcher(folder, 2):
            assert takes_more(folder, machines)
    # A writer lives, and no machine could meet it.
    run_locks.claim(folder, 0)
    append(folder, started(2))
    assert not takes_more(folder, machines)
    with pytest.raises(UserError, match="there is a run"):
        folder_for(tmp_path / "runs", mine, machines=machines)
