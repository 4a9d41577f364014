"""The log of the recorder and the courier: their standard error is the run's ``recorder.log``."""

from __future__ import annotations

import logging

from rankzero.redaction.text import text_without_secrets


def log_without_secrets() -> None:
    """Set up this process's log so that secrets are redacted, also those in tracebacks."""
    handler = logging.StreamHandler()
    # An error of a database has the password of its URL in it.
    handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


class _RedactingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return text_without_secrets(super().format(record))
