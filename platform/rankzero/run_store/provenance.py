"""A run's origin: code, diff, packages, host, command line. Never a secret.

Imports neither torch nor pynvml: the trainer reports the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import getpass
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.redaction.assignments import is_secret_name
from rankzero.redaction.text import command_without_secrets, text_without_secrets
from rankzero.run_store import symlinks
from rankzero.run_store.folder import write_atomically
from rankzero.run_store.names import InvalidRunFolder

OWN_LOOP = "rankzero.own_loop"
"""The tag of a run of `rankzero.track`, which no command of RankZero can continue."""
GOAL = "rankzero.goal"
"""The goal of a run of `rankzero.track` that has one: its fields as a list of JSON."""
KEEP = "rankzero.keep"
"""How many of its best checkpoints a run of `rankzero.track` keeps."""
_GIT_SECONDS = 5.0
# For all submodules together: a training waits.
_SUBMODULES_SECONDS = 5.0
_MAX_DIFF_BYTES = 1_000_000
_MAX_UNTRACKED = 200
# Settings of a repository must not run programs of its choice: no external diff, no text
# conversion, no filters. diff.submodule=diff would start a git in each submodule, which has
# settings of its own: `_changes` asks each submodule without them.
_DIFF_OPTIONS = (
    *("--no-ext-diff", "--no-textconv", "--no-color"),
    *("--ignore-submodules=dirty", "--submodule=short"),
)
_FILTERS = r"^filter\..*\.(clean|process|required)$"
_PACKAGES = ("torch", "torchvision", "mlflow", "optuna", "numpy", "nvidia-ml-py", "rankzero")
_VARIABLES = {
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
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
_VARIABLE_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_")
_EARLY = ("NCCL_", "GLOO_", "TORCH_NCCL_", "PYTORCH_", "CUDA_DEVICE_", "CUDA_LAUNCH_")


# A resume from MLflow reads the first one. More tags would bury a user's.
_SHOWN = {
    "rankzero.experiment_file",
    "rankzero.dirty",
    "rankzero.study",
    "rankzero.out_of_memory",
}
# The beginnings of RankZero's and MLflow's tags. All other tags are the user's.
RESERVED = ("mlflow.", "rankzero.")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """A run's origin. Git's fields are None outside a repository and without git."""

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
    # The uncommitted changes without secrets, or None without changes.
    diff: str | None = None
    # "true": the diff restores the changes. "untracked": there are new files alone. "incomplete":
    # the diff was cut or redacted, or a binary file has changed.
    dirty: str = "false"
    # Why git's fields are None in a repository: the first line of git's error.
    git_error: str | None = None


def collect(
    project_dir: Path, argv: Sequence[str], environ: Mapping[str, str], own: Path | None = None
) -> Provenance:
    """Collect everything. Never raises for lack of git, a user name or a package.

    `own`: the folder of the runs. A change in it is no change of the user's code.
    """
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return Provenance(
        command=command_without_secrets(argv),
        host=socket.gethostname(),
        user=_user(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_count=os.cpu_count() or 1,
        python=platform.python_version(),
        packages=packages,
        variables=allowed(environ),
        **_git_facts(project_dir, own),
    )


def record(
    artifacts: Path, argv: Sequence[str], experiment_file: str | None = None
) -> dict[str, str]:
    """Collect everything now, write it into the run's artifacts, and return the run's tags."""
    runs = artifacts.absolute().parents[1]
    folder = _code_folder(experiment_file)
    # A user's code may lie next to the runs: `--dir .`
    is_next = any(one.is_relative_to(runs.parent.resolve()) for one in (Path.cwd(), folder))
    found = collect(folder, argv, os.environ, runs if is_next else runs.parent)
    if found.git_error:
        _note_once(f"the run has no commit: {found.git_error}")
    write_artifacts(found, artifacts)
    tags = environment(found)
    if experiment_file:
        tags["rankzero.experiment_file"] = os.path.relpath(experiment_file, Path.cwd())
    return tags


def environment(found: Provenance) -> dict[str, str]:
    """Return the run's tags, under MLflow's names where it has them."""
    tags = {
        "mlflow.user": found.user,
        "mlflow.source.name": found.command,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": found.commit,
        "mlflow.source.git.branch": found.branch,
        "mlflow.source.git.repoURL": found.repository,
        "rankzero.dirty": None if found.commit is None else found.dirty,
        "rankzero.command": found.command,
        "rankzero.host": found.host,
        "rankzero.system": found.system,
        "rankzero.cpu_count": str(found.cpu_count),
        "rankzero.python": found.python,
        **{f"rankzero.package.{name}": version for name, version in found.packages.items()},
        **{f"rankzero.env.{name}": value for name, value in found.variables.items()},
    }
    return {name: value for name, value in tags.items() if value}


def early_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded variables that a rank needs before it imports the user's file."""
    known = {key.removeprefix("rankzero.env."): text for key, text in environment.items()}
    return {name: text for name, text in known.items() if name.startswith(_EARLY)}


