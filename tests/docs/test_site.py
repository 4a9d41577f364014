"""The documentation: its site has no broken link, its code runs, its commands are legal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rankzero
from rankzero import config, experiment_file
from rankzero.cli import main
from rankzero.errors import UserError
from support.commands import Command
from support.training import Trainer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


# The words that people type, and the heading that answers them. Below: whose text does.
ANSWERS = {
    "early stopping": "experiments/#early-stopping",
    "gradient accumulation": "experiments/#batch-size-and-gradient-accumulation",
    "mixed precision": "experiments/#mixed-precision",
    "checkpoint": "experiments/#checkpoints",
    "seed": "experiments/#seed-and-reproducibility",
    "resume": "commands/#how-to-resume-a-run",
    "multi-GPU": "strategies/",
    "profiling": "strategies/#profiling",
    "out of memory": "strategies/#out-of-memory",
    "hyperparameter search": "search/",
    "learning rate scheduler": "experiments/#learning-rate-scheduler",
    "gradient clipping": "experiments/#gradient-clipping",
    "reproducibility": "experiments/#seed-and-reproducibility",
    "slurm": "slurm/",
    "ray": "ray/",
    "offline": "commands/#train-without-mlflow-offline",
    "tensorboard": "migration/#tensorboard",
    "fsdp": "strategies/#fsdp",
    "delete runs": "commands/#delete-runs",
    "cost": "search/#how-many-devices-and-what-it-costs",
}
MENTIONS = {
    "wandb": "migration/#weights-biases",
    "docker": "kubernetes/#the-image",
    "profiler": "strategies/#profiling",
    "notebook": "results/#in-python",
    "custom metric": "experiments/#metrics-that-are-no-means",
    "dataset": "experiments/#methods",
    "distributed sampler": "experiments/#order",
    "deepspeed": "frameworks/",
    "horovod": "frameworks/",
    "hang": "troubleshooting/#failures",
    "NaN": "troubleshooting/#failures",
    "disk full": "troubleshooting/#failures",
    "energy": "search/#options",
}
# Links are no loads: a reader may follow them.
LOADS = re.compile(r'<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"')


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    settings = (tmp_path / "site/reference/settings/index.html").read_text()
    assert "train.limits.hang_minutes" in settings and "name the rank" in settings
    assert "<td></td>" not in settings, "every setting has a description"
    assert "rankzero compare" in (tmp_path / "site/reference/commands/index.html").read_text()
    measured = (tmp_path / "site/benchmarks/index.html").read_text()
    rows = [
        line for line in (ROOT / "benchmarks/README.md").read_text().splitlines() if "|" in line
    ]
    assert measured.count("<tr>") == sum(not line.startswith("|---") for line in rows)
    assert 'href="../decisions/0046-' in measured and 'src="../images/replay.png"' in measured
    assert 'href="../benchmarks/"' in (tmp_path / "site/comparison/index.html").read_text()
    pages = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert not LOADS.findall("".join(pages.values())), "the site opens offline"
    python = pages[tmp_path / "site/reference/python/index.html"]
    for name in set(rankzero.__all__) - {"__version__"}:
        home = getattr(rankzero, name)
        assert f'id="{home.__module__}.{home.__qualname__}"' in python, name
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    for part, answers in (("title", ANSWERS), ("text", MENTIONS)):
        found = {entry["location"]: entry[part].casefold() for entry in index}
        missing = [one for one, at in answers.items() if one.casefold() not in found.get(at, "")]
        assert missing == [], part


@pytest.mark.parametrize(
    "page",
    ["experiments.md", "own-loop.md", pytest.param("migration.md", marks=pytest.mark.slow)],
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    # A later block shows one need. The next test runs it.
    count = 1 if page == "experiments.md" else None
    script.write_text("\n".join(blocks(ROOT / "docs" / page, "python")[:count]))
    words = [sys.executable, str(script)]
    if page == "experiments.md":
        words = [
            sys.executable,
            "-m",
            "rankzero",
            "train",
            str(script),
            "train.epochs=1",
            "train.mlflow.log_model=false",
        ]
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "RANKZERO_"))
    }
    done = subprocess.run(
        words, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=110, env=environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert any((tmp_path / "mlruns/runs").iterdir())


def test_each_block_of_the_guide_trains(train: Trainer, tmp_path: Path) -> None:
    texts = blocks(ROOT / "docs/experiments.md", "python")
    script = tmp_path / "guide.py"
    script.write_text("\n".join(texts))
    trained = []
    for name in re.findall(r"^class (\w+)\(", "\n".join(texts), re.M):
        with contextlib.suppress(UserError):  # a class that is no experiment
            trained.append(experiment_file.load(f"{script}:{name}"))
    assert len(trained) >= 2
    for experiment in trained:
        short = config.override(experiment(), {"train.epochs": 1, "train.steps": 2})
        assert train(short, tmp_path / experiment.__name__).state.step == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs(rankzero: Command, tmp_path: Path) -> None:
    page = ROOT / "docs/tutorial.md"
    # Shorter than on the page, where the search takes minutes.
    shorter = {
        "train": ["train.epochs=2"],
        "search": ["train.epochs=2", "goal.target=0.5", "--trials=2", "--seeds=2"],
    }
    for line in "".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line)[1:]
        code, output = rankzero(*words, *shorter.get(words[0], []))
        assert code == 0, output
    done = subprocess.run(
        [sys.executable, "-c", *blocks(page, "python")],
        cwd=tmp_path,
        env=rankzero.environ,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_four_commands_lead_from_an_empty_folder_to_the_browser() -> None:
    # tests/test_wheel.py runs the same commands with a wheel.
    first, *_ = blocks(ROOT / "docs/tutorial.md", "bash")
    words = [shlex.split(line)[:2] for line in first.splitlines()]
    verbs = (["rankzero", verb] for verb in ("init", "train", "ui"))
    assert words == [["pip", "install"], *verbs]


def test_blocks_without_a_language_are_found() -> None:
    assert "$ rankzero search" in "".join(blocks(ROOT / "README.md", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_legal(page: Path) -> None:
    found = [text for language in ("sh", "bash", "") for text in blocks(page, language)]
    lines = "".join(found).replace("\\\n", "").splitlines()
    for line in lines:
        # Such as OMP_NUM_THREADS=1 in front of it, and a pipe after it.
        command = re.fullmatch(r"(?:\$ )?(?:[A-Z_]+=\S+ )*rankzero (.*?)(?: [|>&].*)?", line)
        if command is not None and "…" not in line:
            main.parse(shlex.split(command[1], comments=True))
