"""A whole run for another store: ``rankzero export --bundle``, ``import`` and ``copy``.

The file is a zip archive. The run's folder is the run: its journal is delivered again. The rest
comes from MLflow: artifacts and models as they are, and the tags that people changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rankzero import scalars
from rankzero.catalog import command_lines, deleted, lookup
from rankzero.errors import RunFailed, UserError
from rankzero.events import Evaluated, StepsLogged
from rankzero.housekeeping import download
from rankzero.housekeeping.deletion import parts
from rankzero.mlflow_store import limits, uris
from rankzero.mlflow_store.items import CLAIM, DESCRIPTION, MetricPoint
from rankzero.permanent_errors import refusal
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store import checkpoint_files, delivery_state, names, removal, run_locks
from rankzero.run_store.attempt import is_written
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all
from rankzero.run_store.location import make_root
from rankzero.tracking import delivery_status, description, sync
from rankzero.tracking.open_run import connect, newest_step, other_attempt

if TYPE_CHECKING:
    from rankzero.mlflow_store.client import MlflowRuns, RunRecord

log = logging.getLogger(__name__)

_MANIFEST, _RUNS, _MLFLOW = "bundle.json", "runs", "mlflow"
# They belong to this machine or this store. The settings with their secrets stay here, too.
_LOCAL = (
    *("*.lock", "*.live", ".*", "recorder*.json", "delivery*.json", "best_model.json"),
    *("deleted.txt", "import.*"),
)
_WITH_SECRETS = ("run.json", "config.yaml")
# In a run until MLflow has all of its bundle. A run without it is not imported over.
_UNFINISHED = "import.unfinished"
# Files of a bundle that are read as a whole.
_MAX_JSON = 1 << 24
# MLflow makes them for each run, and the last one for a registered model.
_OWN_TAGS = ("rankzero.uuid", "mlflow.parentRunId", CLAIM, "mlflow.modelVersions")
# The points that are in MLflow alone, a line each.
_POINTS, _POINTS_AT_ONCE = "points.jsonl", limits.METRICS_PER_TRANSACTION


def left_out(folder: RunFolder) -> list[RunFolder]:
    """Return the run's children that somebody deleted alone, in MLflow. No bundle has them."""
    store = deleted.read_store(folder.path.parent)
    children = [one for one in parts(folder) if one != folder]
    return [one for one in children if deleted.is_deleted(one.path, lookup.mlflow_id(one), store)]


