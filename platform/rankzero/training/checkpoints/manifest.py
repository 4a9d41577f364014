"""What a checkpoint says of itself, and whether that is so: step, metrics, files with their checksums."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rankzero.experiment import Goal

STATE, MANIFEST = "state.pt", "manifest.json"
FORMAT = 2  # 1 had no seal
SEAL = "seal"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint's folder holds, and what is known of it."""

    step: int
    metrics: Mapping[str, float]
    best: bool
    files: Mapping[str, Mapping[str, Any]]
    world_size: int | None = None
    """Ranks that trained; None: one's own loop, which does not say."""
    format: int = FORMAT
    torch: str = torch.__version__


class BrokenCheckpoint(Exception):
    """A folder that is no intact checkpoint, or none that this version reads; the message says what is wrong."""


def verify(folder: Path) -> Manifest:
    """Return the manifest of an intact checkpoint. Raises BrokenCheckpoint."""
    manifest = read(folder)
    _require_own_files(manifest, folder)
    for name, expected in manifest.files.items():
        if fingerprint(folder / name) != expected:
            raise BrokenCheckpoint(
                f"{folder / name} is truncated or altered: its checksum does not match"
            )
    return manifest


def problem_with(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's folder; None where it is intact."""
    try:
        verify(folder)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def read(folder: Path) -> Manifest:
    """Return the manifest. Raises BrokenCheckpoint."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if _is_newer(found):
            raise BrokenCheckpoint(
                f"{folder} was written by a newer version of rankzero (format {found['format']}, this one reads up to "
                f"{FORMAT}): update rankzero to go on from it"
            )
        seal = found.pop(SEAL, None)
        manifest = Manifest(**found)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{folder} has no readable manifest: {error}") from error
    if not _is_sound(manifest) or seal != (_seal(found) if seal or manifest.format > 1 else None):
        raise BrokenCheckpoint(
            f"{folder} has an altered manifest: what it says of the checkpoint is not believed"
        )
    return manifest


def text(manifest: Manifest) -> str:
    """Return the manifest as its file has it, with a checksum of its own: what it says decides what is deleted."""
    fields = dataclasses.asdict(manifest)
    return json.dumps({**fields, SEAL: _seal(fields)}, indent=2)


def _seal(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _is_sound(manifest: Manifest) -> bool:
    """Tell whether the values are of their fields' types; those of `files` are looked at where they are needed."""
    world_size = 1 if manifest.world_size is None else manifest.world_size
    return (
        all(type(number) is int for number in (manifest.step, world_size, manifest.format))
        and manifest.step >= 0
        and world_size >= 1
        and isinstance(manifest.metrics, dict)
        and all(isinstance(value, (int, float)) for value in manifest.metrics.values())
        and isinstance(manifest.best, bool)
    )


def _is_newer(manifest: Any) -> bool:
    """Tell whether a manifest says that it is of a format to come, whatever else it says."""
    written = manifest.get("format") if isinstance(manifest, dict) else None
    return isinstance(written, int) and written > FORMAT


def _require_own_files(manifest: Manifest, folder: Path) -> None:
    """Raise BrokenCheckpoint where a manifest names anything but files in its own folder, the state among them."""
    if not isinstance(manifest.files, dict) or STATE not in manifest.files:
        raise BrokenCheckpoint(f"{folder} has a manifest that does not name {STATE}")
    for name in manifest.files:
        if name in ("", "..") or Path(name).name != name or (folder / name).is_symlink():
            raise BrokenCheckpoint(
                f"{folder} has a manifest that names {name!r}, which is no file of its own"
            )


def complete(checkpoints: Path) -> list[Path]:
    """Return a run's checkpoints, the newest last, leaving out what is no whole folder."""
    return sorted(path for path in checkpoints.glob("step_*") if (path / MANIFEST).exists())


def known(checkpoints: Path) -> dict[Path, Manifest]:
    """Return the checkpoints with what is known of each, without those that do not say: a broken one stops nobody."""
    found = {}
    for path in complete(checkpoints):
        with contextlib.suppress(BrokenCheckpoint):
            found[path] = read(path)
    return found


def is_judged(manifest: Manifest, goal: Goal) -> bool:
    """Tell whether the goal's metric was measured at the checkpoint, and is a number."""
    value = manifest.metrics.get(goal.metric)
    return value is not None and value == value


def fingerprint(path: Path) -> dict[str, Any]:
    """Return a file's size and checksum, as a manifest has them. Raises BrokenCheckpoint where it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error}") from error
    return {"sha256": digest, "bytes": path.stat().st_size}
