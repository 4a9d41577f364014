"""The parts of a whole search that need no training."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rankzero import Experiment
from rankzero.catalog.lookup import last_end
from rankzero.config import override
from rankzero.errors import UserError
from rankzero.run_store import run_locks
from rankzero.run_store.folder import Identity, RunFolder
from rankzero.tracking import delivery_status
from rankzero.tuning import members, search
from rankzero.tuning.agreement import SPACE, agree_on_space
from rankzero.tuning.options import SearchOptions
from rankzero.tuning.search import (
    SearchSetup,
    has_changed,
    helper_name,
    how_many_devices,
    refuse_other_storage,
)
from rankzero.tuning.space import make_space
from rankzero.tuning.study import find_study, open_study
from rankzero.tuning.trials.describe import ExperimentDescription
from rankzero.tuning.verdict.decide import Candidate
from support import runs
from support.runs import make_folder


@pytest.mark.parametrize(
    ("strategy", "devices", "gpus", "words"),
    [
        ("ddp", (1,), 0, ""),
        ("ddp", (4,), 4, ""),
        ("ddp", (1,), 4, " --nproc 1"),
        ("ddp", (2,), 0, " --nproc 2"),
        ("single", (1,), 4, ""),
        ("ddp", (1, 4), 4, " --nproc 4"),
    ],
)
def test_the_command_that_uses_the_result_trains_on_as_many_devices(
    strategy: str, devices: tuple[int, ...], gpus: int, words: str
) -> None:
    own, *more = devices
    reference = override(Experiment(), {"train.strategy": strategy})
    space = make_space(reference, own, 0.5, more=more)
    winner = Candidate(0, {}, 32, (), devices[-1])
    assert how_many_devices(space, winner, gpus) == words


def test_the_knobs_and_the_machines_decide_on_how_many_devices_the_result_trains() -> None:
    space = make_space(Experiment(), 1, 0.5)
    single = Candidate(0, {"train.strategy": "single"}, 32, ())
    assert how_many_devices(space, single, 4) == ""
    two = dataclasses.replace(space, devices=(2,), machines=2)
    found = how_many_devices(two, Candidate(0, {}, 32, (), 2), 1)
    assert found == " --nproc 1 --nnodes 2 --rdzv-endpoint HOST:PORT"


def test_helpers_with_the_same_process_number_have_runs_of_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    pods = [open_study(url, "s", sampler="tpe", pruner="none", seed=0) for _ in range(3)]
    assert len({helper_name(study) for study in pods}) == 3
    assert all(helper_name(study).startswith("s-helper-") for study in pods)


def test_a_study_knows_the_code_that_it_began_with(tmp_path: Path) -> None:
    study = open_study(f"sqlite:///{tmp_path / 's.db'}", "s", sampler="tpe", pruner="none", seed=0)
    assert not has_changed(study, "one") and not has_changed(study, "one")
    assert has_changed(study, "another") and not has_changed(study, "one")


def test_a_new_study_does_not_begin_in_the_run_of_another(tmp_path: Path) -> None:
    storage, folder = f"sqlite:///{tmp_path / 's.db'}", make_folder(tmp_path, name="s")
    refuse_other_storage(storage, folder)
    folder.add_child("s-t00")
    with pytest.raises(UserError, match="in another --storage, its database is lost, or an old"):
        refuse_other_storage(storage, folder)
    with pytest.raises(UserError, match="there are none yet"):
        find_study(storage, "s")
    study = open_study(storage, "s", sampler="tpe", pruner="none", seed=0)
    study.note(SPACE, {})
    refuse_other_storage(storage, folder)


def setup_in(tmp_path: Path, notify: Callable[[str], None] = print) -> SearchSetup:
    described = ExperimentDescription("Experiment", (), {}, 0.5, 1, 9, True, ("fp32",), "cpu", "")
    return SearchSetup(
        Identity("s", "uuid", "tests", f"sqlite:///{tmp_path / 'mlflow.db'}"),
        tmp_path,
        make_space(Experiment(), 1, 0.5),
        described,
        SearchOptions(),
        f"sqlite:///{tmp_path / 's.db'}",
        shared=True,
        probes=False,
        like=None,
        use="",
        again="",
        offline=True,
        tags={},
        argv=[],
        hosts=[],
        notify=notify,
    )


@pytest.mark.parametrize("same_folder", [False, True])
def test_a_leader_that_lost_the_lead_ends_its_part_and_not_the_study(
    tmp_path: Path, same_folder: bool
) -> None:
    storage = f"sqlite:///{tmp_path / 's.db'}"
    study = open_study(storage, "s", sampler="tpe", pruner="none", seed=0)
    assert members.lead(study)
    folder = RunFolder(tmp_path / "runs" / "s")

    def notify(_: str) -> None:
        """Let another process lead, as when the database was away for a while."""
        study.note(members.LEADER, "elsewhere 1 2")
        if same_folder:
            run_locks.claim(folder, 0)
        members.require_lead(study)

    setup = setup_in(tmp_path, notify)
    parent = {"uuid": "uuid", "tracking_uri": setup.identity.tracking_uri}
    for noted in (parent, {**parent, "host": socket.gethostname()}):  # earlier versions: no host
        study.note("parent", noted)
        with pytest.raises(UserError, match="still has the study: choose another --name"):
            search._lead(setup, study)  # its run is erased
    study.note("parent", {**parent, "host": "another machine"})
    outcome = search._lead(setup, study)
    assert "Another one leads it since, and decides." in outcome.text
    ended = last_end(folder)
    if same_folder:
        runs.append(folder, runs.ended())  # or the recorder would wait for the other
        assert ended is None, "it ended the other one's attempt"
    else:
        assert ended is not None and (ended.status, ended.reason) == ("FINISHED", outcome.text)
    delivery_status.wait_for_recorder(folder)
    study.members.close()


def test_a_helper_counts_no_copies_of_its_trials(tmp_path: Path) -> None:
    setup = setup_in(tmp_path)
    study = open_study(setup.storage, "s", sampler="tpe", pruner="none", seed=0)
    agree_on_space(study, setup.space, [], setup.options)
    for name in ("first", "parent", "target"):
        study.note(name, [])
    for facts in ({}, {"same_as": 0}):
        study.tell(study.ask(), "COMPLETE", 1.0, {}, facts)
    outcome = search._help(setup, study)
    assert "Helped with 1 trials of s" in outcome.text and outcome.folder is not None
    delivery_status.wait_for_recorder(outcome.folder)
    study.members.close()
