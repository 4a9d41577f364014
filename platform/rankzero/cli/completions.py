"""What may come next on a command line: verbs, options, runs, experiments' files, settings. Executes no user's code.

An experiment's own settings are read off its source, so that a press of TAB takes a moment.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankzero.cli.main import parser_of
from rankzero.cli.verbs import VERBS

EXPERIMENT, SETTING, RUN, FILTER = "EXP", "key=value", "RUN", "FILTER"


def candidates(line: str, root: Path) -> list[str]:
    """Return the words that may stand where `line` ends: whole words, of which the last one typed is the beginning."""
    words = line.split(" ")
    before, word = [found for found in words[:-1] if found], words[-1].lstrip("\"'")
    if len(before) < 2:
        found: Iterator[str] = iter((*VERBS, "--help", "--version")) if before else iter(())
    elif before[1] not in VERBS:
        return []
    else:
        named = dict(itertools.pairwise(before)).get("--dir")
        found = _after(parser_of(before[1]), before[2:], word, Path(named) if named else root)
    return sorted({name for name in found if name.startswith(word)})


def _after(
    parser: argparse.ArgumentParser, before: Sequence[str], word: str, root: Path
) -> Iterator[str]:
    options = {name: action for action in parser._actions for name in action.option_strings}
    waiting = options.get(before[-1]) if before else None
    if waiting is not None and waiting.nargs != 0:
        yield from _values(waiting, word, root)
        return
    if word.startswith("-"):
        yield from options
        return
    given = list(_positionals(before, options))
    wanted = [action for action in parser._actions if not action.option_strings]
    if wanted and (len(given) < len(wanted) or wanted[-1].nargs in ("*", "+")):
        action = wanted[min(len(given), len(wanted) - 1)]
        yield from (
            _settings(given, word, root)
            if action.metavar == SETTING
            else _values(action, word, root)
        )


def _positionals(words: Sequence[str], options: dict[str, argparse.Action]) -> Iterator[str]:
    skip = False
    for word in words:
        if not skip and not word.startswith("-"):
            yield word
        skip = word in options and options[word].nargs != 0


def _values(action: argparse.Action, word: str, root: Path) -> Iterator[str]:
    if action.choices is not None:
        yield from map(str, action.choices)
    elif action.metavar == RUN or action.dest in ("start", "study"):
        yield from _runs(root)
    elif action.metavar == FILTER:
        from rankzero.catalog.filters import COLUMNS

        yield from (f"{key}=" for key in COLUMNS)
    elif action.type is None or action.type is Path:
        yield from _files(word, ".py" if action.metavar == EXPERIMENT else "")


def _runs(root: Path) -> Iterator[str]:
    if (root / "runs").is_dir():
        yield from (
            path.name for path in os.scandir(root / "runs") if not path.name.startswith(".")
        )


def _files(word: str, suffix: str) -> Iterator[str]:
    folder, _, name = word.rpartition("/")
    base = Path(folder or ("/" if word.startswith("/") else "."))
    if not base.is_dir():
        return
    for path in base.iterdir():
        if path.name.startswith(".") and not name.startswith("."):
            continue
        shown = f"{folder}/{path.name}" if "/" in word else path.name
        if path.is_dir():
            yield shown + "/"
        elif path.name.endswith(suffix):
            yield shown


def _settings(given: Sequence[str], word: str, root: Path) -> Iterator[str]:
    """Yield ``key=`` of every setting of the experiment that is named before, or what may follow it."""
    from rankzero import config
    from rankzero.experiment import Experiment

    known = {leaf.key: _choices(leaf.annotation) for leaf in config.leaves(Experiment())}
    known |= own_settings(_source(given[0], root)) if given else {}
    key, equals, _ = word.partition("=")
    if not equals:
        yield from (f"{name}=" for name in known)
    yield from (f"{key}={choice}" for choice in known.get(key, ()) if equals)


def _source(reference: str, root: Path) -> str:
    """Return the text of an experiment's file, named itself or by a run of it; empty where there is none."""
    try:
        identity = root / "runs" / reference / "run.json"
        if identity.is_file():
            reference = str(
                json.loads(identity.read_text(encoding="utf-8"))["experiment_file"] or ""
            )
        file = reference if reference.endswith(".py") else reference.rpartition(":")[0]
        return Path(file).read_text(encoding="utf-8-sig")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # a file that is none of ours
        return ""


def own_settings(source: str) -> dict[str, list[str]]:
    """Return the settings that the classes of a file declare, and what their values may be, where that is a list."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    groups = {
        name for node in classes.values() for name, kind in _fields(node).items() if kind in classes
    }
    kinds = {kind for node in classes.values() for kind in _fields(node).values()}
    found: dict[str, list[str]] = {}
    for name, node in classes.items():
        if (
            name not in kinds
        ):  # of those that are groups, the keys come with the class that has them
            found |= _keys(node, classes, "")
    return {
        key: values
        for key, values in found.items()
        if key not in (*groups, "train", "goal", "search")
    }


def _keys(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], prefix: str
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, kind in _fields(node).items():
        key = prefix + name.rstrip("_")
        if kind in classes:
            found |= _keys(classes[kind], classes, key + ".")
        else:
            found[key] = _spelled(kind)
    return found


def _fields(node: ast.ClassDef) -> dict[str, str]:
    declared = (
        item
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )
    return {
        item.target.id: ast.unparse(item.annotation)
        for item in declared
        if isinstance(item.target, ast.Name)
    }


def _spelled(kind: str) -> list[str]:
    """Return the values of a type as the source spells it."""
    if kind == "bool":
        return ["true", "false"]
    if kind.startswith("Literal["):
        inner = ast.literal_eval(f"({kind.removeprefix('Literal[').removesuffix(']')},)")
        return [str(value) for value in inner]
    return []


def _choices(annotation: object) -> list[str]:
    from rankzero.config import values as setting

    if annotation is bool:
        return ["true", "false"]
    said = setting.describe_type(annotation)
    return said.split(" | ") if " | " in said and "int" not in said and "float" not in said else []
