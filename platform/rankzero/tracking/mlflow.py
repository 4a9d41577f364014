"""MLflow, and the only file that imports it: runs, metrics, artifacts and checkpoints by explicit ids.

Importing this costs seconds, so it is imported where it is used: in the recorder, and in the
commands that read the store. Nothing here retries; that is the recorder's work.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# MLflow reads these when imported or at each call. Its own patience, 4 minutes a call, would hold up the recorder.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}.items():
    os.environ.setdefault(_name, _value)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations among MLflow's dependencies: nothing for our users to mend
    from mlflow import MlflowClient, set_tracking_uri
    from mlflow.entities import (
        Dataset,
        DatasetInput,
        InputTag,
        LoggedModel,
        LoggedModelOutput,
        Metric,
        Param,
        Run,
        RunTag,
    )
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from rankzero.events import CheckpointSaved, DataDescribed, RunEnded, RunStarted  # noqa: E402
from rankzero.tracking import legal  # noqa: E402
from rankzero.tracking.delivery import WHOLE_RUN, Point  # noqa: E402
from rankzero.tracking.facts import SPEED  # noqa: E402
from rankzero.tracking.journal import Identity  # noqa: E402
from rankzero.tracking.retry import Impossible, is_want  # noqa: E402
from rankzero.tracking.secrecy import url_without_secrets  # noqa: E402
from rankzero.tracking.store import RunGone, TrackingError, artifact_root, make_tables, prepare_store  # noqa: E402

LONGEST_FOLDER = 200
DATASET_NAME_LENGTH, DIGEST_LENGTH, INPUT_TAG_LENGTH = 500, 36, 500
PICTURES = "pictures"
LOGGED_IMAGES = "mlflow.loggedImages"
THUMBNAIL_PIXELS = 800
LONGEST_KEY_BYTES = 140  # of the 255 of a file's name; step, time and the rest take up to 114
UPLOAD_SECONDS = 600  # a server may store a whole file before it answers


class OpenRun(NamedTuple):
    """A run to write to; `marks`: metric -> highest step that MLflow has."""

    run_id: str
    experiment_id: str
    marks: dict[str, int]


class Checkpoint(NamedTuple):
    """A checkpoint as MLflow knows it; `status` is READY once it is whole."""

    step: int
    model_id: str
    status: str
    best: bool
    tags: Mapping[str, str]


class RunRecord(NamedTuple):
    """A run as the command line lists it."""

    name: str
    run_id: str
    experiment_id: str
    status: str
    start_time: float
    goal: str | None
    best: float | None
    samples_per_second: float | None
    metrics: Mapping[str, float]
    params: Mapping[str, str]
    tags: Mapping[str, str]


class Tracker:
    """The runs of one tracking store. Not for use by several threads at once."""

    def __init__(self, tracking_uri: str) -> None:
        prepare_store(tracking_uri)
        root = artifact_root(tracking_uri)
        if root is not None:  # else experiments made beside a database keep artifacts in the current directory
            os.environ.setdefault("_MLFLOW_SERVER_ARTIFACT_ROOT", root)
        self._uri = tracking_uri
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations between MLflow and sqlalchemy: nothing to do for us
            make_tables(tracking_uri, lambda uri: MlflowClient(tracking_uri=uri).search_experiments(max_results=1))
            self._client = MlflowClient(tracking_uri=tracking_uri)
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # each error comes to us as an exception as well
        logging.getLogger("alembic").setLevel(logging.ERROR)

    def open_run(self, identity: Identity, start_seconds: float) -> OpenRun:
        """Return the identity's run, made if it is not there; the same run however often it is called."""
        found = self.find_open_run(identity)
        if found is not None:
            return found
        run = self._client.create_run(
            self._experiment_id(identity),
            start_time=int(start_seconds * 1000),
            run_name=identity.name,
            tags=_birth_tags(identity),
        )
        return OpenRun(run.info.run_id, run.info.experiment_id, {})

    def find_open_run(self, identity: Identity) -> OpenRun | None:
        """Return the identity's run; None where nobody has made it yet."""
        if identity.mlflow_run_id is not None:
            return _opened(self._client.get_run(identity.mlflow_run_id))
        experiment = self._client.get_experiment_by_name(identity.experiment)
        if experiment is None:
            return None
        runs = self._client.search_runs(
            [experiment.experiment_id], f"tags.`rankzero.uuid` = '{identity.uuid}'", max_results=1
        )
        return _opened(runs[0]) if runs else None

    def start_attempt(self, run_id: str, event: RunStarted) -> None:
        """Set the run to RUNNING and log its params and tags.

        A param is for ever: where a later attempt's differs, the first stays and the new one becomes a tag.
        """
        run = self._client.get_run(run_id)
        tags = {**event.environment, "rankzero.attempt": str(event.attempt)}
        if "goal.metric" in event.params:
            tags["rankzero.goal"] = event.params["goal.metric"]
        new, names = {}, legal.names(event.params)
        for key, value in event.params.items():
            name, value = names[key], legal.head(value, legal.PARAM_LENGTH)
            known = run.data.params.get(name)
            if known is None:
                new[name] = value
            elif known != value:
                tags[f"rankzero.param.{key}"] = value
        for chunk in _chunks([Param(*pair) for pair in new.items()], legal.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, params=chunk, synchronous=True)
        self.set_tags(run_id, tags)
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, status="RUNNING")

    def log_data(self, run_id: str, event: DataDescribed) -> None:
        """Log a data set as the run's input, where MLflow shows and filters data sets. Again: nothing happens."""
        self._client.log_inputs(run_id, [_dataset_input(event)])

    def log_metrics(self, run_id: str, points: Sequence[Point]) -> None:
        """Send the points, at most a thousand at a time. Sending one again changes nothing."""
        for chunk in _chunks(points, legal.METRICS_PER_BATCH):
            metrics = [Metric(p.key, p.value, p.milliseconds, p.step, model_id=p.model_id) for p in chunk]
            self._client.log_batch(run_id, metrics=metrics, synchronous=True)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set the tags, made legal."""
        legal_tags = [RunTag(legal.name(key), legal.head(value, legal.TAG_LENGTH)) for key, value in tags.items()]
        for chunk in _chunks(legal_tags, legal.ITEMS_PER_BATCH):
            self._client.log_batch(run_id, tags=chunk, synchronous=True)

    def close_run(self, run_id: str, event: RunEnded) -> None:
        """Set the run's status and when it ended."""
        self._client.set_terminated(run_id, event.status, end_time=legal.milliseconds(event.time))

    def require_run(self, run_id: str) -> None:
        """Raise RunGone when the run was deleted, and whatever MLflow raises when it cannot be asked."""
        try:
            stage = self._client.get_run(run_id).info.lifecycle_stage
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            stage = "deleted"
        if stage == "deleted":
            raise RunGone(f"the MLflow run {run_id} was deleted")

    def log_artifact(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload a file into the run's artifacts, into `folder` there."""
        with _patience():
            self._client.log_artifact(run_id, str(path), folder)

    def log_artifacts(self, run_id: str, path: Path, folder: str | None = None) -> None:
        """Upload what is in the folder `path`."""
        with _patience():
            self._client.log_artifacts(run_id, str(path), folder)

    def log_pictures(self, run_id: str, pictures: Mapping[str, Path], step: int, milliseconds: int) -> None:
        """Upload PNGs by key, so that MLflow's page shows each key's pictures by step; again: the same files.

        The newest of each also goes to ``pictures/<key>.png``. Raises Impossible for what cannot be made smaller.
        """
        with tempfile.TemporaryDirectory(prefix="rankzero-") as folder, _patience():
            for key, path in pictures.items():
                _write_image(path, Path(folder), run_id, key, step, milliseconds)
            self._client.log_artifacts(run_id, folder)
        self.set_tags(run_id, {LOGGED_IMAGES: "True"})

    def save_checkpoint(
        self, run: OpenRun, event: CheckpointSaved, folder: Path, points: Callable[[str], Sequence[Point]]
    ) -> str:
        """Upload the checkpoint's folder as a logged model and return its id; again: nothing happens.

        `points` gives the metrics to link to the model. The model is READY only when all of it is there;
        what an upload that was cut short has left is deleted. Raises FileNotFoundError when the folder goes meanwhile.
        """
        saved_at = repr(event.time)
        models = self._checkpoint_models(run, event.step)
        whole = [m for m in models if m.status == "READY" and m.tags.get("rankzero.saved_at") == saved_at]
        for model in models:
            if model not in whole:
                self.delete_checkpoint(model.model_id)
        model_id = whole[0].model_id if whole else self._upload_checkpoint(run, event, folder, points)
        self._link_output(run, model_id, event.step)
        if event.best:
            self._unmark_best(run, but=model_id)
        return model_id

    def list_checkpoints(self, run: OpenRun) -> list[Checkpoint]:
        """Return the run's checkpoints by step, those whose upload was cut short included."""
        models = self._checkpoint_models(run)
        return sorted(
            Checkpoint(
                int(m.tags["rankzero.step"]), m.model_id, str(m.status), m.tags.get("rankzero.best") == "true", m.tags
            )
            for m in models
        )

    def delete_checkpoints(self, run: OpenRun, step: int) -> None:
        """Delete the checkpoints of `step`, bytes included."""
        for model in self._checkpoint_models(run, step):
            self.delete_checkpoint(model.model_id)

    def delete_checkpoint(self, model_id: str) -> None:
        """Delete the logged model, bytes included. MLflow alone would only hide it and keep the bytes."""
        location = self._client.get_logged_model(model_id).artifact_location
        with _patience():
            self._repository(location).delete_artifacts()
        self._client.delete_logged_model(model_id)

    def download_checkpoint(self, model_id: str, destination: Path) -> Path:
        """Download the checkpoint's files into the folder `destination`, made if need be, and return it."""
        destination.mkdir(parents=True, exist_ok=True)
        location = self._client.get_logged_model(model_id).artifact_location
        with _patience():
            self._repository(location).download_artifacts("", str(destination))
        return destination

    def log_model(self, run: OpenRun, folder: Path, name: str, step: int, tags: Mapping[str, str]) -> str:
        """Upload a model saved with `save_pytorch` for ``mlflow.pytorch.load_model("models:/<id>")``; return its id."""
        model = self._client.create_logged_model(
            run.experiment_id, name=name, source_run_id=run.run_id, tags=dict(tags), model_type="pytorch"
        )
        self._upload(model, folder)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._link_output(run, model.model_id, step)
        return model.model_id

    def best_model(self, run: OpenRun) -> str | None:
        """Return the id of the run's logged best model; None where it has none."""
        models = [model for model in self._models(run, "pytorch") if model.tags.get("rankzero.model") == "best"]
        return str(max(models, key=lambda model: int(model.tags["rankzero.step"])).model_id) if models else None

    def register(self, run: OpenRun, model_id: str, name: str) -> int:
        """Make a logged model the newest version of a registered model, made if need be; return the version.

        Again: the version that it is already. Raises TrackingError for a name that MLflow does not take.
        """
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE":
                raise TrackingError(f"MLflow does not take {name!r} for a registered model: {error}") from error
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = self._client.search_model_versions(f"run_id = '{run.run_id}'")
        same = next((found for found in known if (found.name, found.source) == (name, f"models:/{model_id}")), None)
        with _as_everybodys(self._uri):  # MLflow's registry looks the model up by a client of its own
            made = same or self._client.create_model_version(name, f"models:/{model_id}", run.run_id, model_id=model_id)
        return int(made.version)

    def list_runs(self, experiment: str | None = None, limit: int = 50) -> list[RunRecord]:
        """Return the newest runs first, of one experiment or of all."""
        runs = self._client.search_runs(
            self._experiment_ids(experiment), max_results=limit, order_by=["attributes.start_time DESC"]
        )
        return [_record(run) for run in runs]

    def find_run(self, name_or_id: str) -> RunRecord:
        """Return the run of this id, or else the newest of this name. Raises TrackingError when there is none."""
        with contextlib.suppress(MlflowException):  # no legal id, or nobody's
            return _record(self._client.get_run(name_or_id))
        name = name_or_id.replace("'", "")
        runs = self._client.search_runs(
            self._experiment_ids(None),
            f"attributes.run_name = '{name}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        if not runs:
            raise TrackingError(f"no run is called {name_or_id!r} in {url_without_secrets(self._uri)}")
        return _record(runs[0])

    def experiment_name(self, experiment_id: str) -> str:
        """Return the name of an experiment."""
        return str(self._client.get_experiment(experiment_id).name)

    def save_view(self, experiment: str, tag: str, value: str, may_replace: Callable[[str | None], bool]) -> str | None:
        """Set an experiment's tag where what it has `may_replace`; return the experiment's id, None without one."""
        found = self._client.get_experiment_by_name(experiment)
        if found is None or found.lifecycle_stage == "deleted":
            return None
        known = found.tags.get(tag)
        if known != value and may_replace(known):
            self._client.set_experiment_tag(found.experiment_id, tag, value)
        return str(found.experiment_id)

    def download_artifact(self, run_id: str, name: str, folder: Path) -> Path:
        """Download one of the run's artifacts into the folder and return its path. Raises TrackingError without it."""
        if name not in {found.path for found in self._client.list_artifacts(run_id, str(Path(name).parent).strip("."))}:
            raise TrackingError(f"the MLflow run {run_id} has no artifact {name!r}")
        with _patience():
            return Path(self._client.download_artifacts(run_id, name, str(folder)))

    def history(self, run_id: str, key: str) -> list[Point]:
        """Return every point of a metric, by step."""
        metrics = self._client.get_metric_history(run_id, key)
        points = [Point(metric.key, metric.value, metric.timestamp, metric.step) for metric in metrics]
        return sorted(points, key=lambda point: (point.step, point.milliseconds))

    def _repository(self, location: str) -> Any:
        return get_artifact_repository(location, tracking_uri=self._uri)

    def _experiment_id(self, identity: Identity) -> str:
        """Return the experiment's id, made if it is not there, by us or by whoever is faster."""
        for _ in range(2):
            experiment = self._client.get_experiment_by_name(identity.experiment)
            if experiment is not None:
                if experiment.lifecycle_stage == "deleted":
                    raise TrackingError(
                        f"the MLflow experiment {identity.experiment!r} was deleted; use another name, "
                        f"or: mlflow experiments restore -x {experiment.experiment_id}"
                    )
                return str(experiment.experiment_id)
            with contextlib.suppress(MlflowException):
                return self._create_experiment(identity)
        return self._create_experiment(identity)

    def _create_experiment(self, identity: Identity) -> str:
        kind = {"mlflow.experimentKind": "custom_model_development"}  # else the UI takes it for one of language agents
        return str(self._client.create_experiment(identity.experiment, self._artifact_location(identity), tags=kind))

    def _artifact_location(self, identity: Identity) -> str | None:
        base = identity.artifact_root or artifact_root(self._uri)
        return None if base is None else f"{base.rstrip('/')}/{folder_for(identity.experiment)}"

    def _experiment_ids(self, name: str | None) -> list[str]:
        if name is None:
            return [experiment.experiment_id for experiment in self._client.search_experiments()]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            raise TrackingError(f"no experiment is called {name!r} in {url_without_secrets(self._uri)}")
        return [experiment.experiment_id]

    def _checkpoint_models(self, run: OpenRun, step: int | None = None) -> list[LoggedModel]:
        return self._models(run, "checkpoint", "" if step is None else f" AND tags.`rankzero.step` = '{step}'")

    def _models(self, run: OpenRun, kind: str, further: str = "") -> list[LoggedModel]:
        condition = f"source_run_id = '{run.run_id}'{further}"
        found: list[LoggedModel] = []
        token: str | None = None
        while True:
            page = self._client.search_logged_models([run.experiment_id], condition, page_token=token)
            found += (model for model in page if model.model_type == kind)
            token = page.token
            if not token:
                return found

    def _upload_checkpoint(
        self, run: OpenRun, event: CheckpointSaved, folder: Path, points: Callable[[str], Sequence[Point]]
    ) -> str:
        names = _names(folder)
        if not names:
            raise FileNotFoundError(folder)
        model = self._client.create_logged_model(
            run.experiment_id,
            name=f"checkpoint-step-{event.step}",
            source_run_id=run.run_id,
            params={"step": str(event.step)},
            model_type="checkpoint",
            tags={
                "rankzero.step": str(event.step),
                "rankzero.best": str(event.best).lower(),
                "rankzero.saved_at": repr(event.time),
            },
        )
        self._upload(model, folder)
        if _names(folder) != names:  # retention was faster than the upload
            self.delete_checkpoint(model.model_id)
            raise FileNotFoundError(folder)
        self.log_metrics(run.run_id, points(model.model_id))
        self._client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _upload(self, model: LoggedModel, folder: Path) -> None:
        target = model.artifact_location.removeprefix("file://")
        if target.startswith("/"):
            shutil.copytree(folder, target, copy_function=_link_or_copy, dirs_exist_ok=True)
        else:
            with _patience():
                self._client.log_model_artifacts(model.model_id, str(folder))

    def _link_output(self, run: OpenRun, model_id: str, step: int) -> None:
        outputs = self._client.get_run(run.run_id).outputs
        if not any(output.model_id == model_id for output in (outputs.model_outputs if outputs else ())):
            self._client.log_outputs(run.run_id, [LoggedModelOutput(model_id, step)])

    def _unmark_best(self, run: OpenRun, but: str) -> None:
        for model in self._checkpoint_models(run):
            if model.model_id != but and model.tags.get("rankzero.best") == "true":
                self._client.set_logged_model_tags(model.model_id, {"rankzero.best": "false"})


def folder_for(experiment: str) -> str:
    """Return the name of one folder for any experiment's name: never ``..``, nor longer than a file system takes."""
    plain = re.sub(
        r"[^A-Za-z0-9_.\-]", "_", experiment
    )  # nothing quoted: MLflow takes it for a URI and would unquote it
    if plain == experiment and not plain.startswith(".") and len(plain) <= LONGEST_FOLDER:
        return plain
    return f"{plain.lstrip('.')[: LONGEST_FOLDER - 9]}-{hashlib.sha256(experiment.encode()).hexdigest()[:8]}"


def write_image(path: Path, folder: Path, run_id: str, key: str, step: int, milliseconds: int) -> None:
    """Write a PNG as `MlflowClient.log_image` names its files, but for the random part, which is always the same.

    Our smaller copy, which the page's grid shows, is sharper than MLflow's of 256 pixels: there are words to read.
    """
    from PIL import Image

    number = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {key} {step} {milliseconds}")
    key = _cut(key.replace("/", "~"))
    name = f"{PICTURES}~{key}+step+{step}+timestamp+{milliseconds}+{number}"  # ~ stands for /: a section of the page
    for below in ("images", PICTURES):
        (folder / below).mkdir(exist_ok=True)
    shutil.copyfile(path, folder / "images" / f"{name}.png")
    shutil.copyfile(path, folder / PICTURES / f"{key}.png")
    with Image.open(path) as image:
        smaller = image.convert("RGBA" if "A" in image.getbands() else "RGB")
    smaller.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    smaller.save(folder / "images" / f"{name}+compressed.webp", quality=85)


def _write_image(path: Path, folder: Path, run_id: str, key: str, step: int, milliseconds: int) -> None:
    try:
        write_image(path, folder, run_id, key, step, milliseconds)
    except Exception as error:
        if is_want(error):
            raise
        raise Impossible(f"{key}: {type(error).__name__}: {error}") from error


def _cut(key: str) -> str:
    """Return the key as a part of a file's name: no more bytes than one may have; keys that differ stay apart."""
    if len(key.encode()) <= LONGEST_KEY_BYTES:
        return key
    head = key.encode()[: LONGEST_KEY_BYTES - 9].decode(errors="ignore")
    return f"{head}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def save_pytorch(
    model: Any, folder: Path, inputs: Sequence[Any], output: Any, kind: str, code_paths: Sequence[Path]
) -> None:
    """Write the module in MLflow's layout, its signature taken from arrays; the first dimension is any batch size.

    `kind` is pt2 or pickle. `mlflow.pytorch.log_model` would also download every metric's history, and try out
    the requirements in a new process.
    """
    import mlflow.pytorch  # imports torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own internals
        mlflow.pytorch.save_model(
            model,
            str(folder),
            serialization_format=kind,
            signature=ModelSignature(
                Schema(_specs("input", inputs)), None if output is None else Schema(_specs("output", [output]))
            ),
            input_example=inputs[0] if len(inputs) == 1 else list(inputs),
            code_paths=[str(path) for path in code_paths] or None,
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", "torch", "numpy")],
        )


def _specs(name: str, arrays: Sequence[Any]) -> list[Any]:
    from mlflow.types import TensorSpec

    return [
        TensorSpec(array.dtype, (-1, *array.shape[1:]), f"{name}_{i}" if len(arrays) > 1 else None)
        for i, array in enumerate(arrays)
    ]


def _dataset_input(event: DataDescribed) -> DatasetInput:
    source = {"uri": event.source} if event.source_type == "local" else {"tags": {"mlflow.source.name": event.source}}
    columns = [{"name": name, "type": kind, "required": True} for name, kind in event.columns.items()]
    dataset = Dataset(
        name=legal.head(event.name, DATASET_NAME_LENGTH),
        digest=legal.head(event.digest, DIGEST_LENGTH),
        source_type=event.source_type,
        source=json.dumps(source),
        schema=json.dumps({"mlflow_colspec": columns}) if columns else None,
        profile=json.dumps({"num_rows": event.samples}),
    )
    tags = {"mlflow.data.context": event.context, "rankzero.digest_of": event.how}
    return DatasetInput(dataset, [InputTag(key, legal.head(value, INPUT_TAG_LENGTH)) for key, value in tags.items()])


def _birth_tags(identity: Identity) -> dict[str, str]:
    tags = {
        "rankzero.uuid": identity.uuid,
        "mlflow.source.name": identity.experiment_file or "rankzero",
        "mlflow.source.type": "LOCAL",
        "mlflow.parentRunId": identity.parent_run_id,
    }
    with contextlib.suppress(OSError, KeyError, ImportError):  # a user id without a name, as containers have
        tags["mlflow.user"] = getpass.getuser()
    return {key: legal.head(value, legal.TAG_LENGTH) for key, value in tags.items() if value}


def _opened(run: Run) -> OpenRun:
    metrics: Iterable[Any] = run.data._metric_objs  # the public dictionary has the values without their steps
    return OpenRun(run.info.run_id, run.info.experiment_id, {metric.key: metric.step for metric in metrics})


def _record(run: Run) -> RunRecord:
    tags, metrics = run.data.tags, run.data.metrics
    goal = tags.get("rankzero.goal")
    best = legal.number(tags.get("rankzero.best"))
    return RunRecord(
        name=run.info.run_name,
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        status=run.info.status,
        start_time=run.info.start_time / 1000,
        goal=goal,
        best=best if best is not None or goal is None else metrics.get(goal),
        samples_per_second=metrics.get(f"{WHOLE_RUN}/samples_per_second", metrics.get(SPEED)),
        metrics=metrics,
        params=run.data.params,
        tags=tags,
    )


@contextlib.contextmanager
def _as_everybodys(tracking_uri: str) -> Iterator[None]:
    """Make the store this process's own for the duration of the block."""
    set_tracking_uri(tracking_uri)
    try:
        yield
    finally:
        set_tracking_uri(None)  # type: ignore[arg-type]


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Let MLflow wait long for an answer: a big file takes longer than a metric."""
    name = "MLFLOW_HTTP_REQUEST_TIMEOUT"
    before = os.environ.get(name)
    os.environ[name] = str(max(UPLOAD_SECONDS, int(before or 0)))
    try:
        yield
    finally:
        os.environ[name] = before or "10"


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _link_or_copy(source: str, target: str) -> None:
    """Give the file a second name where the file system can: at once, and without its bytes a second time.

    A checkpoint's files are never written to again, so what retention removes of the run's folder stays here.
    """
    with contextlib.suppress(FileNotFoundError):
        Path(target).unlink()
    try:
        Path(target).hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