def tags_of_user(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a run that its user chose."""
    return {key: text for key, text in environment.items() if not key.startswith(RESERVED)}


def tags_for_mlflow(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that MLflow shows. All of them are in ``provenance/tags.json``."""
    return {
        key: text
        for key, text in environment.items()
        if key in _SHOWN or not key.startswith("rankzero.")
    }


def write_tags(folder: Path, environment: Mapping[str, str]) -> None:
    """Write ``provenance/tags.json``: every tag of an attempt."""
    write_atomically(_artifact_folder(folder) / "tags.json", json.dumps(environment, indent=2))


def write_artifacts(found: Provenance, folder: Path) -> None:
    """Write ``provenance/environment.json``, and ``provenance/diff.patch`` if there are changes."""
    target = _artifact_folder(folder)
    facts = {name: value for name, value in dataclasses.asdict(found).items() if name != "diff"}
    write_atomically(target / "environment.json", json.dumps(facts, indent=2))
    # That of an earlier attempt becomes empty: MLflow would keep one that is deleted here.
    if found.diff is not None or (target / "diff.patch").exists():
        write_atomically(target / "diff.patch", found.diff or "")


def write_packages(folder: Path) -> None:
    """Write ``provenance/packages.txt``: each installed distribution, as ``name==version``."""
    # Importing all metadata takes a second, so the recorder does it and not the training.
    target = _artifact_folder(folder)
    lines = {f"{found.name}=={found.version}" for found in importlib.metadata.distributions()}
    write_atomically(target / "packages.txt", "\n".join(sorted(lines, key=str.lower)) + "\n")


def read_artifacts(folder: Path) -> tuple[dict[str, str], str]:
    """Return the packages, version by name, and the uncommitted changes, as far as there are."""
    texts = {"packages.txt": "", "diff.patch": ""}
    for name in texts:
        path = folder / "provenance" / name
        with contextlib.suppress(OSError):
            if not symlinks.leads_out(path, folder):
                texts[name] = path.read_text(errors="replace")
    pairs = (line.partition("==") for line in texts["packages.txt"].splitlines())
    return {name: version for name, _, version in pairs}, texts["diff.patch"]


def changed_between(project_dir: Path, one: str, other: str) -> str:
    """Return ``git diff --stat`` between two commits, or an empty text if git fails."""
    if not all(commit and not commit.startswith("-") for commit in (one, other)):
        return ""
    return _git(project_dir, "diff", "--stat=76", *_DIFF_OPTIONS, one, other, "--") or ""


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may be recorded, without secrets."""
    return {
        name: text_without_secrets(value)
        for name, value in sorted(environ.items())
        if (name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)) and not is_secret_name(name)
    }


@functools.cache  # not for each run of a repeat
def _note_once(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk under the output must not end a run
        print(f"note: {text}", file=sys.stderr, flush=True)


def _code_folder(experiment_file: str | None) -> Path:
    """Return the folder of the user's code: the experiment's file, or else this program's script.

    A command of an installed package, or a script in no repository, does not show where it is.
    """
    if experiment_file:
        return Path(re.sub(r"\.py:\w+$", ".py", experiment_file)).resolve().parent
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script and not Path(script).absolute().is_relative_to(sys.prefix):
        folder = Path(script).resolve().parent
        if _is_in_repository(folder):
            return folder
    return Path.cwd()


def _is_in_repository(folder: Path) -> bool:
    return any(os.path.lexists(one / ".git") for one in (folder, *folder.parents))


def _artifact_folder(folder: Path) -> Path:
    # The run's own folder is not created again: somebody may have moved it away.
    target = folder / "provenance"
    folder.mkdir(exist_ok=True)
    if target.is_symlink():
        raise InvalidRunFolder(f"{target} is a symbolic link: delete it")
    target.mkdir(exist_ok=True)
    return target


def _git(
    folder: Path, *words: str, settings: Mapping[str, str] | None = None, text: str = ""
) -> str | None:
    """Return git's output for the input `text`, or None if it fails or takes too long."""
    try:
        return _git_or_raise(folder, *words, settings=settings, text=text)
    except (OSError, subprocess.SubprocessError):
        return None


def _git_or_raise(
    folder: Path, *words: str, settings: Mapping[str, str] | None = None, text: str = ""
) -> str:
    # As variables behind those that are set: on a command line, a name may not have a "=".
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    variables = {
        f"GIT_CONFIG_{part}_{number}": text
        for number, setting in enumerate((settings or {}).items(), first)
        for part, text in zip(("KEY", "VALUE"), setting, strict=True)
    }
    environ = {
        **os.environ,
        **variables,
        "GIT_CONFIG_COUNT": str(first + len(settings or {})),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        # A partial clone must not fetch objects by a program that the repository names. An old
        # git knows the second of these variables only.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "",
    }
    command = ["git", "-c", "core.fsmonitor=false", "--no-pager", *words]
    given, pipe = text.encode(), subprocess.PIPE
    output = subprocess.check_output(
        command, cwd=folder, env=environ, timeout=_GIT_SECONDS, input=given, stderr=pipe
    )
    return output.decode(errors="replace")


def _git_facts(project_dir: Path, own: Path | None) -> dict[str, Any]:
    try:
        words = "rev-parse", "HEAD", "--show-toplevel", "--abbrev-ref", "HEAD"
        found = _git_or_raise(project_dir, *words)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
        why = text_without_secrets(told[0] if told else str(error))
        return {"git_error": why} if _is_in_repository(project_dir) else {}
    commit, top, branch = found.removesuffix("\n").split("\n", 2)
    remote = _git(project_dir, "config", "--get", "remote.origin.url")
    diff, dirty = _diff(Path(top), own)
    return {
        "commit": commit,
        # Git calls a detached head "HEAD".
        "branch": None if branch == "HEAD" else branch,
        "repository": text_without_secrets(remote.strip()) if remote else None,
        "diff": diff,
        "dirty": dirty,
    }


def _diff(folder: Path, own: Path | None) -> tuple[str | None, str]:
    """Return a repository's uncommitted changes and `Provenance.dirty`."""
    until, settings = time.monotonic() + _SUBMODULES_SECONDS, _without_filters(folder)
    found = [_changes(folder, folder, own, settings)]
    lines = []
    for one, is_read in _submodules(folder):
        if is_read and time.monotonic() < until:
            found.append(_changes(one, folder, own, _without_filters(one)))
        else:
            lines.append(f"# submodule {one.relative_to(folder)}: not looked at by git\n")
    if all(changes == new == "" for changes, new in found):
        return "".join(lines) or None, "false"
    changes = "".join(one or "" for one, _ in found)
    is_known = all(one is not None for one, _ in found)
    tracked = bool(changes) or not is_known
    if not is_known:
        changes += "# git did not list all changes\n"
    if len(changes.encode()) > _MAX_DIFF_BYTES:
        # Whole lines only: half a secret would not be recognised.
        whole = changes.encode()
        kept = whole[: whole.rfind(b"\n", 0, _MAX_DIFF_BYTES) + 1]
        changes = kept.decode(errors="ignore") + "# cut: the diff is larger\n"
    names = [name for _, new in found for name in (new or "").splitlines()]
    lines += [f"# untracked: {name}\n" for name in names[:_MAX_UNTRACKED]]
    if len(names) > _MAX_UNTRACKED:
        lines.append(f"# untracked: {len(names) - _MAX_UNTRACKED} more\n")
    diff = text_without_secrets("".join(lines) + changes)
    if not tracked:
        return diff, "untracked"
    # A diff that can be taken back from the changed files restores them.
    check = ("apply", "--check", "--reverse", "--whitespace=nowarn", "-")
    restores = is_known and _git(folder, *check, settings=settings, text=diff) is not None
    return diff, "true" if restores else "incomplete"


def _submodules(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the submodules of a repository that are here, and whether git reads them."""
    if not (folder / ".gitmodules").is_file():
        return
    words = ("config", "-z", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$")
    listed = (_git(folder, *words) or "").split("\0")
    inside = folder.resolve()
    for one in [folder / pair.partition("\n")[2] for pair in listed if pair]:
        if not ((one / ".git").exists() and inside in one.resolve().parents):
            continue
        # Git may refuse its owner, or find no commit. Without a repository, it takes the one above.
        top, _, _ = (_git(one, "rev-parse", "--show-toplevel", "HEAD") or "").partition("\n")
        is_read = bool(top) and Path(top).resolve() == one.resolve()
        yield one, is_read
        if is_read:
            yield from _submodules(one)


def _without_filters(folder: Path) -> dict[str, str]:
    """Return settings that turn off the filters that a repository's own settings name."""
    words = ("config", "--show-scope", "--name-only", "--get-regexp", _FILTERS)
    scopes = (line.partition("\t") for line in (_git(folder, *words) or "").splitlines())
    return {
        name: "false" if name.endswith(".required") else ""
        for scope, _, name in scopes
        if scope in ("local", "worktree")
    }


def _changes(
    folder: Path, top: Path, own: Path | None, settings: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Return a repository's diff and its new files, with paths from the repository `top`."""
    below = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
    prefixes = f"--src-prefix=a/{below}", f"--dst-prefix=b/{below}"
    inside = folder.resolve()
    # A link to the folder of the runs is a file to git.
    runs = () if own is None else (own.resolve(), own.parent.resolve() / own.name)
    own_paths = [one.relative_to(inside) for one in runs if inside in one.parents]
    paths = ["--", ":/", *(f":(exclude,literal){one}" for one in own_paths)]
    changes = _git(folder, "diff", "HEAD", *_DIFF_OPTIONS, *prefixes, *paths, settings=settings)
    new = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", *paths)
    return changes, new and "".join(f"{below}{name}\n" for name in new.splitlines())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id that has no name.
        return str(os.getuid())
