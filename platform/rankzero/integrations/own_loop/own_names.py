"""The names of a program's tags, params and images in MLflow: each has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rankzero.events import ParamsLogged, RunStarted
from rankzero.integrations.own_loop.values import Tell
from rankzero.mlflow_store import limits
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all


class OwnNames:
    """The names that are taken. MLflow allows few characters: ``t:u`` and ``t(u`` are both ``t_u``.

    `kind`: such as tag. `read_earlier`: returns what earlier processes have logged, by its name in
    MLflow. `tell`: gets each rename, with a key for it.
    """

    def __init__(self, kind: str, read_earlier: Callable[[], dict[str, str]], tell: Tell) -> None:
        self._kind, self._read_earlier, self._tell = kind, read_earlier, tell
        self._keys: dict[str, str] | None = None

    def of(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the texts, those renamed that would replace another one in MLflow."""
        if self._keys is None:
            self._keys = self._read_earlier()
        found = {}
        # Legal names come first, so that they stay.
        for key in sorted(texts, key=lambda key: (limits.name(key) != key, key)):
            own, name = key, limits.name(key)
            if self._keys.setdefault(name, key) != key:
                own = limits.unique_name(key)
                self._tell(
                    f"{self._kind} {key}",
                    f"the {self._kind} {key} is {own} in MLflow, which has another {self._kind} "
                    f"{name}",
                )
            found[own] = texts[key]
        return found


def logged_params(folder: RunFolder) -> dict[str, str]:
    """Return the params that the program has logged so far, by their names in MLflow."""
    found: dict[str, str] = {}
    for event in read_all(folder.events):
        if isinstance(event, (RunStarted, ParamsLogged)):
            for key, name in limits.names(event.params).items():
                found.setdefault(name, key)
    return found
