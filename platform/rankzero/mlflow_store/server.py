"""MLflow's server on the embedded store: who may reach it, and who may log in. Imports no mlflow.

On loopback, everybody may. Beyond, MLflow's basic-auth app asks for a password; its users are in
``mlruns/auth.db``. The server refuses requests for names that are not this machine's (DNS
rebinding), and requests from pages of other sites.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rankzero.errors import UserError
from rankzero.mlflow_store.uris import artifact_root, default_tracking_uri
from rankzero.run_store import lock_files
from rankzero.run_store.folder import write_atomically
from rankzero.run_store.location import make_root

LOOPBACK = "127.0.0.1"
_ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - the server listens there only if a user says so
_USERS, _SETTINGS, _SERVING = "auth.db", "auth.ini", ".ui.lock"
_USER, PASSWORD = "MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD"
_FIXED = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
_POOL_CLASS = "MLFLOW_SQLALCHEMYSTORE_POOLCLASS"
_POOL = {
    # MLflow works on 40 requests at once, and log-batch holds one connection while it waits for
    # another. With its default of 15 in all, 15 requests lock the server for 30 seconds.
    "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "10",
    "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "35",
}
# Characters of a password, MLflow's own rule.
_MIN_PASSWORD = 12


def has_screen() -> bool:
    """Return whether a browser of this machine would have a window in front of the user."""
    screens = {"DISPLAY", "WAYLAND_DISPLAY"}.intersection(os.environ)
    return bool(sys.platform == "darwin" or screens) and "SSH_CONNECTION" not in os.environ


class Access(NamedTuple):
    """The people and sites that may reach a server.

    `names`, `origins`: the names of the server and the sites that it accepts in requests.
    """

    port: int
    host: str = LOOPBACK
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    authenticated: bool = False

    @property
    def address(self) -> str:
        """The server's address on this machine."""
        # A server on :: has no IPv4 address.
        here = {"::": "::1"}.get(self.host, LOOPBACK if self.host in _ANYWHERE else self.host)
        return f"http://{_bracketed(here)}:{self.port}"


def access(
    host: str, port: int, *, insecure: bool, names: Sequence[str], origins: Sequence[str]
) -> Access:
    """Return who may reach a server on `host`: beyond loopback with a password unless `insecure`.

    `names`: further names of this machine. `origins`: other sites whose pages may use the server.
    Raises UserError for a pattern or a host that is no address.
    """
    if any("*" in word for word in (*names, *origins)):
        raise UserError(
            "--allowed-hosts and --cors-origins accept names, no patterns: a * would let others in"
        )
    here = _any_port(("localhost", LOOPBACK))
    if is_loopback(host):
        return Access(port, host, (*here, *_any_port((host,)), *names), tuple(origins))
    own = _own_names(host)
    own_pages = [f"http://{_bracketed(name)}:{port}" for name in own]
    own_pages += [f"http://{name}" for name in names]
    accepted = (*here, *(names or _any_port(own)))
    return Access(port, host, accepted, (*own_pages, *origins), not insecure)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address. Raises UserError if it is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r} is no address of this machine: {error}") from error
    return all(ipaddress.ip_address(str(address)).is_loopback for address in found)


def command(root: Path, access: Access) -> list[str]:
    """Return the command that serves the embedded store of `root` with its artifacts."""
    uri = default_tracking_uri(root)
    artifacts = artifact_root(uri) or ""
    return [
        *(sys.executable, "-P", "-m", "mlflow", "server", "--backend-store-uri", uri),
        *("--default-artifact-root", artifacts, "--artifacts-destination", artifacts),
        *("--host", access.host, "--port", str(access.port), "--workers", "1"),
        *(("--allowed-hosts", ",".join(access.names)) if access.names else ()),
        *(("--cors-allowed-origins", ",".join(access.origins)) if access.origins else ()),
        *(("--app-name", "basic-auth") if access.authenticated else ()),
    ]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `command`: no telemetry, no job processes, enough connections."""
    # Other classes of pools have no sizes, and MLflow would not start.
    return {**_FIXED, **({} if environ.get(_POOL_CLASS) else _POOL), **environ}


def with_users(root: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the environment of a server that asks for a password, and a note for its user.

    The first start creates the administrator. The password is $MLFLOW_AUTH_ADMIN_PASSWORD or a
    random one, which the note shows once. Raises UserError if MLflow would refuse the password.
    """
    user, users = environ.get(_USER) or "admin", root.absolute() / _USERS
    settings, uri = root.absolute() / _SETTINGS, f"sqlite:///{users}".replace("%", "%%")
    make_root(root)
    write_atomically(
        settings,
        "[mlflow]\n"
        "default_permission = READ\n"
        f"database_uri = {uri}\n"
        f"admin_username = {user.replace('%', '%%')}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n",
        private=True,
    )
    added = {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
    }
    if users.exists() and users.stat().st_size:
        note = (
            f"users: those in {users}; to reset a forgotten password, delete the file and restart"
        )
        return {**environ, **added}, note
    given = environ.get(PASSWORD)
    password = given or secrets.token_urlsafe(15)
    if len(password) < _MIN_PASSWORD:
        raise UserError(f"${PASSWORD} must have at least {_MIN_PASSWORD} characters")
    write_atomically(users, "", private=True)
    shown = f"the password in ${PASSWORD}"
    if not given:
        shown = f"password {password} (shown once: write it down)"
    return {**environ, **added, _USER: user, PASSWORD: password}, f"user {user}, {shown}"


@contextlib.contextmanager
def shared(root: Path) -> Iterator[int]:
    """Hold off `exclusive` from other processes; yield a descriptor for the server to inherit."""
    descriptor = lock_files.open_lock(root / _SERVING)
    try:
        if not lock_files.try_lock(descriptor, fcntl.LOCK_SH):
            raise UserError(f"`rankzero relocate` works on {root}: wait for its end")
        yield descriptor
    finally:
        os.close(descriptor)


def exclusive(root: Path) -> contextlib.AbstractContextManager[bool]:
    """Keep servers from starting on a store; yield whether none serves it now."""
    # Another `rankzero relocate` holds it for moments.
    return lock_files.lock(root / _SERVING, seconds=3.0)


def _own_names(host: str) -> list[str]:
    """Return what others call this machine: the address, or all of its names and addresses."""
    if host not in _ANYWHERE:
        return [host]
    import psutil

    addresses = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return list(dict.fromkeys([socket.gethostname(), socket.getfqdn(), *addresses]))


def _any_port(names: Sequence[str]) -> list[str]:
    # MLflow compares a request's name with its port. A tunnel may lead through another port.
    # In a pattern, a bracket begins a set of characters.
    patterns = (f"[[]{name}]" if ":" in name else name for name in dict.fromkeys(names))
    return [word for pattern in patterns for word in (pattern, f"{pattern}:*")]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
