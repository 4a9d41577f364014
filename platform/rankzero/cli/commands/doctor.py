"""``rankzero doctor [RUN]``: check this machine, or explain what happened to a run."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import os
import platform
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape

from rankzero.catalog import moved
from rankzero.errors import FAILED, FINISHED
from rankzero.permanent_errors import lacks_rights

_GIGABYTE = 1e9
_LEAST_SHARED, _LEAST_DISK = 1 * _GIGABYTE, 5 * _GIGABYTE
_NOT_CHECKED = " (not checked here: a run will)"
_DRIVER = Path("/sys/module/nvidia/version")
# `shutil.disk_usage`: total and free bytes.
_DiskUsage = Callable[[Path], Any]


class Check(NamedTuple):
    """One line: `fix` is how to mend what is wrong."""

    name: str
    found: str
    fix: str | None = None
    # False for something absent that the machine can do without.
    there: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = "explain this run instead (its name or MLflow id)"
    parser.add_argument("run", metavar="RUN", nargs="?", help=which)
    store = "the tracking store to check (default: as `rankzero train` finds it)"
    parser.add_argument("--tracking-uri", help=store)


def run(arguments: argparse.Namespace, usage: _DiskUsage = shutil.disk_usage) -> int:
    # Imported late: the checks of a machine must not depend on the code that reads runs.
    if getattr(arguments, "run", None):
        from rankzero.cli.display import diagnosis

        return diagnosis.run(arguments.dir / "runs", arguments.run)
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    wrong = []
    for check in _checks(arguments.dir, arguments.tracking_uri, usage):
        line = f"{check.name:15} {escape(check.found)}"
        if check.fix is None:
            console.print(f"{'[green]ok [/]' if check.there else '[dim]-- [/]'} {line}")
        else:
            wrong.append(check.name)
            console.print(f"[red]fix[/] {line}\n    -> {escape(check.fix)}")
    console.print(f"{len(wrong)} to fix: {', '.join(wrong)}" if wrong else "all well")
    return FAILED if wrong else FINISHED


def _checks(root: Path, tracking_uri: str | None, usage: _DiskUsage) -> Iterator[Check]:
    """Yield the results, cheapest first."""
    yield Check("Python", platform.python_version())
    git = shutil.which("git")
    missing = "not found: runs will not record their commit"
    yield Check("git", git or missing, None if git else "install git")
    yield disk(root, usage)
    yield shared_memory(usage=usage)
    yield tracking_store(root, tracking_uri)
    yield torch_pair()
    yield _accelerator()
    yield _nvml()


def disk(root: Path, usage: _DiskUsage = shutil.disk_usage) -> Check:
    """Check that the runs' folder is writable and has room for checkpoints."""
    places = root.absolute(), *root.absolute().parents
    existing = next(path for path in places if os.access(path, os.F_OK))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fix = f"{existing} is not writable: choose another folder with --dir"
        return Check("runs folder", str(root), fix)
    free = usage(existing).free
    full = "make room: a checkpoint that cannot be written is lost"
    found = f"{root}, {free / _GIGABYTE:,.0f} GB free"
    return Check("runs folder", found, None if free > _LEAST_DISK else full)


def shared_memory(folder: Path = Path("/dev/shm"), usage: _DiskUsage = shutil.disk_usage) -> Check:
    """Check the memory through which data-loading processes pass batches."""
    # Containers get 64 MB by default.
    if not folder.exists():
        return Check("shared memory", "no /dev/shm on this system", there=False)
    total, free = usage(folder).total, usage(folder).free
    fix = None
    if total < _LEAST_SHARED:
        fix = "start the container with --shm-size=8g, or set train.workers=0"
    elif free < _LEAST_SHARED:
        fix = f"find what fills {folder}: files of ended processes can be removed"
    found = f"{free / _GIGABYTE:,.1f} of {total / _GIGABYTE:,.1f} GB free"
    return Check("shared memory", found, fix)


def tracking_store(root: Path, tracking_uri: str | None = None, timeout: float = 3.0) -> Check:
    """Check that the store answers: a database checks itself, a server lists its experiments."""
    from rankzero.mlflow_store import drivers, uris
    from rankzero.redaction.text import url_without_secrets

    shown = url_without_secrets(tracking_uri or str(root))
    try:
        uri = uris.resolve_tracking_uri(tracking_uri, os.environ, root)
        shown = url_without_secrets(uri)
        if (path := uris.sqlite_path(uri)) is not None:
            note = _check_sqlite(path, timeout)
        elif uri.startswith(("http://", "https://")):
            note = _check_server(uri, timeout)
        elif drivers.is_database(uri):
            note = _check_database(uri, uris.artifact_root(uri), timeout)
        else:
            note = _NOT_CHECKED
        return Check("tracking store", shown + note, there=note != _NOT_CHECKED)
    except Exception as error:  # whatever is wrong with the store, the user must see it
        return Check("tracking store", shown, url_without_secrets(str(error)))


