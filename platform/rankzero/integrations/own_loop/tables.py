"""Tables that a program logs, as MLflow's own `log_table` writes them."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rankzero.events import TagsSet
from rankzero.integrations.own_loop.values import Tell, plain_value, read_pairs
from rankzero.mlflow_store import limits
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read_all


def save(data: Any, columns: Sequence[str] | None, tell: Tell, path: Path, before: Path) -> None:
    """Write a table. The rows of the table at `before`, if there is one, come first.

    `data`: columns by name, rows with or without names of `columns`, or a DataFrame of pandas.
    `tell`: gets each name that several columns have. Raises ValueError for anything else.
    """
    import pandas  # It takes a second.

    if path.suffix != ".json":
        raise ValueError("the name of a table ends with .json")
    if isinstance(data, Mapping):
        data = read_pairs(data.items(), _plain, "column", tell)
        if data and not any(isinstance(column, (list, tuple)) for column in data.values()):
            data = [data]
    elif not isinstance(data, pandas.DataFrame):
        data = _plain(data)
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"a table has columns, rows or a DataFrame, not {data!r:.80}")
    names: Any = None if columns is None else list(columns)
    # As objects, integers stay integers next to a missing value.
    frame = functools.partial(pandas.DataFrame, dtype=object)
    parts = [frame(data, columns=names)]
    if before.exists():
        try:
            earlier = json.loads(before.read_text(encoding="utf-8"))
            parts.insert(0, frame(earlier["data"], columns=earlier["columns"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError("a file that is no table has this name") from error
    pandas.concat(parts, ignore_index=True).to_json(
        path,
        orient="split",
        index=False,
        date_format="iso",
        default_handler=plain_value,
        double_precision=15,  # MLflow's call keeps ten digits.
    )


class ListedTables:
    """The tables that MLflow's page lists. `tell` gets what is odd, with a key for it."""

    def __init__(self, folder: RunFolder, tell: Tell) -> None:
        self._folder, self._tell = folder, tell
        self._known: list[dict[str, str]] | None = None

    def add(self, path: str) -> TagsSet | None:
        """Return the event that lists the table, or None if it is listed or there is no room."""
        if self._known is None:  # An earlier attempt may have logged some.
            known = None
            with contextlib.suppress(ValueError):  # An earlier version let programs set the tag.
                known = json.loads(_logged_tags(self._folder).get(limits.TABLES_TAG, "[]"))
            self._known = known if isinstance(known, list) else []
        entry = {"path": path, "type": "table"}
        if entry in self._known:
            return None
        value = json.dumps([*self._known, entry])
        # MLflow would cut it, and read nothing of it.
        if len(value) > limits.TAG_LENGTH:
            most = len(self._known)
            self._tell("tables", f"MLflow's page lists {most} tables of this run, others as files")
            return None
        self._known.append(entry)
        return TagsSet(time.time(), {limits.TABLES_TAG: value})


def _logged_tags(folder: RunFolder) -> dict[str, str]:
    """Return the tags that the program has set in this attempt and earlier ones."""
    events = (event for event in read_all(folder.events) if isinstance(event, TagsSet))
    return {tag: text for event in events for tag, text in event.tags.items()}


def tags_by_name(folder: RunFolder) -> dict[str, str]:
    """Return the tags that the program has set so far, by their names in MLflow."""
    return {limits.name(tag): tag for tag in _logged_tags(folder)}


def _plain(values: Any) -> Any:
    """Return a tensor, an array or one of their numbers as Python's own, and a generator's list."""
    if hasattr(values, "tolist"):
        return values.tolist()
    is_list = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set))
    return list(values) if is_list else values
