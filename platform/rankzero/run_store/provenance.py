"""Where a run comes from: commit, diff, packages, host, command line. Never a secret.

Imports no torch and no pynvml: what the run computes with, the trainer says.
"""

from __future__ import annotations

import dataclasses
import getpass
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankzero.redaction.assignments import is_secret_name
from rankzero.redaction.text import command_without_secrets, text_without_secrets
from rankzero.run_store.folder import write_atomically
from rankzero.run_store.names import InvalidRunFolder

GIT_SECONDS = 5.0
MOST_DIFF_BYTES = 1_000_000
MOST_UNTRACKED = 200
UNKNOWN = f"# git could not say within {GIT_SECONDS:.0f} seconds what has changed\n"
# A repository's own settings must not run programs of their choosing: no external diff, no text conversion, no
# filters, and no looking into submodules, which have settings of their own: diff.submodule=diff begins a git in each.
DIFF_OPTIONS = (
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--ignore-submodules=dirty",
    "--submodule=short",
)
FILTERS = r"^filter\..*\.(clean|process|required)$"
PACKAGES = ("torch", "torchvision", "mlflow", "optuna", "numpy", "nvidia-ml-py", "rankzero")
VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_NNODES",
    "SLURM_NTASKS",
}
VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a run comes from. Git's fields are None outside a repository, and where there is no git."""

    command: str
    host: str
    user: str
    system: str
    cpu_count: int
    python: str
    packages: Mapping[str, str]
    variables: Mapping[str, str]
    commit: str | None = None
    branch: str | None = None
    repository: str | None = None
    diff: str | None = None
    """What the working tree has that the commit has not, secrets blotted out; None where it is clean."""


