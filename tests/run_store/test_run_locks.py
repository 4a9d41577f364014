"""Locks and folders that another user of the machine can neither hold nor plant."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankzero.errors import UserError
from rankzero.launch import rendezvous
from rankzero.lightning_module.data import one_at_a_time
from rankzero.mlflow_store import uris
from rankzero.run_store import disk, lock_files, run_locks
from rankzero.run_store.attempt import sole_launcher, take_over
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.training.distributed.torch_compat import keep_compiled_code_private
from support.runs import make_folder
from support.second_user import as_nobody, locked, needs_root, nobody_locks

pytestmark = needs_root


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter and read, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="rankzero-shared-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def run(shared: Path) -> RunFolder:
    """A run whose files have the modes that an ordinary umask gives."""
    folder = shared / "run"
    folder.mkdir(mode=0o755)
    (folder / "run.json").write_text("{}")
    return RunFolder(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_reader_of_a_run_blocks_nothing_of_it(run: RunFolder) -> None:
    for name in ("launcher.lock", "recorder.lock"):  # as older versions left them
        (run.path / name).touch(mode=0o644)
    with sole_launcher(run, 1), run_locks.lock(run, 0) as mine:
        assert mine
    token = run_locks.claim(run, 0).token
    with nobody_locks(run.path) as names:
        assert str(run.path) in names and str(run.path / "run.json") in names
        assert not [name for name in names if name.endswith((".lock", ".live"))]
        with sole_launcher(run, 1), run_locks.lock(run, 0) as mine:
            assert mine
        assert not run_locks.has_live_recorder(run)
        descriptor = run_locks.announce_recorder(run, 0, token)
        assert descriptor is not None and run_locks.has_live_recorder(run)
        os.close(descriptor)


def test_a_reader_of_a_run_does_not_end_the_exclusion_of_two_attempts(run: RunFolder) -> None:
    with nobody_locks(run.path), run_locks.exclusive_end(run):
        other = lock_files.open_lock(run.path / "attempt.lock")
        assert not lock_files.try_lock(other)
        os.close(other)


def test_readers_see_the_claim_of_a_run(run: RunFolder) -> None:
    """`rankzero runs` of a colleague shows a run that trains as one that trains."""
    claim = run_locks.claim(run, 0)
    assert as_nobody(lambda: getattr(run_locks.latest(run, 0), "token", None)) == claim.token
    assert as_nobody(lambda: run_locks.writer_lives(run))


def test_a_writer_in_another_container_of_this_host_lives_while_its_recorder_does(
    run: RunFolder,
) -> None:
    """As with `docker run --network host`, which gives the container the host's name."""
    folder = run
    claim = run_locks.claim(folder, 0)
    assert run_locks.writer_lives(folder)
    other = dataclasses.replace(claim, namespace="pid:[1]", pid_started="0")
    (folder.path / "recorder.json").write_text(json.dumps(dataclasses.asdict(other)))
    recorder = run_locks.announce_recorder(folder, 0, claim.token)
    assert recorder is not None and run_locks.writer_lives(folder)
    folder.events.touch()
    # A user who may not open the lock sees that the run is written.
    assert as_nobody(lambda: run_locks.writer_lives(folder))
    with pytest.raises(UserError, match=f"process {claim.pid} is writing"):
        take_over(folder)  # of the same pid in this container
    os.close(recorder)
    assert not run_locks.writer_lives(folder)


