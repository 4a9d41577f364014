"""The identity of a new run, from the options that `train`, `search` and others share."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from rankzero import experiment_file
from rankzero.mlflow_store import uris
from rankzero.run_store.folder import Identity


def identity_for(arguments: argparse.Namespace, name: str) -> Identity:
    """Return a new identity called `name`: experiment, tracking URI and places by the arguments."""
    path, cls = experiment_file.split(arguments.experiment)
    uri = uris.resolve_tracking_uri(arguments.tracking_uri, os.environ, arguments.dir)
    from_environment = os.environ.get("MLFLOW_EXPERIMENT_NAME")
    return Identity(
        name=name,
        uuid=secrets.token_hex(16),
        experiment=arguments.experiment_name or from_environment or path.stem,
        tracking_uri=uri,
        artifact_root=uris.artifact_root(uri),
        experiment_file=f"{path}:{cls}" if cls else str(path),
        project_dir=str(Path.cwd()),
    )
