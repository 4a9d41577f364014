"""All changes that RankZero makes in MLflow, and all uses of MLflow's internals.

Seen in MLflow 3.17.2. ``tests/mlflow_store/client/test_mlflow_compat.py`` fails if a private name
goes, and if a patch is needed no more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rankzero.mlflow_store import drivers
from rankzero.permanent_errors import NeverAccepted

# Documented variables, which MLflow reads when it is imported or at each call. A user's win.
ENVIRONMENT: Mapping[str, str] = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow's own timeouts and retries take 4 minutes a call and would hold up the courier.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # The courier has waits of its own. MLflow's would sleep for as long as a busy server says.
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_collects = gc.isenabled()
# The garbage collector would walk what MLflow creates several times: a sixth of the import.
gc.disable()
with warnings.catch_warnings():
    # Deprecations among MLflow's dependencies are nothing that a user can mend.
    warnings.simplefilter("ignore")
    from mlflow import set_tracking_uri
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact import http_artifact_repo
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.utils import environment, file_utils, rest_utils, uri
if _collects:
    gc.enable()

_EMPTY = ("", "200 OK")
_ARTIFACT_ROOT = "_MLFLOW_SERVER_ARTIFACT_ROOT"
_verify_rest_response: Any = rest_utils.verify_rest_response
_raise_for_status: Any = http_artifact_repo.augmented_raise_for_status  # type: ignore[attr-defined]
_file_utils: Any = file_utils
_uri: Any = uri
_environment: Any = environment


def prepare() -> None:
    """Silence MLflow's logs; have its client raise MlflowException for an answer not of MLflow.

    A second call changes nothing.
    """
    # Each error is raised as well as logged.
    logging.getLogger("mlflow").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    # The client takes an answer without a body for one with empty fields. Such an answer comes
    # from a server that was killed, or from a proxy that dropped the connection within the
    # headers. The run would seem to be missing, and a second one would be made. For an upload the
    # client takes any page for a receipt, also one to log in. There is no upstream issue: MLflow
    # wants it so for a server that answers traces without a body.
    rest_utils.verify_rest_response = _verified
    http_artifact_repo.augmented_raise_for_status = _received  # type: ignore[attr-defined]


def _verified(response: Any, endpoint: str, *arguments: Any, **options: Any) -> Any:
    if response.status_code == 200 and response.text.strip() in _EMPTY:
        raise MlflowException(
            f"the answer to {endpoint} is empty: it was cut off, or the server is not MLflow"
        )
    try:
        return _verify_rest_response(response, endpoint, *arguments, **options)
    except MlflowException as error:
        # MLflow has no code for a status such as 413, by which a proxy refuses a large batch.
        error.response = response  # type: ignore[attr-defined]
        raise


def _received(response: Any) -> None:
    _raise_for_status(response)
    asked = (*response.history, response)[0].request.method
    if asked == "GET":
        return
    # Object stores answer an upload with nothing, MLflow's server answers with JSON.
    is_receipt = response.text.strip() in _EMPTY
    with contextlib.suppress(ValueError):
        is_receipt = is_receipt or isinstance(json.loads(response.text), dict)
    if response.request.method != asked or not is_receipt:
        raise MlflowException(f"the answer to an upload is not MLflow's: {response.text[:100]!r}")


@contextlib.contextmanager
def request_timeout(seconds: int, *, once: bool = False, at_most: bool = False) -> Iterator[int]:
    """Give each request in the block at least so many seconds; yield how many it has.

    `once`: MLflow sends none again by itself. `at_most`: no request takes longer. Not for several
    threads at once.
    """
    # MLflow has no argument for it. An upload of 100 MB needs more than a metric does:
    # https://github.com/mlflow/mlflow/issues/8539.
    names = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    timeout, retries = before = [os.environ.get(name) or ENVIRONMENT[name] for name in names]
    limit = (min if at_most else max)(seconds, int(timeout))
    os.environ.update(zip(names, (str(limit), "0" if once else retries), strict=True))
    try:
        yield limit
    finally:
        os.environ.update(zip(names, before, strict=True))


@contextlib.contextmanager
def default_artifacts_below(root: str | None) -> Iterator[None]:
    """Have MLflow keep the artifacts of its default experiment below `root`."""
    # The experiment comes with a database's tables. Without a server, MLflow puts its artifacts
    # into mlruns in the current directory: https://github.com/mlflow/mlflow/issues/13244. The
    # variable is one that MLflow's server sets. It must not outlast the block, because MLflow
    # takes a process that has it for a server.
    if root is None or _ARTIFACT_ROOT in os.environ:
        yield
        return
    os.environ[_ARTIFACT_ROOT] = root
    try:
        yield
    finally:
        del os.environ[_ARTIFACT_ROOT]


@contextlib.contextmanager
def global_tracking_uri(tracking_uri: str) -> Iterator[None]:
    """Make the store this process's own in the block; not for several threads at once."""
    # MLflow's model registry looks a logged model up by a client of its own, whatever the tracking
    # URI of the client that asks: https://github.com/mlflow/mlflow/issues/23367.
    set_tracking_uri(tracking_uri)
    try:
        yield
    finally:
        set_tracking_uri(None)  # type: ignore[arg-type]


