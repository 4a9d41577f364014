"""Attempts of another user of the same machine, as `nobody`: read, lock, link, connect."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 — `nobody` may not be able to read the library
import fcntl
import json
import os
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

NOBODY = 65534
_MAGIC = 0x3C85F7CE  # what a client of a TCPStore sends first

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as another user: run the tests as root"
)


def as_nobody(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)` of a child that is `nobody`. The result goes through JSON."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become_nobody()
            os.write(write, json.dumps(function(*arguments)).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as result:
        text = result.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child of `nobody` failed: its error is in the captured output"
    return json.loads(text)


def become_nobody() -> None:
    """Give up every right of this process."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


@contextlib.contextmanager
def nobody_locks(folder: Path) -> Iterator[list[str]]:
    """Let `nobody` hold a lock on all that it can open in `folder`; yield the names."""
    (ready, told), (wait, go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        become_nobody()
        held = locked(folder)
        os.write(told, json.dumps([path for path, _ in held]).encode())
        os.close(told)
        os.read(wait, 1)  # returns when the test has ended, however it ends
        os._exit(0)
    os.close(told)
    try:
        with os.fdopen(ready) as names:
            yield json.loads(names.read())
    finally:
        os.close(go)
        os.close(wait)
        os.waitpid(child, 0)


def locked(folder: Path) -> list[tuple[str, int]]:
    """Lock every folder and file that this process can open; return their paths and descriptors."""
    held = []
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append((str(path), descriptor))
    return held


def readable(folder: Path) -> list[str]:
    """Return the files below `folder` that this process can read."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                path.open("rb").close()
                found.append(str(path))
    return found


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Return the TCP addresses on which a process and its descendants listen."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            for connection in one.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return sorted(found)


def store_keys(host: str, port: int, seconds: float = 1.0) -> int | None:
    """Return how many keys the TCPStore at an address has, or None if none answers."""
    ask_for_number = b"\x07"
    with contextlib.suppress(OSError), socket.create_connection((host, port), seconds) as client:
        client.settimeout(seconds)
        client.sendall(b"\x00" + struct.pack("<I", _MAGIC) + ask_for_number)
        answer = client.recv(8)
        if len(answer) == 8:
            return int(struct.unpack("<q", answer)[0])
    return None


def send_garbage(host: str, port: int, content: bytes, hold_seconds: float = 0.2) -> bool:
    """Send bytes to an address, keep the connection for a moment; return whether it was taken."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0) as client:
        client.sendall(content)
        time.sleep(hold_seconds)
        return True
    return False
