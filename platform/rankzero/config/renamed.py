"""Settings that have a new name: the only place that knows the old ones. Pure.

A user writes new names only: an error names the new one. RankZero reads what it wrote itself
under either name: config.yaml, sweet_spot.yaml, journals, studies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

NEW_NAMES: Mapping[str, str] = {
    "train.ddp_compression": "train.ddp.compression",
    "train.ddp_static_graph": "train.ddp.static_graph",
    "train.ddp_bucket_mb": "train.ddp.bucket_mb",
    "train.pp_schedule": "train.pp.schedule",
    "train.save_every": "train.checkpoints.save_every",
    "train.keep": "train.checkpoints.keep",
    "train.oom": "train.limits.oom",
    "train.max_minutes": "train.limits.max_minutes",
    "train.hang_minutes": "train.limits.hang_minutes",
    "train.stop_at_target": "train.limits.stop_at_target",
    "train.log_model": "train.mlflow.log_model",
    "train.pictures": "train.mlflow.log_pictures",
}


def new_name(key: str) -> str:
    """Return the key's name of today, which is mostly the key itself."""
    return NEW_NAMES.get(key, key)


def with_new_names(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return saved settings under their names of today. If both names occur, the new one counts."""
    renamed = {new_name(key): value for key, value in settings.items()}
    return {**renamed, **{key: settings[key] for key in renamed if key in settings}}


def params_with_new_names(params: Mapping[str, str]) -> dict[str, str]:
    """Return a run's params under the names of today, if an `Experiment` wrote them."""
    # A program with its own loop chooses its own names, and one may equal an old name of ours.
    # Every experiment has train.micro_batch, and hardly any other program.
    return with_new_names(params) if "train.micro_batch" in params else dict(params)
