"""The options of several machines, and the variables that stand for them."""

from __future__ import annotations

import argparse

import pytest

from launch.test_machines import STEP
from rankzero.cli import options
from rankzero.cli.main import main
from rankzero.errors import UserError
from rankzero.launch.machines import Machines
from support.commands import TINY

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29400",
}
ELASTIC = {
    "PET_NNODES": "1:3",
    "PET_NPROC_PER_NODE": "4",
    "PET_MAX_RESTARTS": "5",
    "PET_RDZV_ENDPOINT": "127.0.0.1:7",
    "PET_RDZV_ID": "job",
    "PET_RDZV_CONF": "last_call_timeout=5,read_timeout=9",
}


def parsed(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> argparse.Namespace:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    options.add_processes(parser)
    options.add_machines(parser)
    return parser.parse_args(words)


def test_variables_of_kubeflow_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed(KUBEFLOW, monkeypatch)
    second = {"is_host": "false", "read_timeout": "600"}
    expected = Machines(2, 2, "127.0.0.1:29400", "rankzero", "127.0.0.1", second, number=1)
    assert options.machines_of(arguments) == expected
    assert (arguments.nproc, arguments.max_restarts) == (None, 0)


def test_variables_of_torchrun_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed(ELASTIC, monkeypatch)
    patience = {"last_call_timeout": "5", "read_timeout": "9"}
    expected = Machines(1, 3, "localhost:7", "job", "127.0.0.1", patience, number=0)
    assert options.machines_of(arguments) == expected
    assert (arguments.nproc, arguments.max_restarts) == (4, 5)


def test_options_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--nnodes", "2", "--rdzv-endpoint", "localhost:8", "--local-addr", "10.0.0.7")
    found = options.machines_of(parsed(ELASTIC, monkeypatch, *words, "--rdzv-conf", ""))
    assert (found.most, found.endpoint, found.address) == (2, "localhost:8", "10.0.0.7")
    assert found.settings == {} and found.job == "job"
    conf = ("--rdzv-conf", "last_call_timeout=7")
    found = options.machines_of(parsed(ELASTIC, monkeypatch, *words, *conf))
    assert found.settings == {"last_call_timeout": "7", "read_timeout": "9"}


@pytest.mark.parametrize(
    ("name", "file", "job"),
    [
        (None, "/home/ada/my.py:Wide", "my.py"),
        (None, "my.py", "my.py"),
        ("first", "my.py", "first"),
        ("a/b", None, "a_b"),
    ],
)
def test_a_job_is_named_after_what_its_machines_have_in_common(
    name: str | None, file: str | None, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = parsed({}, monkeypatch, "--nnodes", "2", "--rdzv-endpoint", "localhost:8")
    arguments.run_name, arguments.experiment = name, file
    assert options.machines_of(arguments).job == job


def test_a_slurm_step_is_one_run_unless_a_count_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    one = STEP | {"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}
    found = options.machines_of(parsed(one, monkeypatch))
    assert (found.most, found.job) == (2, "41.0.0")
    assert options.machines_of(parsed(one, monkeypatch, "--nnodes", "1")) == Machines()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="starts the command 4 times on 2 machines"):
        options.machines_of(parsed(one | {"SLURM_STEP_NUM_TASKS": "4"}, monkeypatch))


@pytest.mark.parametrize("words", [("--nnodes", "3:2"), ("--nnodes", "0"), ("--nproc", "many")])
def test_counts_that_are_none(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(TINY), *words]) == 2
    assert words[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 2),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),  # Kubeflow's, for machines
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
    ],
)
def test_a_launcher_of_several_processes_is_refused(
    environ: dict[str, str], count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = parsed(environ, monkeypatch)
    if count is None:
        assert options.machines_of(arguments) == Machines()
    else:
        with pytest.raises(UserError, match=f"starts this command {count} times"):
            options.machines_of(arguments)
    arguments = parsed(environ, monkeypatch, "--nnodes", "1")
    assert options.machines_of(arguments) == Machines()