def collect(project_dir: Path, argv: Sequence[str], environ: Mapping[str, str]) -> Provenance:
    """Look around. Never raises for lack of git, a user name or a package."""
    return Provenance(
        command=command_without_secrets(argv),
        host=socket.gethostname(),
        user=_user(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_count=os.cpu_count() or 1,
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        variables=allowed(environ),
        **_git_facts(project_dir),
    )


def environment(found: Provenance) -> dict[str, str]:
    """Return the run's tags, under MLflow's names where it has them."""
    tags = {
        "mlflow.user": found.user,
        "mlflow.source.name": found.command,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": found.commit,
        "mlflow.source.git.branch": found.branch,
        "mlflow.source.git.repoURL": found.repository,
        "rankzero.dirty": None if found.commit is None else str(found.diff is not None).lower(),
        "rankzero.command": found.command,
        "rankzero.host": found.host,
        "rankzero.system": found.system,
        "rankzero.cpu_count": str(found.cpu_count),
        "rankzero.python": found.python,
        **{f"rankzero.package.{name}": version for name, version in found.packages.items()},
        **{f"rankzero.env.{name}": value for name, value in found.variables.items()},
    }
    return {name: value for name, value in tags.items() if value}


def write_artifacts(found: Provenance, folder: Path) -> None:
    """Write ``provenance/environment.json``, and ``provenance/diff.patch`` where the working tree is dirty."""
    target = _made(folder)
    facts = {name: value for name, value in dataclasses.asdict(found).items() if name != "diff"}
    write_atomically(target / "environment.json", json.dumps(facts, indent=2))
    if found.diff is not None:
        write_atomically(target / "diff.patch", found.diff)


def changed_between(project_dir: Path, one: str, other: str) -> str:
    """Return what changed between two commits, as ``git diff --stat`` says it; empty where git cannot say."""
    if not all(part and not part.startswith("-") for part in (one, other)):
        return ""
    return _git(project_dir, "diff", "--stat=76", *DIFF_OPTIONS, one, other, "--") or ""


def read_packages(folder: Path) -> dict[str, str]:
    """Return what `write_packages` wrote, version by name; empty where it did not."""
    try:
        lines = (folder / "provenance" / "packages.txt").read_text().splitlines()
    except OSError:
        return {}
    return {name: version for name, _, version in (line.partition("==") for line in lines)}


def read_diff(folder: Path) -> str:
    """Return the uncommitted changes that `write_artifacts` wrote; empty where there were none."""
    try:
        return (folder / "provenance" / "diff.patch").read_text(errors="replace")
    except OSError:
        return ""


def write_packages(folder: Path) -> None:
    """Write ``provenance/packages.txt``: every installed distribution, as ``name==version``. Takes a while."""
    target = _made(folder)
    lines = {f"{found.name}=={found.version}" for found in importlib.metadata.distributions()}
    write_atomically(target / "packages.txt", "\n".join(sorted(lines, key=str.lower)) + "\n")


def _made(folder: Path) -> Path:
    """Return the place for provenance below the artifacts, made if need be; the run's folder is not: it may be gone."""
    target = folder / "provenance"
    folder.mkdir(exist_ok=True)
    if target.is_symlink():
        raise InvalidRunFolder(
            f"{target} is a link, through which nothing is written: take it away"
        )
    target.mkdir(exist_ok=True)
    return target


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may be recorded: a list of names, and no value that looks secret."""
    return {
        name: text_without_secrets(value)
        for name, value in sorted(environ.items())
        if (name in VARIABLES or name.startswith(VARIABLE_PREFIXES)) and not is_secret_name(name)
    }


def _git_facts(project_dir: Path) -> dict[str, str | None]:
    found = _git(project_dir, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if found is None:
        return {}
    commit, _, branch = found.strip().partition("\n")
    remote = _git(project_dir, "config", "--get", "remote.origin.url")
    return {
        "commit": commit,
        "branch": None if branch.strip() == "HEAD" else branch.strip(),  # detached
        "repository": text_without_secrets(remote.strip()) if remote else None,
        "diff": _diff(project_dir),
    }


def _diff(project_dir: Path) -> str | None:
    changes = _git(
        project_dir, "diff", "HEAD", *DIFF_OPTIONS, settings=_without_filters(project_dir)
    )
    untracked = _git(project_dir, "ls-files", "--others", "--exclude-standard", "--full-name", ":/")
    if changes == untracked == "":
        return None
    return text_without_secrets(
        _untracked_lines(untracked or "") + _cut(UNKNOWN if changes is None else changes)
    )


def _without_filters(project_dir: Path) -> dict[str, str]:
    """Return the settings that keep git from running the filters that the repository itself defines."""
    found = (
        _git(project_dir, "config", "--show-scope", "--name-only", "--get-regexp", FILTERS) or ""
    )
    settings = [line.partition("\t") for line in found.splitlines()]
    own = [name for scope, _, name in settings if scope in ("local", "worktree")]
    return {name: "false" if name.endswith(".required") else "" for name in own}


def _untracked_lines(listed: str) -> str:
    names = listed.splitlines()
    lines = [f"# untracked: {name}\n" for name in names[:MOST_UNTRACKED]]
    more = len(names) - MOST_UNTRACKED
    return "".join(lines) + (f"# untracked: {more} more\n" if more > 0 else "")


def _cut(changes: str) -> str:
    """Return the first whole lines, `MOST_DIFF_BYTES` at most: half a secret would not be recognised."""
    whole = changes.encode()
    if len(whole) <= MOST_DIFF_BYTES:
        return changes
    kept = whole[: whole.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1]
    return kept.decode(errors="ignore") + "# cut: the diff is larger\n"


def _git(project_dir: Path, *words: str, settings: Mapping[str, str] | None = None) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "--no-pager", *words]
    environ = {
        **os.environ,
        **_as_variables(settings or {}),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    environ["GIT_NO_LAZY_FETCH"] = "1"
    environ["GIT_ALLOW_PROTOCOL"] = ""  # the same, for a git that does not know that variable yet
    try:
        done = subprocess.run(
            command,
            cwd=project_dir,
            env=environ,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _as_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return git's settings as variables, behind those that are there: on a command line, a name may not hold a =."""
    if not settings:
        return {}
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    pairs = {
        f"GIT_CONFIG_{part}_{first + number}": text
        for number, setting in enumerate(settings.items())
        for part, text in zip(("KEY", "VALUE"), setting, strict=True)
    }
    return {**pairs, "GIT_CONFIG_COUNT": str(first + len(settings))}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
