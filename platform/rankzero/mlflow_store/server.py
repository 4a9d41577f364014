"""MLflow's server on the embedded store: who may reach it, who may get in. Imports no mlflow.

On loopback it asks nobody who they are. Beyond, MLflow's basic-auth app does; its users are in ``mlruns/auth.db``.
Names in a request that are not this machine's are refused (DNS rebinding), and so is what other sites' pages send.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rankzero.errors import UserError
from rankzero.mlflow_store.uris import server_command

LOOPBACK = "127.0.0.1"
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 - what people write; nothing is bound to it unasked
USERS, SETTINGS = "auth.db", "auth.ini"
USER, PASSWORD = "MLFLOW_AUTH_ADMIN_USERNAME", "MLFLOW_AUTH_ADMIN_PASSWORD"
LEAST_PASSWORD = 12  # characters, MLflow's own rule


class Access(NamedTuple):
    """Who may reach a server: where it listens, the names and origins in requests, whether to ask who it is."""

    port: int
    host: str = LOOPBACK
    names: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    authenticated: bool = False

    @property
    def address(self) -> str:
        """Where this machine finds it."""
        return f"http://{_bracketed(LOOPBACK if self.host in ANYWHERE else self.host)}:{self.port}"


def access(
    host: str, port: int, *, insecure: bool, names: Sequence[str], origins: Sequence[str]
) -> Access:
    """Return who may reach a server on `host`: authenticated beyond loopback, unless `insecure`. Raises UserError.

    `names`: what else people call this machine; `origins`: other sites whose pages may use the server.
    """
    if any("*" in word for word in (*names, *origins)):
        raise UserError(
            "--allowed-hosts and --cors-origins take names, no patterns: a * would let others in"
        )
    here = _any_port(("localhost", LOOPBACK))
    if is_loopback(host):
        return Access(port, host, (*here, *_any_port((host,)), *names), tuple(origins))
    own = _own_names(host)
    own_pages = [f"http://{_bracketed(name)}:{port}" for name in own] + [
        f"http://{name}" for name in names
    ]
    called = (*here, *(names or _any_port(own)))
    return Access(port, host, called, (*own_pages, *origins), not insecure)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address. Raises UserError for what is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host!r} is no address of this machine: {error}") from error
    return all(ipaddress.ip_address(str(address)).is_loopback for address in found)


def command(root: Path, who: Access) -> list[str]:
    """Return the command that serves the embedded store of `root`, artifacts included, to whom `who` says."""
    return [
        *server_command(root, who.port, who.host),
        *("--allowed-hosts", ",".join(who.names)),
        *(("--cors-allowed-origins", ",".join(who.origins)) if who.origins else ()),
        *(("--app-name", "basic-auth") if who.authenticated else ()),
    ]


def with_users(root: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the environment for a server that asks who it is, and what to tell whoever starts it.

    The first start makes the administrator, with the password in $MLFLOW_AUTH_ADMIN_PASSWORD or a new one, which is
    told once and kept nowhere. Raises UserError for a password that MLflow would refuse.
    """
    user, users = environ.get(USER) or "admin", root.absolute() / USERS
    settings, uri = root.absolute() / SETTINGS, f"sqlite:///{users}".replace("%", "%%")
    _write_private(
        settings,
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {uri}\nadmin_username = {user.replace('%', '%%')}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n",
    )
    added = {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
    }
    if users.exists() and users.stat().st_size:
        return {
            **environ,
            **added,
        }, f"users: those in {users}; forgotten the password? Remove the file and start again"
    password = environ.get(PASSWORD) or secrets.token_urlsafe(15)
    if len(password) < LEAST_PASSWORD:
        raise UserError(f"${PASSWORD} must have at least {LEAST_PASSWORD} characters")
    _write_private(users, "")
    told = (
        f"the password in ${PASSWORD}"
        if environ.get(PASSWORD)
        else f"password {password} (told once: write it down)"
    )
    return {**environ, **added, USER: user, PASSWORD: password}, f"user {user}, {told}"


def _own_names(host: str) -> list[str]:
    """Return what others call this machine: the address, or of all addresses those that there are, and its names."""
    if host not in ANYWHERE:
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
    """Return each name with any port, as a tunnel may lead through another: MLflow compares a request's name whole."""
    return [
        word for name in dict.fromkeys(names) for word in (_pattern(name), f"{_pattern(name)}:*")
    ]


def _pattern(name: str) -> str:
    return (
        f"[[]{name}]" if ":" in name else name
    )  # a bracket begins a set of characters in a pattern


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
