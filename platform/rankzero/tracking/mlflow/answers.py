"""Answers that were cut off: MLflow's client takes one that ends within its headers for an answer that says nothing.

A server that is killed, or a proxy that drops the connection, then looks as if there were no such run, and a second
one would be made; a new run would have no id. Here such an answer is an error, and what was asked is asked again.
"""

from __future__ import annotations

from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.utils import rest_utils

_verify = rest_utils.verify_rest_response


def refuse_cut_answers() -> None:
    """Have MLflow's client raise MlflowException for an answer that is not there as a whole; again: nothing happens."""
    rest_utils.verify_rest_response = _verified


def _verified(response: Any, endpoint: str, *arguments: Any, **options: Any) -> Any:
    if response.status_code == 200 and not response.content and not _may_be_empty(response.headers):
        raise MlflowException(f"the answer to {endpoint} was cut off")
    return _verify(response, endpoint, *arguments, **options)


def _may_be_empty(headers: Any) -> bool:
    """Tell whether the headers announce an answer of no bytes, or one that tells its end by itself."""
    return headers.get("Content-Length") == "0" or "chunked" in headers.get("Transfer-Encoding", "")
