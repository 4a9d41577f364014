"""Answers that are none of MLflow's, which its client takes for some: they are errors here, and asked for again.

It takes an answer without a body for one that says nothing: of a server killed while it answered, or of a proxy that
drops the connection within the headers. There would seem to be no such run, and a second one would be made. For an
upload it takes any page for a receipt, such as one to log in.
"""

from __future__ import annotations

import json
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.store.artifact import http_artifact_repo
from mlflow.utils import rest_utils

EMPTY = ("", "200 OK")

_verify: Any = rest_utils.verify_rest_response
_raise_for_status: Any = rest_utils.augmented_raise_for_status  # type: ignore[attr-defined]


def refuse_false_answers() -> None:
    """Have MLflow's client raise MlflowException for an answer that is not MLflow's; again: nothing happens."""
    rest_utils.verify_rest_response = _verified
    http_artifact_repo.augmented_raise_for_status = _received  # type: ignore[attr-defined]


def _verified(response: Any, endpoint: str, *arguments: Any, **options: Any) -> Any:
    if response.status_code == 200 and response.text.strip() in EMPTY:
        raise MlflowException(
            f"the answer to {endpoint} is empty: it was cut off, or is none of MLflow's"
        )
    return _verify(response, endpoint, *arguments, **options)


def _received(response: Any) -> None:
    _raise_for_status(response)
    asked = (*response.history, response)[0].request.method
    if asked != "GET" and (response.request.method != asked or not _may_be_a_receipt(response)):
        raise MlflowException(
            f"the answer to an upload is none of MLflow's: {response.text[:100]!r}"
        )


def _may_be_a_receipt(response: Any) -> bool:
    """Tell whether the answer is empty, as what stores objects sends, or JSON, as MLflow's server does."""
    try:
        return response.text.strip() in EMPTY or isinstance(json.loads(response.text), dict)
    except ValueError:
        return False
