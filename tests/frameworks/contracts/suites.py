"""Where the frameworks' own tests are: in an installed package, in an sdist, in a repository."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path


class NoSuite(Exception):
    """A suite that cannot be had, with the reason."""


@dataclass(frozen=True)
class Installed:
    """The wheel has the tests."""


@dataclass(frozen=True)
class Sdist:
    """Only the sdist has the tests."""


@dataclass(frozen=True)
class Repository:
    """Only a repository has it, at a tag of each version or at a commit."""

    url: str
    tag: str


@dataclass(frozen=True)
class Suite:
    """The tests of one framework.

    `environment`: the folder ``.venv-<environment>`` that has the framework. `files`: those that
    test loggers, trackers, handlers or callbacks. `imports`: the folder of the suite from which its
    tests import each other.
    """

    environment: str
    distribution: str
    source: Installed | Sdist | Repository
    files: tuple[str, ...]
    imports: str = "."


# Those whose packages are installed, and that need no service.
_KERAS_CALLBACKS = (
    *("callback", "csv_logger", "lambda_callback", "monitor_callback", "terminate_on_nan"),
    *("early_stopping", "reduce_lr_on_plateau", "learning_rate_scheduler", "model_checkpoint"),
    *("backup_and_restore", "swap_ema_weights"),
)

SUITES = {
    "lightning": Suite(
        "integrations",
        "lightning",
        Repository("https://github.com/Lightning-AI/pytorch-lightning", "{}"),
        ("tests/tests_pytorch/loggers",),
        "tests",
    ),
    "accelerate": Suite("integrations", "accelerate", Sdist(), ("tests/test_tracking.py",)),
    "ignite": Suite(
        "integrations",
        "pytorch-ignite",
        Sdist(),
        tuple(
            f"tests/ignite/handlers/test_{name}_logger.py" for name in ("base", "wandb", "mlflow")
        ),
    ),
    "transformers": Suite(
        "integrations",
        "transformers",
        Repository("https://github.com/huggingface/transformers", "v{}"),
        ("tests/trainer/test_trainer_callback.py",),
    ),
    "keras": Suite(
        "keras",
        "keras",
        Installed(),
        (
            *(f"keras/src/callbacks/{name}_test.py" for name in _KERAS_CALLBACKS),
            "keras/src/trainers/trainer_test.py",
        ),
    ),
}


def find(suite: Suite, python: Path, cache: Path) -> Path:
    """Return the folder of the suite that belongs to the installed version. Raises NoSuite.

    `cache`: where fetched suites lie.
    """
    name = suite.distribution
    version = _output(
        python, "-c", f"from importlib.metadata import version; print(version({name!r}))"
    )
    if isinstance(suite.source, Installed):
        return Path(_output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    return fetch(suite.source, name, version, cache)


def fetch(source: Sdist | Repository, name: str, version: str, cache: Path) -> Path:
    """Return the folder of sources, which it fetches once. Raises NoSuite."""
    target = cache / f"{name}-{version}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            found = _fetched(source, name, version, Path(folder))
            found.rename(target)
    return target


def _fetched(source: Sdist | Repository, name: str, version: str, folder: Path) -> Path:
    if isinstance(source, Repository):
        suite, tag = folder / "suite", source.tag.format(version)
        _output("git", "init", "-q", suite)
        # Unlike `git clone --branch`, it also takes a commit.
        _output("git", "-C", suite, "fetch", "-q", "--depth", "1", source.url, tag)
        _output("git", "-C", suite, "checkout", "-q", "FETCH_HEAD")
        return suite
    _output(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-binary", name, "--dest", folder, f"{name}=={version}"),
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "suite", filter="data")
    (found,) = (folder / "suite").iterdir()
    return found


def _output(*words: str | Path) -> str:
    try:
        done = subprocess.run(words, check=False, text=True, capture_output=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoSuite(str(error)) from error
    if done.returncode:
        command = " ".join(map(str, words))
        raise NoSuite(f"{command}\n{done.stderr.strip()[-600:]}")
    return done.stdout.strip()