def write(folder: RunFolder, target: Path) -> None:
    """Write a run and its children into a new file. Raises UserError for a run that is used."""
    gone = left_out(folder)
    bundled = [one for one in parts(folder) if one not in gone]
    for one in bundled:
        if is_written(one) or run_locks.is_recording(one):
            raise UserError(f"{one.path.name} runs, or its delivery does: wait for its end")
        if _was_elsewhere(one):
            raise _part_is_missing(one)
        # Here, because an unpacked journal has the time of the import. Readers, a full or a
        # read-only disk cannot.
        with contextlib.suppress(OSError):
            sync.close_if_dead(one, 0.0)
    sizes = {one: lookup.journal_bytes(one) for one in bundled}
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with zipfile.ZipFile(temporary, "x", strict_timestamps=False) as archive:
            named = [one.path.name for one in bundled]
            archive.writestr(_MANIFEST, json.dumps({"version": 1, "runs": named}))
            for one in bundled:
                _write_folder(archive, one)
                # Next to the file, because a temporary folder may be too small for a model.
                with tempfile.TemporaryDirectory(prefix=".rankzero-", dir=target.parent) as place:
                    _write_what_mlflow_has(archive, one, Path(place))
        if sizes != {one: lookup.journal_bytes(one) for one in parts(folder) if one not in gone}:
            raise UserError(f"{folder.path.name} was continued meanwhile: wait for its end")
        temporary.replace(target)
    except OSError as error:
        # An error of a server, such as those of requests, has no number.
        if error.errno is None:
            raise
        raise UserError(f"cannot write {target}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_folder(archive: zipfile.ZipFile, folder: RunFolder) -> None:
    base = PurePosixPath(_RUNS, folder.path.name)
    for path in _files(folder.path):
        name = path.relative_to(folder.path)
        if not _is_local(name.parts[0]) and str(name) not in _WITH_SECRETS:
            _add(archive, path, base / name.as_posix())
    # The tracking URI and the place of artifacts may hold passwords.
    identity = url_without_secrets(json.dumps(dataclasses.asdict(folder.identity), indent=1))
    archive.writestr(str(base / "run.json"), identity)
    redacted = folder.artifacts / folder.config.name
    if redacted.is_file():
        _add(archive, redacted, base / folder.config.name)


def _write_what_mlflow_has(archive: zipfile.ZipFile, folder: RunFolder, place: Path) -> None:
    run_id, base = lookup.mlflow_id(folder), PurePosixPath(_MLFLOW, folder.path.name)
    if run_id is None:
        return
    tracker = connect(folder.identity.tracking_uri)
    run = tracker.find_run(run_id)
    if other_attempt(folder, run) is not None:
        raise _part_is_missing(folder)
    _write_points(archive, str(base / _POINTS), _in_mlflow_alone(tracker, folder, run))
    models: list[dict[str, Any]] = []
    tracker.download_artifacts(run_id, place / base / "artifacts")
    for model in tracker.models.of_run(run):
        step, kind = int(model.tags.get("rankzero.step", "0")), model.model_type or ""
        checkpoint = checkpoint_files.folder_of(folder.checkpoints, step)
        # Delivering the journal brings the checkpoints. MLflow may have more than this disk.
        if model.status != "READY" or (kind == "checkpoint" and checkpoint.exists()):
            continue
        to = place / _RUNS / checkpoint.relative_to(folder.path.parent)
        if kind != "checkpoint":
            to = place / base / "models" / str(len(models))
            fields = {"name": model.name, "kind": kind, "step": step, "tags": dict(model.tags)}
            models.append(fields)
        tracker.models.download_checkpoint(model.model_id, to)
    download.require_plain_files(place)
    for path in _files(place):
        _add(archive, path, PurePosixPath(path.relative_to(place).as_posix()))
    fields = {"tags": dict(run.tags), "models": models, "params": dict(run.params)}
    archive.writestr(str(base / "mlflow.json"), json.dumps(fields))


def _was_elsewhere(folder: RunFolder) -> bool:
    """Return whether another machine trained a part of the run, as far as this disk knows."""
    curves = delivery_state.load(delivery_state.path_of(folder, 0)).curves
    # The samples and attempts here are counted on from those of the other machine.
    counted_on = curves.sample_offset > 0 or curves.attempt_offset > 0
    return counted_on or folder.identity.mlflow_run_id is not None


def _part_is_missing(folder: RunFolder) -> UserError:
    return UserError(
        f"{folder.path.name} was continued from another machine: a part of its metrics is in "
        "MLflow alone, and a bundle would lack them"
    )


def _in_mlflow_alone(
    tracker: MlflowRuns, folder: RunFolder, run: RunRecord
) -> Iterator[MetricPoint]:
    """Yield the points of metrics that other programs logged, or logged further than this run."""
    delivered = dict[str, int]()
    for node in delivery_state.nodes(folder):
        curves = delivery_state.load(delivery_state.path_of(folder, node)).curves
        # A new attempt adopts the marks of all metrics, also of those that other programs logged.
        delivered |= {key: at for key, at in curves.marks.items() if key in curves.owners}
    for key, step in run.marks.items():
        if step > delivered.get(key, step - 1):
            yield from tracker.history(run.run_id, key)


def _write_points(archive: zipfile.ZipFile, name: str, points: Iterator[MetricPoint]) -> None:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    with archive.open(info, "w", force_zip64=True) as lines:
        for key, value, milliseconds, step, _ in points:
            lines.write(f"{json.dumps([key, value, milliseconds, step])}\n".encode())


def read(
    file: Path,
    runs: Path,
    tracking_uri: str,
    *,
    offline: bool,
    notice: Callable[[str], object] = log.info,
) -> RunFolder:
    """Unpack a bundle, and deliver the run to a store. A second call continues a killed one.

    Executes nothing of the file. `notice` gets what the store refuses. Raises UserError if it is no
    bundle, or if a run has a name of it, and RunFailed if the store does not take all.
    """
    make_root(runs.parent)
    aside = removal.workplace(runs, "import")
    try:
        named = _unpack(file, aside)
        # All are checked before the first is placed: half a study would be neither old nor new.
        folders = [_checked(aside / _RUNS / name, runs, tracking_uri) for name in named]
        late = [
            one for one in folders if not one.path.exists() or (one.path / _UNFINISHED).exists()
        ]
        if late and offline and (aside / _MLFLOW).exists():
            # A later sync has the journal alone.
            raise UserError(
                f"{file} has artifacts and tags for MLflow, which no offline import delivers: "
                "import it without RANKZERO_OFFLINE"
            )
        for folder in folders:
            if not folder.path.exists():
                _place(aside / _RUNS / folder.path.name, folder, tracking_uri, folders)
        if late and not offline:
            uris.prepare_store(tracking_uri)
            sync.deliver(folders[0])
            found = delivery_status.combined_status(folders[0])
            if not found.complete:
                raise RunFailed(
                    f"MLflow lacks a part of {named[0]} ({found.error or 'no answer'}): give the "
                    "same command again later"
                )
            for folder in late:
                _deliver_what_mlflow_had(folder, aside / _MLFLOW / folder.path.name, notice)
                (folder.path / _UNFINISHED).unlink()
        return folders[0]
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy(folder: RunFolder, tracking_uri: str, notice: Callable[[str], object] = log.info) -> str:
    """Deliver a run and its children to another store; return the run's id there.

    The run stays as it is. A second call delivers what is missing, and sets the tags again.
    `notice` gets what the store refuses. Raises UserError, RunFailed.
    """
    if tracking_uri == folder.identity.tracking_uri:
        raise UserError(f"{folder.path.name} is in that store: name another one")
    uris.prepare_store(tracking_uri)
    _refuse_older(folder, tracking_uri)
    # Next to the runs, because a temporary folder may be too small for a run's checkpoints.
    aside = removal.workplace(folder.path.parent, "copy")
    try:
        aside.mkdir()
        file, runs = aside / "run.zip", aside / _RUNS
        write(folder, file)
        delivered = read(file, runs, tracking_uri, offline=False, notice=notice)
        return lookup.mlflow_id(delivered) or ""
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refuse_older(folder: RunFolder, tracking_uri: str) -> None:
    """Raise UserError if the store's copy of a run has later steps than the run here."""
    events = read_all(folder.events)
    logged = (step for one in events if isinstance(one, StepsLogged) for step in one.steps)
    evaluated = (one.step for one in events if isinstance(one, Evaluated))
    here = max((scalars.step(step) or 0 for step in (*logged, *evaluated)), default=0)
    if (run_id := lookup.mlflow_id(folder)) is not None:
        own = connect(folder.identity.tracking_uri).find_run(run_id)
        here = max(here, newest_step(own.marks))
    identity = dataclasses.replace(folder.identity, mlflow_run_id=None)
    known = connect(tracking_uri).find_open_run(identity)
    there = 0 if known is None else newest_step(known.marks)
    if there > here:
        raise UserError(
            f"{folder.path.name} was continued there, up to step {there:,}: a copy of this disk's "
            f"{here:,} steps would put its state, tags and best model back"
        )


def _unpack(file: Path, aside: Path) -> list[str]:
    """Unpack the archive into a new folder; return the names of its runs, the parent first."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            for one in members:
                is_read = one.filename.endswith(".json") and one.filename.count("/") <= 2
                if is_read and one.file_size > _MAX_JSON:
                    raise ValueError(f"its {one.filename[:100]!r} has {one.file_size:,} bytes")
            fields = json.loads(archive.read(_MANIFEST))
            named = fields["runs"] if fields["version"] == 1 else []
            if not named or not all(map(names.is_plain, named)) or len({*named}) < len(named):
                raise ValueError("its list of runs is of another version, or damaged")
            free = shutil.disk_usage(aside.parent).free
            if (needed := sum(one.file_size for one in members)) > free:
                raise ValueError(f"it needs {needed:,} bytes, and {aside.parent} has {free:,}")
            for one in members:
                target = aside / _plain(one, named)
                if _is_local(target.name) and target.parent.parent == aside / _RUNS:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(one) as source, target.open("xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
            return list(named)
    except Exception as error:  # each kind of damage and of compression raises another one
        raise UserError(f"{file} cannot be imported: {error}") from error


def _plain(member: zipfile.ZipInfo, named: list[str]) -> Path:
    """Return a member's path. Raises ValueError unless it is a plain file within the bundle."""
    path, kind = PurePosixPath(member.filename), stat.S_IFMT(member.external_attr >> 16)
    below = path.parts[0] in (_RUNS, _MLFLOW) and len(path.parts) > 2 and path.parts[1] in named
    is_plain = (
        kind in (0, stat.S_IFREG)
        and not member.is_dir()
        and not any(part in ("..", "/") or "\\" in part or "\0" in part for part in path.parts)
    )
    if not is_plain or not (below or str(path) == _MANIFEST):
        raise ValueError(f"it has {member.filename[:100]!r}, which is no file of a run")
    return Path(path)


def _checked(unpacked: Path, runs: Path, tracking_uri: str) -> RunFolder:
    """Return the folder of an unpacked run among the others. Raises UserError if it cannot be."""
    read, folder = RunFolder(unpacked).identity, RunFolder(runs / unpacked.name)
    names.check_experiment(read.experiment)
    if read.name != unpacked.name:
        raise UserError(f"the bundle's run {unpacked.name!r} calls itself {read.name!r}")
    if folder.path.exists():
        _refuse_another(RunFolder(unpacked), folder, tracking_uri)
    return folder


def _refuse_another(unpacked: RunFolder, folder: RunFolder, tracking_uri: str) -> None:
    """Raise UserError if the run that is here already would not become the bundle's."""
    name, here, runs = folder.path.name, folder.identity, folder.path.parent
    if here.uuid != unpacked.identity.uuid:
        raise UserError(
            f"there is another run {name!r} already in {runs}: import it into a store of its own, "
            "with --dir OTHER"
        )
    if deleted.is_hidden(folder):
        command = command_lines.line(runs.parent, "delete", "--restore", name)
        raise UserError(f"{name} is deleted: `{command}`")
    if here.tracking_uri != tracking_uri:
        command = command_lines.line(runs.parent, "copy", name, "--to", tracking_uri)
        raise UserError(f"{name} is here already, for {here.tracking_uri}: `{command}`")
    if (lookup.journal_bytes(unpacked) or 0) > (lookup.journal_bytes(folder) or 0):
        raise UserError(
            f"{name} is here already, and the bundle has more of it: import it with --dir OTHER"
        )


def _place(unpacked: Path, folder: RunFolder, tracking_uri: str, bundled: list[RunFolder]) -> None:
    """Move an unpacked run to the others. Children come after their parent."""
    read, file, top = RunFolder(unpacked).identity, None, bundled[0].path.name
    if read.experiment_file is not None and read.project_dir is not None:
        # Below the folder in which the run was started.
        file = os.path.relpath(read.experiment_file, read.project_dir)
    here = {one.identity.uuid for one in bundled if one.path.exists()}
    identity = dataclasses.replace(
        read,
        tracking_uri=tracking_uri,
        artifact_root=uris.artifact_root(tracking_uri),
        experiment_file=download.file_here(file, folder.root),
        project_dir=str(Path.cwd()),
        # A child that was exported alone stands alone: it would wait for its parent for ever.
        parent=read.parent if read.parent == top != read.name else None,
        parent_uuid=read.parent_uuid if read.parent_uuid in here else None,
        parent_run_id=None,
        mlflow_run_id=None,
    )
    RunFolder(unpacked).write_identity(identity)
    (unpacked / _UNFINISHED).touch()
    unpacked.rename(folder.path)


def _deliver_what_mlflow_had(
    folder: RunFolder, source: Path, notice: Callable[[str], object]
) -> None:
    run_id = lookup.mlflow_id(folder)
    if run_id is None or not (source / "mlflow.json").exists():
        return
    tracker, known = connect(folder.identity.tracking_uri), _mlflow_fields(source)
    run = tracker.find_run(run_id)
    new = {key: text for key, text in known["params"].items() if key not in run.params}
    tracker.log_params(run_id, new)
    _log_points(tracker, run_id, source / _POINTS)
    _deliver_artifacts(tracker, run_id, source / "artifacts", notice)
    there = [model for model in tracker.models.of_run(run) if model.status == "READY"]
    same = Counter((model.name, *_version(model.tags)) for model in there)
    # The oldest first, because those of the user's own calls may differ in nothing else.
    for number, model in reversed([*enumerate(known["models"])]):
        key = model["name"], *_version(model["tags"])
        same[key] -= 1
        if same[key] < 0:
            tracker.models.log_model(run, source / "models" / str(number), **model)
    # The run was trained on since an earlier copy. An older bundle retires no newer model.
    newest = max([-1, *(_best_step(model["tags"]) for model in known["models"])])
    ours = {_version(model["tags"]) for model in known["models"]}
    for former in there:
        if -1 < _best_step(former.tags) <= newest and _version(former.tags) not in ours:
            tracker.models.retire(former.model_id)
    tags = known["tags"]
    if DESCRIPTION in tags:
        tags[DESCRIPTION] = description.moved(tags[DESCRIPTION], run.experiment_id, run_id)
    tracker.set_tags(run_id, tags)


def _deliver_artifacts(
    tracker: MlflowRuns, run_id: str, source: Path, notice: Callable[[str], object]
) -> None:
    """Upload all files of a folder, except for those that the store will never take."""
    for path in _files(source):
        name = path.relative_to(source)
        below = name.parent.as_posix()
        try:
            tracker.log_artifact(run_id, path, None if below == "." else below)
        except Exception as error:
            reason = refusal(error)
            if reason is None:
                raise
            notice(f"left out: the artifact {names.printable(name.as_posix())}: {reason}")


def _log_points(tracker: MlflowRuns, run_id: str, file: Path) -> None:
    """Log the points of a bundle. One of an earlier version has none."""
    if not file.exists():
        return
    with file.open(encoding="utf-8") as lines:
        while points := [_point(one) for one in itertools.islice(lines, _POINTS_AT_ONCE)]:
            tracker.log_metrics(run_id, points)


def _point(line: str) -> MetricPoint:
    try:
        key, raw_value, raw_time, raw_step = json.loads(line)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"the bundle's {_POINTS} is damaged: {error!r}") from error
    value, at, step = scalars.number(raw_value), scalars.step(raw_time), scalars.step(raw_step)
    if value is None or at is None or step is None:
        raise UserError(f"the bundle's {_POINTS} is damaged: {line[:100]!r}")
    return MetricPoint(limits.name(str(key)), value, at, step)


