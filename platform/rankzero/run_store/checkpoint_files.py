"""The folders of a run's checkpoints: atomic, checksummed, and readable without torch.

    checkpoints/step_00000120/state.pt        what training/checkpoints saves and loads
                              manifest.json   step, metrics, size and checksum of each file
    checkpoints/.tmp-...                      being written, replaced or deleted; never read

A folder under its final name is complete: it is written under a temporary name, synced and renamed.
Then the folder above is synced, so that a power loss does not undo the rename.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rankzero import ranks
from rankzero.experiment import Goal
from rankzero.run_store import disk

STATE, MANIFEST = "state.pt", "manifest.json"
DOWNLOADED = "downloaded"  # an empty file: MLflow has this checkpoint
FORMAT = 3  # format 1 had no seal; until format 2, a file had one SHA-256
TEMPORARY = ".tmp-"
REPLACED = TEMPORARY + "replaced-"
_DELETED = TEMPORARY + "deleted-"
_SEAL = "seal"
_WHOLE, _PIECES = "sha256", "sha256_of_pieces"
_PIECE_BYTES = 8 << 20  # part of the format
_MOST_THREADS = 8


class BrokenCheckpoint(Exception):
    """A folder that is not an intact checkpoint of a known format. The message says why."""


class RefusedCheckpoint(BrokenCheckpoint):
    """An intact checkpoint that holds more than tensors and plain values."""


def _torch_version() -> str:
    # A process that saves a checkpoint has torch. The package's metadata lack the build, such as
    # +cu132.
    return str(getattr(sys.modules.get("torch"), "__version__", "unknown"))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest.json."""

    step: int
    metrics: Mapping[str, float]
    best: bool
    files: Mapping[str, Mapping[str, Any]]
    """File name -> {"bytes", "sha256_of_pieces"}: the SHA-256 of its pieces' SHA-256."""
    world_size: int | None = None
    """Number of ranks that trained, or None if the user's own training loop saved it."""
    format: int = FORMAT
    torch: str = dataclasses.field(default_factory=_torch_version)

    def to_json(self) -> str:
        """Return the text of the file. It includes a checksum over all other fields."""
        # Retention deletes by what manifests contain, so a changed manifest must not be trusted.
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, _SEAL: _checksum_of(fields)}, indent=2)


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return checkpoints / f"step_{step:08d}"


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest. Raises BrokenCheckpoint. Does not read the other files."""
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        # Checked first, because a newer format may have fields that this version does not know.
        written = fields.get("format")
        if isinstance(written, int) and written > FORMAT:
            raise BrokenCheckpoint(
                f"{folder} was written by a newer version of rankzero (format {written}, this "
                f"version reads up to {FORMAT}): update rankzero to use it"
            )
        seal = fields.pop(_SEAL, None)
        manifest = Manifest(**fields)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{folder} has no readable manifest: {error}") from error
    is_intact = _has_valid_fields(manifest)
    # Only now: an altered format may be no number. Format 1 has no seal.
    if is_intact and (seal or manifest.format > 1):
        is_intact = seal == _checksum_of(fields)
    if not is_intact:
        raise BrokenCheckpoint(f"{folder} has an altered manifest: its values are not used")
    return manifest


def check_files(folder: Path) -> Manifest:
    """Return a checkpoint's manifest after a look at its files. Raises BrokenCheckpoint.

    It names plain files of this folder, and they have their sizes.
    """
    manifest = read_manifest(folder)
    if not isinstance(manifest.files, dict) or STATE not in manifest.files:
        raise BrokenCheckpoint(f"{folder} has a manifest that does not name {STATE}")
    for name, expected in manifest.files.items():
        # A manifest may come from MLflow. Names and links must not lead out of the folder.
        if name in ("", "..") or Path(name).name != name or (folder / name).is_symlink():
            raise BrokenCheckpoint(
                f"{folder} has a manifest that names {name!r}, which is no file of its own"
            )
        try:
            found = (folder / name).stat()
        except OSError as error:
            raise BrokenCheckpoint(f"{folder / name} cannot be read: {error}") from error
        sized = isinstance(expected, dict) and expected.get("bytes") == found.st_size
        if not sized or not stat.S_ISREG(found.st_mode):
            raise _altered(folder / name)
    return manifest


def problem_with(folder: Path, threads: int | None = None) -> str | None:
    """Return why a checkpoint cannot be used, or None if all its checksums are right.

    `threads`: those that compute. By default this rank's share of the cores, and eight at most.
    """
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    # The machine's other ranks want as many.
    threads = threads or max(1, len(cores) // ranks.detect().local_world_size)
    try:
        for name, expected in check_files(folder).files.items():
            checksum = _WHOLE if _WHOLE in expected else _PIECES
            found = _checksum_of_file(folder / name, checksum, threads)
            if found != expected.get(checksum):
                raise _altered(folder / name)
    except BrokenCheckpoint as error:
        return str(error)
    return None


def newest_intact(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is intact, and the problems of newer ones.

    Only before a training attempt, as `newest_first`.
    """
    problems: list[str] = []
    for path in newest_first(checkpoints):
        problem = problem_with(path)
        if problem is None:
            return path, problems
        problems.append(problem)
    return None, problems


