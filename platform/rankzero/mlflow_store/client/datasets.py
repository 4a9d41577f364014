"""Data sets as inputs of a run in MLflow."""

from __future__ import annotations

import json

from mlflow.entities import Dataset, DatasetInput, InputTag

from rankzero.events import DataDescribed
from rankzero.mlflow_store import limits

_NAME_LENGTH, _DIGEST_LENGTH, _TAG_LENGTH = 500, 36, 500


def dataset_input(event: DataDescribed) -> DatasetInput:
    """Return the data set as MLflow shows and filters it."""
    source = (
        {"uri": event.source}
        if event.source_type == "local"
        else {"tags": {"mlflow.source.name": event.source}}
    )
    columns = [
        {"name": name, "type": kind, "required": True} for name, kind in event.columns.items()
    ]
    dataset = Dataset(
        name=limits.head(event.name, _NAME_LENGTH),
        digest=limits.head(event.digest, _DIGEST_LENGTH),
        source_type=event.source_type,
        source=json.dumps(source),
        schema=json.dumps({"mlflow_colspec": columns}) if columns else None,
        profile=json.dumps({"num_rows": event.samples}),
    )
    tags = {"mlflow.data.context": event.context, "rankzero.digest_of": event.how}
    return DatasetInput(
        dataset, [InputTag(key, limits.head(value, _TAG_LENGTH)) for key, value in tags.items()]
    )
