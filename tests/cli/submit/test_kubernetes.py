"""`rankzero submit --kubernetes`: a manifest that Kubernetes takes, and pods that train."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from rankzero.cli.main import main, parse
from support.commands import TINY, Command, losses, starts, tracked, wait_until
from support.two_machines import NAMESPACES, SCRIPT

KUBERNETES = ("submit", "--kubernetes", str(TINY), "--image", "registry.example/train:1")
CLAIM = ("--claim", "runs")
SETTINGS = ("train.steps=60", "train.eval_every=20", "dropout=0.1", "augment=true")
# One container of a pod: its variables, its name in the cluster's DNS, and its exit code.
POD = """
grep -q job-0 /etc/hosts || echo '10.77.0.1 job-0.job' >> /etc/hosts
[ "$(hostname)" = first ]
export PET_NODE_RANK=$?
"$@" > "log.$(hostname)" 2>&1 &
echo $! > "pid.$(hostname)"
wait $!
echo $? > "code.$(hostname)"
"""


def manifest_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main([*KUBERNETES, *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize(
    "words",
    [
        CLAIM,
        (*CLAIM, "--nnodes", "4", "--gpus", "8", "--cpus", "64", "--memory", "512Gi"),
        ("--nnodes", "1:4", "--secret", "mlflow"),
        ("--tracking-uri", "http://mlflow:5000"),
    ],
    ids=" ".join,
)
def test_kubernetes_takes_the_manifest(
    words: tuple[str, ...], version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = manifest_of(capsys, *words)
    for part in parts:
        kubernetes_validate.validate(part, version, strict=True)
    assert [part["kind"] for part in parts[:-1]] == (["Service"] if "--nnodes" in words else [])


def test_pods_have_what_they_need_to_meet_and_to_continue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--name", "job", "--nnodes", "2", "--gpus", "8", "--cpus", "64", *CLAIM)
    service, job = manifest_of(capsys, *words)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "job"}
    spec, pod = job["spec"], pod_of(job)
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    (container,) = pod["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    # A pod's name in the cluster's DNS is HOSTNAME.SUBDOMAIN, and its host name JOB-INDEX.
    assert variables["PET_MASTER_ADDR"] == f"job-0.{pod['subdomain']}" == "job-0.job"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "64"}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "runs": variables["RANKZERO_DIR"]}


def test_without_a_claim_a_pod_waits_for_mlflow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKZERO_OFFLINE", "1")  # the pods do not get it
    (job,) = manifest_of(capsys, "--secret", "mlflow")
    (container,) = pod_of(job)["containers"]
    assert container["env"] == [{"name": "RANKZERO_WAIT_DELIVERY", "value": "86400.0"}]
    assert container["envFrom"] == [{"secretRef": {"name": "mlflow"}}]


def test_variables_of_this_shell_are_not_of_the_pods(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://team:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    monkeypatch.setenv("PET_NNODES", "2")
    assert main([*KUBERNETES, *CLAIM, "--experiment-name", "ours"]) == 0
    captured = capsys.readouterr()
    noted = "note: the pods do not get MLFLOW_TRACKING_URI of this shell: give the option, or a"
    assert captured.err == f"{noted} --secret that has it\n"
    (job,) = yaml.safe_load_all(captured.out)
    assert job["spec"]["completions"] == 1, "the pods would be two trainings of one name"
    assert main([*KUBERNETES, "--secret", "mlflow"]) == 0 and not capsys.readouterr().err


def test_a_pod_gets_a_command_that_rankzero_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("lr=1e-2", "--nproc", "4", "--nnodes", "2", "--tag", "cost=$5", "--note", "1e3")
    _, job = manifest_of(capsys, *CLAIM, *words)
    (container,) = pod_of(job)["containers"]
    command = [word.replace("$$", "$") for word in container["command"]]
    assert command[0] == "rankzero"
    arguments = parse(command[1:])
    assert (arguments.verb, arguments.experiment, arguments.settings) == (
        "train",
        str(TINY),
        ["lr=1e-2"],
    )
    assert (arguments.nnodes, arguments.nproc, arguments.note) == ((2, 2), 4, "1e3")
    assert arguments.tag == [("cost", "$5")]
    assert arguments.resume_if_there and arguments.run_name == job["metadata"]["name"]


@pytest.mark.parametrize("word", ["1e3", "0o7", "y", "1_000", "2026-01-01", "~", "", "a: b #"])
def test_a_word_stays_text_in_any_version_of_yaml(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*KUBERNETES, *CLAIM, f"--note={word}", "--experiment-name", word]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if line.strip() in (f'- "{word}"', f"- '{word}'")]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((*KUBERNETES, *CLAIM, "lx=1"), "unknown key 'lx'"),
        (
            (*KUBERNETES, *CLAIM, "--gpus", "3", "--nnodes", "2", "train.batch_size=64"),
            "evenly among 6 processes",
        ),
        ((*KUBERNETES, *CLAIM, "--name", "My_Run"), "--name takes lower-case letters"),
        ((*KUBERNETES, *CLAIM, "--name", "a" * 53), "at most 52 characters"),
        ((*KUBERNETES, *CLAIM, "--rdzv-endpoint", "host:1"), "without --rdzv-endpoint"),
        ((*KUBERNETES, *CLAIM, "--dir", "here"), "--claim NAME instead of --dir"),
        ((*KUBERNETES, *CLAIM, "--", "--nodes", "2"), "change the manifest"),
        (KUBERNETES, "--claim NAME"),
        ((*KUBERNETES, "--offline", "--secret", "mlflow"), "--claim NAME"),
        ((*KUBERNETES[:3], *CLAIM), "needs --image"),
        ((*KUBERNETES, *CLAIM, "--slurm"), "not allowed with"),
        (("submit", "--slurm", str(TINY), "--gpus", "2"), "--gpus is for --kubernetes"),
    ],
)
def test_mistakes_are_found_before_the_job_waits(
    words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    assert error in capsys.readouterr().err


def pods_of(rankzero: Command, container: dict[str, Any]) -> subprocess.Popen[str]:
    """Start the container on two machines, with one folder as the claim of both."""
    variables = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    variables |= {"RANKZERO_DIR": str(rankzero.folder / "mlruns")}
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = (*NAMESPACES, SCRIPT, "bash", "sh", "-c", POD, "sh", *container["command"])
    pods = dataclasses.replace(rankzero, environ={**rankzero.environ, **variables, "PATH": paths})
    return pods.start_program(*words)


def codes(rankzero: Command, pods: subprocess.Popen[str]) -> list[int]:
    output, _ = pods.communicate(timeout=200)
    logs = [(rankzero.folder / f"log.{name}").read_text() for name in ("first", "second")]
    print(output, *logs, sep="\n")
    return [int((rankzero.folder / f"code.{name}").read_text()) for name in ("first", "second")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_pods_are_one_run_that_continues_after_one_of_them_is_stopped(
    rankzero: Command, namespaces: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rankzero.succeed("train", TINY, "--name", "whole", "--nproc", 2, *SETTINGS)
    words = (*SETTINGS, "--name", "job", "--nnodes", "2", "--nproc", "1", "step_seconds=0.1")
    _, job = manifest_of(capsys, *words, *CLAIM)
    (container,) = pod_of(job)["containers"]
    pods = pods_of(rankzero, container)
    rankzero.wait_for_step(5, "job")
    os.kill(int((rankzero.folder / "pid.second").read_text()), signal.SIGTERM)
    assert codes(rankzero, pods) == [75, 75]
    assert codes(rankzero, pods_of(rankzero, container)) == [0, 0]
    whole, *others = rankzero.runs
    (folder,) = others
    begun, again = starts(folder)
    assert begun == 0 and 5 <= again < 60 and losses(folder) == losses(whole)
    wait_until(lambda: tracked(folder).status == "FINISHED")
