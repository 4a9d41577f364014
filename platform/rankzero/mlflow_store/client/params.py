"""The params of an attempt, which MLflow never changes once they are logged. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rankzero.mlflow_store import limits


def new_and_changed(
    params: Mapping[str, str], present: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the params that MLflow lacks, and a tag for each that it has with another value.

    `present`: the params that MLflow has. A resume may change a setting.
    """
    new, tags, names = {}, {}, limits.names(params)
    for key, value in params.items():
        name, value = names[key], limits.head(value, limits.PARAM_LENGTH)
        if name not in present:
            new[name] = value
        elif present[name] != value:
            tags[f"rankzero.param.{key}"] = value
    return new, tags
