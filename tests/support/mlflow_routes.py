"""Print every route of MLflow's server with basic-auth: python mlflow_routes.py EMPTY_FOLDER.

The output is JSON, [[method, path], …]. Use a process of its own: the app lives as long as its
process, and its import warns.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero.mlflow_store import server
from rankzero.mlflow_store.uris import default_tracking_uri

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi import FastAPI

SERVED = {"_MLFLOW_SERVER_SERVE_ARTIFACTS": "true", "_MLFLOW_SGI_NAME": "uvicorn"}
"""`mlflow server` sets this for the app: artifacts go through it, and FastAPI's half is there."""
PLACEHOLDERS = re.compile(r"<[^>]*>|\{[^}]*\}")
METHODS = {"DELETE", "GET", "PATCH", "POST", "PUT"}


def main(root: Path) -> None:
    environ, _ = server.with_users(root, server.environment(os.environ))
    os.environ.update(
        {**environ, **SERVED, "_MLFLOW_SERVER_FILE_STORE": default_tracking_uri(root)}
    )
    from mlflow.server import app as flask_app
    from mlflow.server.auth import create_app

    flask = (
        (method, rule.rule)
        for rule in flask_app.url_map.iter_rules()
        for method in rule.methods or ()
    )
    found = {
        (method, PLACEHOLDERS.sub("1", path))
        for method, path in (*flask, *_native(create_app()))
        if method in METHODS
    }
    print(json.dumps(sorted(found)))


def _native(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield the routes that FastAPI answers without asking Flask."""
    for path, methods in app.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in methods)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