@contextlib.contextmanager
def requirements_unchecked() -> Iterator[None]:
    """Let MLflow save models without a look at the installed packages. Not for several threads."""
    # It reads the files of all packages, in a third of a second, to warn of other versions than
    # those that it is given. RankZero gives it the installed ones.
    check = _environment.warn_dependency_requirement_mismatches
    _environment.warn_dependency_requirement_mismatches = lambda _: None
    try:
        yield
    finally:
        _environment.warn_dependency_requirement_mismatches = check


def erase(client: Any, *, run_id: str | None = None, model_id: str | None = None) -> None:
    """Delete the rows of a run or a logged model for good. Only a local database can do it."""
    # As `mlflow gc` does. It is a command alone, and takes any place of artifacts that is in the
    # database for one that it may delete.
    store = client._tracking_client.store
    if run_id is not None:
        store._hard_delete_run(run_id)
    if model_id is not None:
        store._hard_delete_logged_model(model_id)


def models_of(client: Any, run_id: str) -> list[Any]:
    """Return all logged models of a run, also deleted ones. Only a local database can do it."""
    # MLflow's search leaves out deleted ones, and knows no other way to list them by their run.
    from mlflow.store.tracking.dbmodels.models import SqlLoggedModel as Row

    with client._tracking_client.store.ManagedSessionMaker() as session:
        rows = session.query(Row).filter(Row.source_run_id == run_id)
        return [row.to_mlflow_entity() for row in rows]


def refuse_old_server(client: Any) -> None:
    """Raise NeverAccepted if a server says that it is older than MLflow 3."""
    store = client._tracking_client.store
    version = store._get_server_version(store.get_host_creds())
    if version is not None and version.major < 3:
        raise NeverAccepted(f"the server has MLflow {version}; checkpoints need 3.0 or newer")


def scheme_of(location: str) -> str:
    """Return the scheme that MLflow reads in an artifact location, empty for a path."""
    return str(_uri.get_uri_scheme(location))


def local_path(location: str) -> Path:
    """Return the folder that MLflow reads in a location of this machine."""
    # A check of where files lie is worth nothing if it reads a location in another way than MLflow.
    return Path(_file_utils.local_file_uri_to_path(location)).absolute()


def artifact_repository(location: str, tracking_uri: str) -> Any:
    """Return the object by which MLflow's client reads and writes an artifact location.

    Raises UserError if a package for it is missing.
    """
    drivers.require_client(location)
    location = _uri.add_databricks_profile_info_to_artifact_uri(location, tracking_uri)
    return get_artifact_repository(location, tracking_uri=tracking_uri)
