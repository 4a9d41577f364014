"""A proxy in front of MLflow's server that misbehaves on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

MODES = ("refuse", "hang", "close", "500", "429", "garbage", "empty", "login", "slow", "half")
SLOW_SECONDS = 5.0
# MLflow's client in a courier waits ten seconds for an answer.
HANG_SECONDS = 11.0
POLL_SECONDS = 0.2
ANSWERS = {
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n"
    b"Connection: close\r\n\r\noops",
    "429": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n",
    "garbage": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n\x00\xff{]nope!",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "login": b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n"
    b"Connection: close\r\n\r\n<html>log in</html>",
}


METHODS = (b"GET ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"HEAD ")
# The proxy misbehaves only for requests whose head contains this.
EVERYTHING, UPLOADS = b"", b"/mlflow-artifacts/"


class Proxy:
    """Forwards connections while `mode` is ``good``. Otherwise `mode` is one of `MODES`.

    ``refuse`` closes the connection at once. ``hang`` takes the request and never answers.
    ``close`` forwards the request and drops the answer. ``half`` cuts the answer. ``slow`` answers
    after five seconds. `met` is set once a request has met the mode.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.mode, self.aim, self.met = "good", EVERYTHING, threading.Event()
        self.requests = 0
        """Number of requests. A refused connection counts as one."""
        self._over = False

    def misbehave(self, mode: str, aim: bytes = EVERYTHING) -> None:
        """Misbehave from now on for requests that contain `aim`, and clear `met`."""
        self.mode, self.aim, self.met = mode, aim, threading.Event()

    def behave(self) -> bool:
        """Forward everything from now on. Return whether a request met the mode so far."""
        self.mode = "good"
        return self.met.is_set()

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            if self.mode == "refuse" and self.aim == EVERYTHING:
                self.requests += 1
                self.met.set()
                return
            aimed_at = threading.Event()
            with socket.create_connection(self._target) as server:
                threading.Thread(
                    target=self._answers, args=(server, client, aimed_at), daemon=True
                ).start()
                self._requests(client, server, aimed_at)
                # While the other thread reads, closing the socket would not end the connection.
                server.shutdown(socket.SHUT_RDWR)

    def _requests(
        self, client: socket.socket, server: socket.socket, aimed_at: threading.Event
    ) -> None:
        while request := client.recv(1 << 16):
            self._take_aim(request, aimed_at)
            if aimed_at.is_set() and not self._passes(client):
                return
            server.sendall(request)

    def _take_aim(self, request: bytes, aimed_at: threading.Event) -> None:
        """Note whether to misbehave for a request. Other data belongs to the request before."""
        if request.startswith(METHODS):
            self.requests += 1
            (aimed_at.set if self.aim in request else aimed_at.clear)()

    def _passes(self, client: socket.socket) -> bool:
        """Apply the mode to a request. Return whether the server must get the request."""
        mode, met = self.mode, self.met
        if mode == "hang":
            self._hang(met)
            return False
        if mode != "refuse" and mode not in ANSWERS:
            return True
        met.set()
        client.sendall(ANSWERS.get(mode, b""))
        return False

    def _answers(
        self, server: socket.socket, client: socket.socket, aimed_at: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while answer := server.recv(1 << 16):
                mode, met = (self.mode if aimed_at.is_set() else "good"), self.met
                if mode == "slow":
                    time.sleep(SLOW_SECONDS)
                    met.set()
                if mode in ("close", "half"):
                    met.set()
                    client.sendall(answer[: len(answer) // 2] if mode == "half" else b"")
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(answer)
            # The server has closed the connection. Real proxies then close the client's, too.
            if self.mode != "hang":
                client.shutdown(socket.SHUT_RDWR)

    def _hang(self, met: threading.Event) -> None:
        """Answer nothing while the mode lasts. A client has met it once its own timeout is over."""
        began = time.monotonic()
        while self.mode == "hang" and not self._over:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - began > HANG_SECONDS:
                met.set()
