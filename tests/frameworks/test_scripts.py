"""Training scripts that others wrote, with lines of ours: two processes, twice, and MLflow.

`make test-scripts` fetches them. Their code is never in this repository.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from frameworks.contracts.suites import NoSuite, Repository, fetch
from frameworks.examples import SECONDS, end, free_ports, start, steps_of, tracked
from frameworks.scripts.inserted import blocks, count, insert
from frameworks.scripts.theirs import SCRIPTS, Script
from rankzero.events import RunStarted, StepsLogged
from rankzero.run_store.journal import read_all
from support.paths import ROOT

CACHE = ROOT / ".suites"
TRACKERS = "rankzero", "wandb", "mlflow"
pytestmark = pytest.mark.timeout(3 * SECONDS)


def original(name: str) -> Path:
    """Return a script as its authors wrote it."""
    # They need Transformers' environment and, the first time, the network.
    if "RANKZERO_SCRIPTS" not in os.environ:
        pytest.skip("make test-scripts fetches and runs the scripts")
    source = SCRIPTS[name].source
    repository = source.url.rsplit("/", 1)[1]
    return fetch(source, repository, source.tag[:12], CACHE) / SCRIPTS[name].path


def prepared(name: str, folder: Path) -> Path:
    """Return a copy of a script with our lines in it, beside its data."""
    script, theirs = SCRIPTS[name], original(name)
    work = folder / "work"
    shutil.copytree(theirs.parent, work, ignore=shutil.ignore_patterns(".git"))
    for file, gpu, cpu in script.on_cpus:
        text = (work / file).read_text()
        assert gpu in text, f"{file} has no {gpu!r}"
        (work / file).write_text(text.replace(gpu, cpu))
    changed = work / theirs.name
    changed.write_text(insert(changed.read_text(), blocks(name, "rankzero")))
    script.write_data(work)
    return changed


def train(script: Script, file: Path, words: str) -> None:
    (port,) = free_ports(1)
    processes = f"--nproc-per-node={script.processes}", f"--master-port={port}"
    launcher = [sys.executable] if script.processes == 1 else ["torchrun", *processes]
    command = *launcher, file.name, *script.words.split(), *words.split()
    environ = {"CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(file.parent / "cache")}
    code, output = end(start(file.parent, *command, **environ))
    assert code == 0, output


def logged(folder: Path) -> list[set[int]]:
    """Return the steps that each attempt logged."""
    attempts: list[set[int]] = []
    for event in read_all(next((folder / "mlruns/runs").iterdir()) / "events.jsonl"):
        if isinstance(event, RunStarted):
            attempts.append(set())
        elif isinstance(event, StepsLogged):
            attempts[-1].update(event.steps)
    return attempts


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_of_others_is_one_run_that_resumes(name: str, tmp_path: Path) -> None:
    script, file = SCRIPTS[name], prepared(name, tmp_path)
    train(script, file, script.first)
    train(script, file, script.second)
    found = tracked(file.parent)
    assert found.status == "FINISHED"
    assert steps_of(file.parent, found, "train/loss") == script.train
    assert {val: steps_of(file.parent, found, val) for val in script.val} == script.val
    assert script.params.items() <= found.params.items()
    assert [*file.parent.glob(script.kept)]
    # An evaluation after the training is an attempt without steps.
    first, second = filter(None, logged(file.parent))
    # nanoGPT repeats the step of its checkpoint.
    assert min(second) >= max(first)


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_lines_for_each_tracker_fit_the_script(name: str, tracker: str) -> None:
    ast.parse(insert(original(name).read_text(), blocks(name, tracker)))


def test_page_counts_the_lines() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    for name in SCRIPTS:
        counts = " | ".join(str(count(name, tracker)) for tracker in TRACKERS)
        assert f"| {name} | {counts} |" in page


def test_repository_is_fetched_once_at_its_commit(tmp_path: Path) -> None:
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    git = "git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"
    subprocess.run(["git", "init", "-q", repository], check=True)
    for text in ("old", "new"):
        (repository / "train.py").write_text(text)
        subprocess.run([*git, "add", "train.py"], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
    tag = subprocess.check_output([*git, "rev-parse", "HEAD~1"], text=True).strip()
    source = Repository(str(repository), tag)
    assert (fetch(source, "it", "1", cache) / "train.py").read_text() == "old"
    shutil.rmtree(repository)
    assert (fetch(source, "it", "1", cache) / "train.py").read_text() == "old"
    with pytest.raises(NoSuite, match="fetch"):
        fetch(source, "it", "2", cache)
    assert [path.name for path in cache.iterdir()] == ["it-1"]
