"""How long the end of a run waits for MLflow, by what was asked for and by where it runs."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from rankzero.cli import main
from rankzero.errors import UserError
from rankzero.mlflow_store.patience import goes_with_its_container, grace_seconds, patience

GRACE, WAIT = "RANKZERO_DELIVERY_GRACE_SECONDS", "RANKZERO_WAIT_DELIVERY"


@pytest.mark.parametrize(
    ("environ", "expected", "of_the_courier"),
    [
        ({}, (60, 15, False), 60),
        ({GRACE: "7"}, (7, 15, False), 7),
        ({WAIT: "300"}, (300, math.inf, True), 300),
        ({WAIT: "300", GRACE: "7"}, (300, math.inf, True), 300),
        ({WAIT: "5"}, (5, math.inf, True), 60),
        ({WAIT: "0"}, (0, math.inf, True), 60),
        ({WAIT: "86400"}, (86400, math.inf, True), 600),
        ({WAIT: "86400", GRACE: "900"}, (86400, math.inf, True), 900),
        ({WAIT: "soon"}, (60, 15, False), 60),
        ({WAIT: "nan", GRACE: "-1"}, (60, 15, False), 60),
        ({"SLURM_JOB_ID": "1"}, (600, 60, False), 60),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (600, 60, False), 60),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", GRACE: "7"}, (7, 15, False), 7),
        ({"SYSTEMD_EXEC_PID": str(os.getpid())}, (600, 60, False), 60),
        ({"SYSTEMD_EXEC_PID": "1", WAIT: ""}, (60, 15, False), 60),
    ],
)
def test_waiting_depends_on_the_option_and_on_the_container(
    environ: dict[str, str], expected: tuple[float, float, bool], of_the_courier: float
) -> None:
    assert tuple(patience(environ)) == expected
    assert grace_seconds(environ) == of_the_courier


def test_child_of_the_first_process_in_a_pid_namespace_goes_with_its_container(
    tmp_path: Path,
) -> None:
    namespace = tmp_path / "pid"
    assert not goes_with_its_container({}, 1, namespace), "no /proc"
    namespace.symlink_to("pid:[4026531836]")
    assert not goes_with_its_container({}, 1, namespace), "init has adopted this process"
    namespace.unlink()
    namespace.symlink_to("pid:[4026532999]")
    assert goes_with_its_container({}, 1, namespace)
    assert not goes_with_its_container({}, 7, namespace, tmp_path)


@pytest.mark.parametrize(
    ("first", "above", "goes"), [("tini", 1, True), ("sshd", 1, False), ("docker-init", 5, False)]
)
def test_child_of_an_init_in_a_container_goes_with_it(
    first: str, above: int, goes: bool, tmp_path: Path
) -> None:
    (tmp_path / "pid").symlink_to("pid:[4026532999]")
    for process, file, text in (("1", "comm", first), ("7", "stat", f"7 (a) b) S {above} 7 7")):
        (tmp_path / process).mkdir()
        (tmp_path / process / file).write_text(f"{text}\n")
    assert goes_with_its_container({}, 7, tmp_path / "pid", tmp_path) == goes


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["--wait-delivery", "x.py"], 86400.0),
        (["--wait", "x.py"], 86400.0),
        (["x.py", "--wait-delivery=30", "lr=1"], 30.0),
        (["x.py"], None),
    ],
)
def test_option_takes_its_seconds_after_an_equals_sign(
    words: list[str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT, raising=False)
    found = main.parse(["train", *words])
    assert (found.experiment, found.wait_delivery) == ("x.py", seconds)


@pytest.mark.parametrize("value", ["soon", "nan", "-5"])
def test_wait_that_is_no_number_of_seconds_is_one_error(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT, raising=False)
    for words in (["x.py", f"--wait-delivery={value}"], ["x.py"]):
        with pytest.raises(
            UserError, match=f"{value}' \\(also from {WAIT}\\) is not a number of sec"
        ):
            main.parse(["train", *words])
        monkeypatch.setenv(WAIT, value)