def test_a_claim_of_a_newer_version_is_a_claim(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    claim = run_locks.claim(folder, 0)
    fields = dataclasses.asdict(claim) | {"later": 1}
    (folder.path / "recorder.json").write_text(json.dumps(fields))
    assert run_locks.latest(folder, 0) == claim


def test_who_may_write_a_folder_may_take_its_locks(shared: Path) -> None:
    for folder_mode, lock_mode in ((0o755, 0o600), (0o775, 0o660), (0o777, 0o666)):
        shared.chmod(folder_mode)
        os.close(lock_files.open_lock(shared / f"{folder_mode:o}.lock"))
        assert mode(shared / f"{folder_mode:o}.lock") == lock_mode


def test_a_lock_is_not_opened_through_a_link(shared: Path) -> None:
    (shared / "precious").write_text("kept")
    (shared / "a.lock").symlink_to(shared / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        lock_files.open_lock(shared / "a.lock")


def test_a_reader_of_the_embedded_store_does_not_block_its_setup(shared: Path) -> None:
    uri = f"sqlite:///{shared}/mlflow.db"
    uris.prepare_store(uri)
    with nobody_locks(shared) as names:
        assert str(shared) in names
        uris.prepare_store(uri)


def test_links_planted_for_the_lock_of_prepare_data_are_not_followed(shared: Path) -> None:
    shared.chmod(0o1777)
    victim = shared / "victim"
    victim.mkdir(mode=0o755)
    (victim / "precious").write_text("kept")
    as_nobody(lambda: (shared / "rankzero-0").symlink_to(victim))
    with one_at_a_time("Data", shared):
        assert [path.name for path in victim.iterdir()] == ["precious"]


def test_a_folder_planted_for_the_lock_of_prepare_data_blocks_nobody(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared.chmod(0o1777)
    as_nobody(lambda: (shared / "rankzero-0").mkdir(mode=0o777))
    with one_at_a_time("Data", shared, seconds=0):
        assert "another user has taken" in capsys.readouterr().out
    assert not list((shared / "rankzero-0").iterdir())


def test_one_process_of_a_user_prepares_data_and_others_wait_for_a_time(shared: Path) -> None:
    with one_at_a_time("Data", shared):
        own = shared / "rankzero-0"
        assert mode(own) == 0o700 and as_nobody(lambda: len(locked(own))) == 0
        with (
            pytest.raises(UserError, match="preparing the data of Data"),
            one_at_a_time("Data", shared, seconds=0.1),
        ):
            pytest.fail("two processes prepare at once")
    with one_at_a_time("Data", shared, seconds=0):
        pass


def test_compiled_code_is_not_loaded_from_a_planted_folder(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    keep_compiled_code_private(environ := {})
    assert environ == {"TORCHINDUCTOR_CACHE_DIR": f"{shared}/rankzero-0/torchinductor"}
    (shared / "rankzero-0").rmdir()
    as_nobody(lambda: (shared / "rankzero-0").mkdir(mode=0o777))
    keep_compiled_code_private(environ := {})
    found = Path(environ["TORCHINDUCTOR_CACHE_DIR"])
    assert found.stat().st_uid == 0 and mode(found) == 0o700
    keep_compiled_code_private(environ := {"TORCHINDUCTOR_CACHE_DIR": "/mine"})
    assert environ == {"TORCHINDUCTOR_CACHE_DIR": "/mine"}


def test_a_run_starts_in_a_folder_that_its_user_may_write_but_not_read(shared: Path) -> None:
    (shared / "runs").mkdir()
    (shared / "runs").chmod(0o733)
    shared.chmod(0o711)
    identity = Identity("run", "run", "e", "sqlite:////nowhere.db")
    as_nobody(lambda: str(RunFolder.create(shared / "runs", identity).path))
    assert RunFolder(shared / "runs" / "run").identity == identity
    with pytest.raises(FileNotFoundError):
        disk.sync(shared / "missing")


def test_the_ranks_meet_elsewhere_if_tmpdir_cannot_be_written(shared: Path) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    places = [str(shared), str(shared / "open")]

    def chosen() -> str:
        with rendezvous.private_folder(places) as folder:
            return str(Path(folder).parent)

    def refusal() -> str:
        # No file may hold a byte, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with pytest.raises(UserError) as error:
            chosen()
        return str(error.value)

    assert as_nobody(chosen) == places[1]
    assert "set TMPDIR" in as_nobody(refusal)
    assert list((shared / "open").iterdir()) == []
