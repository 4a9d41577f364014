"""A webhook on this machine: it keeps what it gets, and answers as a test wants."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest


class Webhook(NamedTuple):
    address: str
    got: list[tuple[str, dict[str, Any]]]
    """Path and JSON of each request."""
    answers: list[int]
    """The codes of the next answers; 200 after them."""


@contextlib.contextmanager
def serving() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.got.append((self.path, json.loads(body)))
            code = hook.answers.pop(0) if hook.answers else 200
            self.send_response(code)
            if code == 302:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:  # which a redirect would become
            raise AssertionError("a message was lost")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}", [], [])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hook
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with serving() as hook:
        yield hook