def _best_step(tags: Mapping[str, str]) -> int:
    """Return the step of a best model, or -1 for another one."""
    step = tags.get("rankzero.step", "")
    return int(step) if tags.get("rankzero.model") == "best" and step.isdecimal() else -1


def _version(tags: Mapping[str, str]) -> tuple[str | None, ...]:
    """Return what differs between two models of one name in one run."""
    return tags.get("rankzero.step"), tags.get("rankzero.saved_at")


def _copied(tags: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in tags.items() if key not in _OWN_TAGS}


def _mlflow_fields(source: Path) -> dict[str, Any]:
    try:
        fields = json.loads((source / "mlflow.json").read_text(encoding="utf-8"))
        tags = _copied(fields["tags"])
        # A bundle of an earlier version has none.
        params = {str(key): str(value) for key, value in fields.get("params", {}).items()}
        models = [
            {
                "name": str(one["name"]),
                "kind": str(one.get("kind", "pytorch")),
                "step": int(one["step"]),
                "tags": _copied(one["tags"]),
            }
            for one in fields["models"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the bundle's {_MLFLOW}.json is damaged: {error!r}") from error
    return {"tags": tags, "models": models, "params": params}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def _is_local(name: str) -> bool:
    return any(PurePosixPath(name).match(pattern) for pattern in _LOCAL)


def _add(archive: zipfile.ZipFile, path: Path, name: PurePosixPath) -> None:
    # Tensors hardly get smaller. Journals get five times smaller.
    kind = zipfile.ZIP_STORED if path.suffix == ".pt" else zipfile.ZIP_DEFLATED
    archive.write(path, str(name), compress_type=kind)
