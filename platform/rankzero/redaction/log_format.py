"""What the processes beside the training say of themselves: their standard error is the run's recorder.log."""

from __future__ import annotations

import logging

from rankzero.redaction.text import text_without_secrets


def log_without_secrets() -> None:
    """Set up this process's log, tracebacks included: an error of a database has its password in it."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Blotting("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _Blotting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return text_without_secrets(super().format(record))
