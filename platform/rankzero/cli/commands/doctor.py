"""``rankzero doctor [RUN]``: is this machine fit to train on, each line ok or the fix; or, what became of a run?"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.markup import escape

from rankzero.errors import FAILED, FINISHED

GIGABYTE = 1e9
LEAST_SHARED_BYTES = 1 * GIGABYTE
LEAST_DISK_BYTES = 5 * GIGABYTE
TORCHVISION_BEHIND = 14  # torch 2.N goes with torchvision 0.(N + 14)
SERVER_SECONDS = 3.0
NOT_ASKED = " (not asked: a run will)"
DRIVER = Path("/sys/module/nvidia/version")
Found = TypeVar("Found")


class Check(NamedTuple):
    """One line: `fix` says what to do where something is wrong; `there`: False for what the machine does without."""

    name: str
    found: str
    fix: str | None = None
    there: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="tell what happened to this run (its name or MLflow id)",
    )
    parser.add_argument(
        "--tracking-uri", help="the tracking store to check (default: as `rankzero train` finds it)"
    )


def run(arguments: argparse.Namespace) -> int:
    if getattr(arguments, "run", None):
        from rankzero.cli.display import diagnosis

        return diagnosis.run(arguments.dir / "runs", arguments.run)
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    checks = list(_shown(console, checks_of(arguments.dir, arguments.tracking_uri)))
    wrong = [check.name for check in checks if check.fix is not None]
    console.print(f"{len(wrong)} to fix: {', '.join(wrong)}" if wrong else "all well")
    return FAILED if wrong else FINISHED


def checks_of(root: Path, tracking_uri: str | None = None) -> Iterator[Check]:
    """Yield what is found out, cheapest first."""
    yield python()
    yield git()
    yield disk(root)
    yield shared_memory()
    yield tracking_store(root, tracking_uri)
    yield torch_pair()
    yield accelerator()
    yield nvml()


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "Python", version, None if sys.version_info >= (3, 11) else "install Python 3.11 or newer"
    )


def git() -> Check:
    found = shutil.which("git")
    return Check(
        "git",
        found or "not found: runs will not know their commit",
        None if found else "install git",
    )


def disk(root: Path) -> Check:
    """Check that the runs' folder can be written to, and has room for checkpoints."""
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check(
            "runs folder",
            str(root),
            f"{existing} cannot be written to: choose another folder with --dir",
        )
    free = shutil.disk_usage(existing).free
    fix = (
        None
        if free > LEAST_DISK_BYTES
        else "make room: a checkpoint that cannot be written is lost"
    )
    return Check("runs folder", f"{root}, {free / GIGABYTE:,.0f} GB free", fix)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Check what data-loading processes hand their batches over in; containers get 64 MB unless told otherwise."""
    if not folder.exists():
        return Check("shared memory", "no /dev/shm on this system", there=False)
    usage = shutil.disk_usage(folder)
    fix = None
    if usage.total < LEAST_SHARED_BYTES:
        fix = "start the container with --shm-size=8g, or set train.workers=0"
    elif usage.free < LEAST_SHARED_BYTES:
        fix = f"see what fills {folder}: files of processes that are gone can be removed"
    return Check(
        "shared memory",
        f"{usage.free / GIGABYTE:,.1f} of {usage.total / GIGABYTE:,.1f} GB free",
        fix,
    )


def tracking_store(root: Path, tracking_uri: str | None = None) -> Check:
    """Check that the store can be reached: a database by its own check, a server by its health page."""
    from rankzero.mlflow_store import uris
    from rankzero.redaction import text as secrecy

    shown = secrecy.url_without_secrets(tracking_uri or str(root))
    try:
        uri = uris.resolve_tracking_uri(tracking_uri, os.environ, root)
        shown = secrecy.url_without_secrets(uri)
        answer = _answer_of_store(uri)
        return Check("tracking store", shown + answer, there=answer != NOT_ASKED)
    except Exception as error:  # whatever it is, it is what the user must know
        return Check("tracking store", shown, secrecy.url_without_secrets(str(error)))


def torch_pair() -> Check:
    """Check that torch and torchvision load, and come from the same release pair."""
    versions, error = _try(_torch_versions)
    if versions is None:
        return Check(
            "PyTorch",
            "does not load",
            f"{error}: run `make setup`, which installs a pair that fits",
        )
    torch, torchvision = versions
    fits = _minor(torchvision) == _minor(torch) + TORCHVISION_BEHIND or not torch.startswith("2.")
    fix = (
        None
        if fits
        else f"torch {torch} goes with torchvision 0.{_minor(torch) + TORCHVISION_BEHIND}"
    )
    return Check("PyTorch", f"torch {torch}, torchvision {torchvision}", fix)


def accelerator() -> Check:
    """Check CUDA and NCCL, where there is a GPU."""
    torch, error = _try(lambda: __import__("torch"))
    if torch is None:
        return Check("GPUs", "unknown: PyTorch does not load", error)
    if not torch.cuda.is_available():
        return _no_gpu(DRIVER)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    driver = f", driver {DRIVER.read_text().strip()}" if DRIVER.exists() else ""
    found = f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}{driver}"
    nccl, _ = _try(torch.cuda.nccl.version)
    if nccl is None:
        return Check("GPUs", found, "install a PyTorch built with NCCL: several GPUs need it")
    return Check("GPUs", f"{found}, NCCL {'.'.join(map(str, nccl))}")


def _no_gpu(driver: Path) -> Check:
    if not driver.exists():
        return Check("GPUs", "no NVIDIA driver: training on the CPU, over gloo", there=False)
    return Check(
        "GPUs",
        f"driver {driver.read_text().strip()}, but PyTorch finds no GPU",
        "install a PyTorch built for this driver, or check CUDA_VISIBLE_DEVICES",
    )


def nvml() -> Check:
    """Check that utilisation, power and temperature can be read."""
    from rankzero.telemetry.nvml import GpuSampler

    sampler = GpuSampler(None, os.environ)
    try:
        described, readings, notices = sampler.describe(), sampler.sample(), sampler.notices
    finally:
        sampler.close()
    if readings:
        return Check("NVML", f"{len(readings)} readings of {', '.join(described.values())}")
    found = notices[0] if notices else "no GPUs to read"
    fix = "runs will lack GPU metrics: install nvidia-ml-py, and let the container use the driver's utilities"
    return Check("NVML", found, fix if DRIVER.exists() and notices else None, there=False)


def _shown(console: Console, checks: Iterator[Check]) -> Iterator[Check]:
    for check in checks:
        mark = (
            "[red]fix[/]"
            if check.fix is not None
            else "[green]ok [/]"
            if check.there
            else "[dim]-- [/]"
        )
        console.print(f"{mark} {check.name:15} {escape(check.found)}")
        if check.fix is not None:
            console.print(f"    -> {escape(check.fix)}")
        yield check


def _try(action: Callable[[], Found]) -> tuple[Found | None, str]:
    try:
        return action(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _torch_versions() -> tuple[str, str]:
    import torch
    import torchvision

    return torch.__version__.partition("+")[0], torchvision.__version__.partition("+")[0]


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _answer_of_store(uri: str) -> str:
    """Ask a store for a sign of life; return what there is to add. Raises whatever says that it has none."""
    from rankzero.mlflow_store import uris

    path = uris.sqlite_path(uri)
    if path is not None:
        return _sqlite_answers(path)
    if uri.startswith(("http://", "https://")):
        return _server_answers(uri)
    return NOT_ASKED


def _sqlite_answers(path: Path) -> str:
    import contextlib
    import sqlite3

    if not path.exists():
        return " (made by the first run)"
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        ) as database:
            (answer,) = database.execute("PRAGMA quick_check").fetchone()
    except sqlite3.Error as error:
        answer = str(error)
    if answer != "ok":
        raise RuntimeError(
            f"{path} is damaged: {answer}; restore a copy, or choose another --dir and rankzero sync"
        )
    return ""


def _server_answers(uri: str) -> str:
    import urllib.error
    import urllib.request

    from rankzero.redaction import text as secrecy

    try:
        with urllib.request.urlopen(
            f"{secrecy.url_without_secrets(uri)}/health", timeout=SERVER_SECONDS
        ):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            return " (asks who is there: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or a token)"
        raise RuntimeError(
            f"what answers is no MLflow server ({error}): correct the tracking URI"
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"no answer ({error}): start the server, or correct the tracking URI"
        ) from error
