"""Refuses a store that this machine cannot use: packages, and a shared place for artifacts."""

from __future__ import annotations

import contextlib
import importlib.util
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero.errors import UserError
from rankzero.redaction.text import url_without_secrets

if TYPE_CHECKING:
    from sqlalchemy import Connection

ARTIFACT_ROOT = "MLFLOW_DEFAULT_ARTIFACT_ROOT"
"""MLflow's own variable: its server reads it for the same purpose."""
_CONNECT_SECONDS = 3.0
_DATABASES = ("postgresql", "mysql", "mssql")
# For each scheme: the module that MLflow's client imports, and the packages to install.
_CLIENTS = {
    "s3": ("boto3", "boto3"),
    "r2": ("boto3", "boto3"),
    "b2": ("boto3", "boto3"),
    "gs": ("google.cloud.storage", "google-cloud-storage"),
    "wasbs": ("azure.storage.blob", "azure-storage-blob azure-identity"),
    "abfss": ("azure.storage.filedatalake", "azure-storage-file-datalake azure-identity"),
    "hdfs": ("pyarrow", "pyarrow"),
    "viewfs": ("pyarrow", "pyarrow"),
    "sftp": ("pysftp", "pysftp"),
}
_DRIVERS = {
    "psycopg2": "psycopg2-binary",
    "psycopg": "'psycopg[binary]'",
    "MySQLdb": "mysqlclient",
}
# The kernel alone notices the loss of a server after 15 minutes, or after two hours.
_KEEPALIVES = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}


def is_database(uri: str) -> bool:
    """Return whether the URI is a database on a server, which processes use without MLflow's."""
    return urllib.parse.urlsplit(uri).scheme.partition("+")[0] in _DATABASES


def require_driver(database: str) -> None:
    """Raise UserError if the driver of a database is not installed. Ignores other URIs."""
    if not is_database(database):
        return
    # Late: it takes a fifth of a second. SQLAlchemy knows which driver a URI means.
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    shown = url_without_secrets(database)
    try:
        make_url(database).get_dialect().import_dbapi()
    except (ArgumentError, ValueError) as error:  # the second for a port that is no number
        raise UserError(f"{shown} is no database that SQLAlchemy knows: {error}") from error
    except ImportError as error:
        name = error.name or str(error)
        package = _DRIVERS.get(name, name)
        raise UserError(
            f"{shown} needs a driver that this machine lacks ({error}): pip install {package}"
        ) from error


def with_keepalives(uri: str) -> str:
    """Return the URI, with settings that end PostgreSQL's requests to a server that is lost."""
    if not uri.startswith("postgresql"):
        return uri
    from sqlalchemy.engine import make_url

    url = make_url(uri)
    if url.get_driver_name() not in ("psycopg2", "psycopg"):
        return uri
    return url.set(query=_KEEPALIVES | url.query).render_as_string(hide_password=False)


def connect(database: str, seconds: float) -> Connection:
    """Connect to a database. Raises SQLAlchemy's error if it does not answer."""
    from sqlalchemy import create_engine

    waits = {} if database.startswith("mssql") else {"connect_timeout": round(seconds)}
    return create_engine(database, connect_args=waits).connect()


def require_client(location: str) -> None:
    """Raise UserError if MLflow's client lacks the package for an artifact location."""
    module, packages = _CLIENTS.get(urllib.parse.urlsplit(location).scheme, ("", ""))
    # Not imported: a cloud's package takes a second.
    parents = [".".join(module.split(".")[:count]) for count in range(1, module.count(".") + 2)]
    if module and not all(map(importlib.util.find_spec, parents)):
        raise UserError(
            f"artifacts in {url_without_secrets(location)} need a package that this machine lacks "
            f"({module}): pip install {packages}"
        )


def require_place(tracking_uri: str, root: str | None, experiment: str) -> None:
    """Raise UserError if neither the artifact root nor the experiment says where artifacts go."""
    try:
        require_artifact_root(tracking_uri, root)
    except UserError:
        # An experiment that is there keeps its place, whatever the root. MLflow's client would make
        # the tables of an empty database, with artifacts in ./mlruns.
        from sqlalchemy import text

        query = text("SELECT 1 FROM experiments WHERE name = :name")
        with contextlib.suppress(Exception), connect(tracking_uri, _CONNECT_SECONDS) as store:
            if store.execute(query, {"name": experiment}).first() is not None:
                return
        raise


def require_artifact_root(tracking_uri: str, root: str | None) -> None:
    """Raise UserError if a database has no artifact root `root` that other machines understand."""
    if not is_database(tracking_uri):
        return
    shown = url_without_secrets(tracking_uri)
    if not root:
        # MLflow would take ./mlruns of this machine, and keep it for the experiment's life.
        raise UserError(
            f"{shown} is a database without MLflow's server, so nothing says where artifacts go: "
            f"set {ARTIFACT_ROOT} to a place that all machines reach, such as s3://bucket/path or "
            "/shared/folder, or use a server's http:// address"
        )
    parts = urllib.parse.urlsplit(root)
    if parts.scheme == "mlflow-artifacts" and not parts.netloc:
        raise UserError(
            f"{ARTIFACT_ROOT}={root} is a place of MLflow's server, and {shown} is used without "
            "one: name a place such as s3://bucket/path, or use the server's http:// address"
        )
    if not (parts.scheme or Path(root).is_absolute()):
        raise UserError(
            f"{ARTIFACT_ROOT}={root} is another folder in each process: write an absolute path"
        )
    require_client(root)
