"""A proxy before MLflow's server that misbehaves on demand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

MODES = ("refuse", "hang", "close", "500", "429", "garbage", "empty", "login", "slow", "half")
SLOW_SECONDS = 5.0
POLL_SECONDS = 0.2
ANSWERS = {
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\noops",
    "429": b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "garbage": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n\x00\xff{]nope!",
    "empty": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "login": b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\nConnection: close\r\n\r\n<html>log in</html>",
}


class Proxy:
    """Passes connections on while `mode` is ``good``; else does what `mode`, one of `MODES`, says.

    ``refuse`` closes at once, ``hang`` takes the request and never answers, ``close`` passes it on and drops the
    answer, ``half`` cuts the answer, ``slow`` answers after five seconds.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.mode = "good"
        self._over = False

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
            if self.mode == "refuse":
                return
            with socket.create_connection(self._target) as server:
                threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
                while request := client.recv(1 << 16):
                    mode = self.mode
                    if mode in ANSWERS:
                        client.sendall(ANSWERS[mode])
                        return
                    if mode == "refuse":
                        return
                    if mode == "hang":
                        self._while_mode("hang")
                        return
                    server.sendall(request)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while answer := server.recv(1 << 16):
                if self.mode == "slow":
                    time.sleep(SLOW_SECONDS)
                if self.mode in ("close", "half"):
                    client.sendall(answer[: len(answer) // 2] if self.mode == "half" else b"")
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(answer)

    def _while_mode(self, mode: str) -> None:
        while self.mode == mode and not self._over:
            time.sleep(POLL_SECONDS)
