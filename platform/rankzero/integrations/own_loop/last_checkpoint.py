"""The last checkpoint of a run of `rankzero.track`, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankzero import ranks
from rankzero.errors import UserError
from rankzero.mlflow_store import uris
from rankzero.redaction.text import line_without_secrets
from rankzero.run_store.folder import RunFolder
from rankzero.training.checkpoints import restore
from rankzero.training.distributed.world import World, world_of_process_group


def load(
    folder: RunFolder | None, notice: Callable[[str], None], *, in_mlflow: bool = False
) -> tuple[dict[str, Any], int] | None:
    """Return the state of the newest intact checkpoint and its step, or None without one.

    A collective; only rank 0's arguments count. `in_mlflow`: MLflow is asked if the disk has none.
    Raises UserError, on every rank, if MLflow does not answer or without a process group.
    """
    world = world_of_process_group()
    if world is None and ranks.detect().world_size > 1:
        raise UserError("latest() needs the other ranks: call init_process_group before it")
    world = world or World(ranks.Ranks(), torch.device("cpu"))
    # Only rank 0 knows whether the run is named, and every rank takes part in the same broadcasts.
    mine = [None if folder is None else str(folder.checkpoints), in_mlflow]
    kept, in_mlflow = world.share(mine)
    last = restore.read_newest(Path(kept), world, notice) if kept is not None else None
    if last is None and in_mlflow:
        last = _download(folder, world, notice)
    if last is None:
        return None
    name, state = last
    return state, int(name.rpartition("_")[2])


def _download(
    folder: RunFolder | None, world: World, notice: Callable[[str], None]
) -> tuple[str, dict[str, Any]] | None:
    """Return the newest checkpoint that MLflow has, and its name. As `load`."""
    found: dict[str, str] = {}
    if folder is not None:
        try:
            path = _newest_in_mlflow(folder, notice)
            found = {"path": str(path)} if path else {}
        except Exception as error:  # the others wait, whatever it is
            found = {"error": line_without_secrets(f"{type(error).__name__}: {error}")}
    found = world.share(found)
    if "error" in found:
        raise UserError(
            f"the disk has no checkpoint, and MLflow cannot be asked: {found['error']}; "
            "offline=True starts without one"
        )
    if "path" not in found:
        return None
    place = Path(found["path"])
    return place.name, restore.read(place, world)


def _newest_in_mlflow(folder: RunFolder, notice: Callable[[str], None]) -> Path | None:
    identity = folder.identity
    database = uris.sqlite_path(identity.tracking_uri)
    # The import of mlflow takes seconds.
    if database is not None and uris.is_empty(database):
        return None
    from rankzero.housekeeping import download
    from rankzero.mlflow_store.client import MlflowRuns

    store = MlflowRuns(identity.tracking_uri)
    for run in (store.find_open_run(identity), store.find_namesake(identity)):
        path, problems = (None, []) if run is None else download.newest_checkpoint(folder, run)
        for problem in problems:
            notice(problem)
        if run is not None and path is not None:
            notice(f"this disk has no checkpoint: {path.name} is that of MLflow's run {run.run_id}")
            return path
    return None