def by_step(checkpoints: Path) -> list[Path]:
    """Return the folders of checkpoints, unfinished ones too, the lowest step first."""
    # From step 100,000,000 the names are longer.
    return sorted(checkpoints.glob("step_*"), key=lambda path: (len(path.name), path.name))


def newest_first(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that have a manifest, damaged ones too.

    Only before a training attempt: it finishes replacements that a killed writer left.
    """
    _undo_replacements(checkpoints)
    return _complete(checkpoints)[::-1]


def best(checkpoints: Path, goal: Goal) -> Path | None:
    """Return the intact checkpoint with the best goal metric.

    If none has that metric, return the newest intact one, or None.
    """
    manifests = known(checkpoints)
    judged = best_first(manifests, goal)
    others = sorted(manifests.keys() - set(judged), key=lambda path: -manifests[path].step)
    return next((path for path in (*judged, *others) if problem_with(path) is None), None)


def best_first(manifests: Mapping[Path, Manifest], goal: Goal) -> list[Path]:
    """Return the checkpoints that have the goal metric, the best first, ties by step."""
    values = {
        path: value
        for path, manifest in sorted(manifests.items(), key=lambda item: item[1].step)
        if (value := manifest.metrics.get(goal.metric)) is not None and value == value
    }
    # The first one is the run's best: a later value that is better by rounding only is a tie.
    first: Path | None = None
    for path, value in values.items():
        # A training's best beats all before it. They may be of another goal.
        was_best = manifests[path].best and manifests[path].world_size is not None
        if was_best or goal.better(value, values[first] if first else None):
            first = path
    sign = -1 if goal.mode == "max" else 1
    return sorted(values, key=lambda path: (path != first, sign * values[path]))


def known(checkpoints: Path) -> dict[Path, Manifest]:
    """Return the checkpoints that have a readable manifest."""
    found = {}
    for path in _complete(checkpoints):
        with contextlib.suppress(BrokenCheckpoint):
            found[path] = read_manifest(path)
    return found


def superseded(
    manifests: Mapping[Path, Manifest], keep: int, goal: Goal, written: Path
) -> list[Path]:
    """Return the checkpoints to delete: neither the last nor among the best `keep`. Pure."""
    # The last is both the one just written and the one of the highest step. They differ if the
    # user's own loop started again at a lower step.
    last = max(manifests, key=lambda path: manifests[path].step, default=written)
    kept = {written, last, *best_first(manifests, goal)[:keep]}
    return [path for path in manifests if path not in kept]


def write(
    target: Path,
    save_state: Callable[[Path], None],
    step: int,
    metrics: Mapping[str, float],
    best: bool,
    world_size: int | None = None,
    sync: disk.Sync = disk.sync,
) -> None:
    """Write a checkpoint's folder. A reader sees the whole folder or none.

    Raises OSError, also without the run's folder, and for a disk that does not confirm what was
    written.
    """
    # Not its parents: if the run's folder was moved, half of a run would appear in the old place.
    target.parent.mkdir(exist_ok=True)
    sync(target.parent.parent)
    temporary = temporary_folder(target)
    try:
        temporary.mkdir()
        save_state(temporary / STATE)
        checksum = _synced_checksum(temporary / STATE, sync)
        files = {STATE: {_PIECES: checksum, "bytes": (temporary / STATE).stat().st_size}}
        manifest = Manifest(step, metrics, best, files, world_size)
        (temporary / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        replace(temporary, target, sync)
    except BaseException:
        # The system may have dropped what it could not write. So nothing of it is used again, and
        # a full disk gets its room back.
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_folder(target: Path) -> Path:
    """Return the path where a checkpoint is built, after removing what a killed process left."""
    temporary = target.with_name(TEMPORARY + target.name)
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def replace(temporary: Path, target: Path, sync: Callable[[Path], None] = disk.sync) -> None:
    """Sync a finished folder, and move it to its final name. Raises OSError.

    Whenever this is killed, a checkpoint is there.
    """
    for path in (*sorted(temporary.iterdir()), temporary):
        sync(path)
    if not target.exists():
        temporary.rename(target)
        sync(target.parent)
        return
    # A resumed run saves a step again. No system call replaces a folder that is not empty, so the
    # old one gets a name under which `_undo_replacements` finds it.
    aside = target.with_name(REPLACED + target.name)
    # Left where an earlier replacement was killed after its end. It would be in the way.
    shutil.rmtree(aside, ignore_errors=True)
    old = target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    # The new name must be on the disk before the files under the old one are deleted.
    sync(target.parent)
    # If this fails, the next attempt removes it as a leftover.
    with contextlib.suppress(OSError):
        shutil.rmtree(old.rename(target.with_name(_DELETED + target.name)))


def delete(path: Path, sync: Callable[[Path], None] = disk.sync) -> None:
    """Delete a checkpoint. Readers lose it in one step. Raises OSError."""
    doomed = path.rename(path.with_name(_DELETED + path.name))
    # Otherwise a power loss could leave the old name for a part of the files.
    sync(path.parent)
    try:
        shutil.rmtree(doomed)
    except OSError:
        # NFS keeps a file that an upload reads, under such a name. The next attempt removes it.
        if not all(left.name.startswith(".nfs") for left in doomed.iterdir()):
            raise


def remove_leftovers(checkpoints: Path) -> None:
    """Remove the temporary folders of a killed writer. For the only writer, before it writes."""
    _undo_replacements(checkpoints)
    for path in checkpoints.glob(TEMPORARY + "*"):
        shutil.rmtree(path, ignore_errors=True)


def _undo_replacements(checkpoints: Path) -> None:
    # `replace` may have been killed between its two renames, and this may be the only checkpoint.
    for path in checkpoints.glob(REPLACED + "step_*"):
        target = path.with_name(path.name.removeprefix(REPLACED))
        if not target.exists() and not path.is_symlink():
            with contextlib.suppress(OSError):  # another rank was faster
                path.rename(target)


def _complete(checkpoints: Path) -> list[Path]:
    return [path for path in by_step(checkpoints) if (path / MANIFEST).exists()]


def _has_valid_fields(manifest: Manifest) -> bool:
    """Return whether the values have the types of their fields. `check_files` checks `files`."""
    world_size = 1 if manifest.world_size is None else manifest.world_size
    return (
        all(type(number) is int for number in (manifest.step, world_size, manifest.format))
        and world_size >= 1
        and isinstance(manifest.metrics, dict)
        and all(isinstance(value, (int, float)) for value in manifest.metrics.values())
        and isinstance(manifest.best, bool)
    )


def _checksum_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _altered(path: Path) -> BrokenCheckpoint:
    return BrokenCheckpoint(f"{path} is truncated or altered: its checksum does not match")


def _checksum_of_file(path: Path, checksum: str, threads: int) -> str:
    try:
        with path.open("rb") as file:
            if checksum == _WHOLE:
                return hashlib.file_digest(file, "sha256").hexdigest()
            piece = functools.partial(_piece_digest, file.fileno())
            offsets = range(0, os.fstat(file.fileno()).st_size, _PIECE_BYTES)
            return hashlib.sha256(b"".join(_in_threads(piece, offsets, threads))).hexdigest()
    except OSError as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error}") from error


def _synced_checksum(path: Path, sync: disk.Sync) -> str:
    """Return the checksum of a file's pieces, each synced before it is read. Raises OSError."""
    # A sync shows no progress before its end, and the watchdog would take a slow disk for a hang.
    # With pieces, the bytes that the thread reads are progress. This thread alone reads them,
    # because the training needs the cores.
    digests = []
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, _PIECE_BYTES):
            # A file of one piece is left to the sync of the whole file.
            if size > _PIECE_BYTES:
                sync(path, range(offset, min(offset + _PIECE_BYTES, size)))
            digests.append(_piece_digest(file.fileno(), offset))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _piece_digest(descriptor: int, offset: int) -> bytes:
    digest, end = hashlib.sha256(), offset + _PIECE_BYTES
    # Some file systems return less than they are asked for.
    while offset < end and (content := os.pread(descriptor, end - offset, offset)):
        digest.update(content)
        offset += len(content)
    return digest.digest()


def _in_threads(
    call: Callable[[int], bytes], values: Sequence[int], threads: int
) -> Iterable[bytes]:
    if threads > 1 and len(values) > 1:
        # SHA-256 takes twice the time of `torch.load`, and does not hold Python's lock. No thread
        # can start under a limit of processes, and at the end of a program.
        with (
            contextlib.suppress(RuntimeError),
            ThreadPoolExecutor(min(threads, _MOST_THREADS)) as pool,
        ):
            return list(pool.map(call, values))
    return map(call, values)
