"""Finds a run on this disk by a name that a tracking server has for it.

The embedded store's names are on the disk, and `catalog.lookup` knows them. A server is asked only
for a name that no run here has.
"""

from __future__ import annotations

import os
from pathlib import Path

from rankzero.catalog import lookup
from rankzero.errors import UserError
from rankzero.redaction.text import line_without_secrets, url_without_secrets
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.location import is_offline


def find(
    runs: Path, name_or_id: str, *, among_deleted: bool = False, strict: bool = False
) -> RunFolder | None:
    """Return the run's folder, or None if neither this disk nor the server knows the name.

    Raises UserError as `lookup.find` does, if the server does not answer, and if only the server
    has the run.
    """
    found = lookup.find(runs, name_or_id, among_deleted=among_deleted, strict=strict)
    server = None if found or is_offline() else server_of(runs)
    if server is None:
        return found
    from rankzero.mlflow_store.client import MlflowRuns

    place = url_without_secrets(server)
    try:
        ids = MlflowRuns(server).ids_named(name_or_id, among_deleted=among_deleted)
        why = f"{place} has a run of that name, which is not on this disk"
    except Exception as error:  # a server fails in many ways
        ids = None
        failure = line_without_secrets(f"{type(error).__name__}: {error}")
        why = f"{place} did not give the names in MLflow: {failure}"
    if ids:
        found = lookup.find(runs, name_or_id, among_deleted=among_deleted, ids=ids)
    if found is not None or ids == []:
        return found
    try:
        return lookup.require(runs, name_or_id, among_deleted=among_deleted)
    except UserError as error:
        raise UserError(f"{error}. {why}") from None


def require(runs: Path, name_or_id: str, *, among_deleted: bool = False) -> RunFolder:
    """Return the run's folder. Raises UserError with the newest runs' names without one."""
    found = find(runs, name_or_id, among_deleted=among_deleted, strict=True)
    return found or lookup.require(runs, name_or_id, among_deleted=among_deleted)


def server_of(runs: Path) -> str | None:
    """Return the server of the environment, else of the newest run here; None without one."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        newest = lookup.listed(runs)[:1] or lookup.listed(runs, among_deleted=True)[:1]
        uri = newest[0].folder.identity.tracking_uri if newest else ""
    return uri if uri.startswith(("http://", "https://")) else None