def _check_sqlite(path: Path, timeout: float) -> str:
    """Return a note on a sound database. Raises RuntimeError for another one."""
    if not path.exists():
        return " (made by the first run)"
    try:
        # Read-only, so that a check never creates or repairs a database.
        address = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, timeout=timeout, uri=True)) as database:
            (answer,) = database.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        # As a lock, missing rights to its write-ahead log, or a network disk that is away.
        if isinstance(error, sqlite3.OperationalError):
            text = f"{error}: try again, or ask for the rights to {path} and its folder"
            raise RuntimeError(text) from error
        answer = str(error)
    if answer != "ok":
        fix = "restore a copy, or choose another --dir and run rankzero sync"
        raise RuntimeError(f"{path} is damaged: {answer}; {fix}")
    if note := moved.note(path.parent):
        raise RuntimeError(note)
    return ""


def _check_database(uri: str, artifact_root: str | None, timeout: float) -> str:
    """Return no note on a database that can be used. Raises UserError or SQLAlchemy's error."""
    from rankzero.mlflow_store import drivers

    drivers.require_driver(uri)
    drivers.require_artifact_root(uri, artifact_root)
    drivers.connect(uri, timeout).close()
    return ""


def _check_server(uri: str, timeout: float) -> str:
    """Return no note on a server that can be used. Raises UserError, RuntimeError.

    The client of the runs asks, with their login and certificates.
    """
    from rankzero.mlflow_store.client.experiments import artifact_locations
    from rankzero.mlflow_store.client.mlflow_compat import request_timeout
    from rankzero.mlflow_store.drivers import require_client
    from rankzero.redaction.text import line_without_secrets

    try:
        with request_timeout(math.ceil(timeout), once=True, at_most=True):
            locations = artifact_locations(uri)
    except Exception as error:
        fix = "start or upgrade the server, or correct the tracking URI"
        if lacks_rights(error):
            fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a valid token"
        raise RuntimeError(f"{line_without_secrets(str(error))}: {fix}") from error
    for location in locations:
        require_client(location)
    return ""


class TorchPair(NamedTuple):
    """The versions of torch and torchvision, and the torch that torchvision is made for."""

    torch: str
    torchvision: str
    wanted: str


def _installed_versions() -> TorchPair:
    import torch
    import torchvision

    wanted = ""
    # A source tree that was not installed asks for nothing.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        asked = map(Requirement, importlib.metadata.requires("torchvision") or ())
        wanted = next((str(one.specifier) for one in asked if one.name == "torch"), "")
    return TorchPair(torch.__version__, torchvision.__version__, wanted)


def torch_pair(versions: Callable[[], TorchPair] = _installed_versions) -> Check:
    """Check that torch and torchvision load, and that torchvision is made for this torch."""
    try:
        torch, torchvision, wanted = versions()
    except Exception as error:  # a broken installation fails in many ways
        why = f"{type(error).__name__}: {error}"
        fix = f"{why}: run `make setup`, which installs matching versions"
        return Check("PyTorch", "does not load", fix)
    matches = SpecifierSet(wanted).contains(torch, prereleases=True)
    mismatch = f"torchvision {torchvision} is made for torch{wanted}: install both together"
    found = f"torch {torch}, torchvision {torchvision}"
    return Check("PyTorch", found, None if matches else mismatch)


def _accelerator() -> Check:
    """Check CUDA and NCCL, if there is a GPU."""
    try:
        import torch

        from rankzero.training.distributed.device import nccl_version
    except Exception as error:  # a broken installation fails in many ways
        return Check("GPUs", "unknown: PyTorch does not load", f"{type(error).__name__}: {error}")
    if not torch.cuda.is_available():
        return _no_gpu(_DRIVER)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    driver = f", driver {_DRIVER.read_text().strip()}" if _DRIVER.exists() else ""
    made_for = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    found = f"{len(names)} x {names[0]}, {made_for}{driver}"
    nccl = nccl_version()
    if not nccl:
        return Check("GPUs", found, "install a PyTorch built with NCCL: several GPUs need it")
    return Check("GPUs", f"{found}, NCCL {nccl}")


def _no_gpu(driver: Path) -> Check:
    if not driver.exists():
        return Check("GPUs", "no NVIDIA driver: training on the CPU, over gloo", there=False)
    found = f"driver {driver.read_text().strip()}, but PyTorch finds no GPU"
    fix = "install a PyTorch built for this driver, or check CUDA_VISIBLE_DEVICES"
    return Check("GPUs", found, fix)


def _nvml() -> Check:
    """Check that utilisation, power and temperature can be read."""
    from rankzero.telemetry.nvml import GpuSampler

    sampler = GpuSampler(None, os.environ)
    try:
        described, readings, notices = sampler.describe(), sampler.sample(), sampler.notices
    finally:
        sampler.close()
    if readings:
        return Check("NVML", f"{len(readings)} readings of {', '.join(described.values())}")
    what = "install nvidia-ml-py, and give the container the driver's utilities"
    fix = f"runs will lack GPU metrics: {what}"
    found = notices[0] if notices else "no GPUs to read"
    return Check("NVML", found, fix if _DRIVER.exists() and notices else None, there=False)
