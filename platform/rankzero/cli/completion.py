"""``rankzero completion bash|zsh|fish``: a script with which the shell completes commands.

It completes verbs, options, runs, experiment files and settings. The script calls
``rankzero completion --line TEXT`` at each press of TAB. Decision 0021 explains why no library does
it.
"""

from __future__ import annotations

import argparse
import ast
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rankzero.cli.verbs import VERBS
from rankzero.errors import UserError

# Bash takes = and : for the ends of words and completes only what follows the last one.
_BASH = r"""_rankzero() {
    local line="${COMP_LINE:0:COMP_POINT}" word behind
    mapfile -t COMPREPLY < <("${COMP_WORDS[0]/#\~/$HOME}" completion --line "$line" 2>/dev/null)
    word="${line##* }"
    behind="${word##*[=:]}"
    COMPREPLY=("${COMPREPLY[@]#"${word%"$behind"}"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
}
complete -F _rankzero rankzero
"""
_ZSH = r"""#compdef rankzero
_rankzero() {
    local -a found line
    line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    found=(${(f)"$(${words[1]/#\~/$HOME} completion --line "$line" 2>/dev/null)"})
    compadd -S '' -- ${(M)found:#*[=/]}
    compadd -- ${found:#*[=/]}
}
compdef _rankzero rankzero
"""
_FISH = r"""complete -c rankzero -f -a '(rankzero completion --line (commandline -cp) 2>/dev/null)'
"""
_BOOLEANS = ["true", "false"]
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add = parser.add_argument
    add("shell", nargs="?", choices=_SCRIPTS, metavar="SHELL", help="bash, zsh or fish")
    add("--line", help="a command line typed so far: print what may come next")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if arguments.line is not None:
        print("\n".join(candidates(arguments.line, arguments.dir)))
    elif arguments.shell is not None:
        print(_SCRIPTS[arguments.shell], end="")
    else:
        raise UserError(
            "name a shell: rankzero completion bash, zsh or fish; add "
            'eval "$(rankzero completion bash)" to the shell\'s startup file'
        )
    return 0


def candidates(line: str, root: Path) -> list[str]:
    """Return the words that may end `line`. Each begins with the line's last, incomplete word."""
    from rankzero.cli.main import parser_of

    words = line.split(" ")
    before, word = [found for found in words[:-1] if found], words[-1].lstrip("\"'")
    found: Iterable[str] = ()
    if len(before) == 1:
        found = (*VERBS, "--help", "--version")
    elif before[1:2] and before[1] in VERBS:
        root = Path(dict(itertools.pairwise(before)).get("--dir", root))
        found = _next_words(parser_of(before[1]), before[2:], word, root)
    return sorted({name for name in found if name.startswith(word)})


def _next_words(
    parser: argparse.ArgumentParser, before: Sequence[str], word: str, root: Path
) -> Iterator[str]:
    """Yield options, an option's values, or values of the positional argument whose turn it is."""
    # `_actions` is private. It is what argcomplete, shtab and sphinx-argparse read, too.
    actions = [one for one in parser._actions if one.help != argparse.SUPPRESS]
    options = {name: action for action in actions for name in action.option_strings}
    given, takes_value = [], None
    for typed in before:
        if takes_value is None and not typed.startswith("-"):
            given.append(typed)
        option = options.get(typed)
        takes_value = option if option is not None and option.nargs != 0 else None
    if takes_value is not None:
        yield from _values(takes_value, word, root)
    elif word.startswith("-"):
        yield from options
    else:
        wanted = [action for action in actions if not action.option_strings]
        if wanted and (len(given) < len(wanted) or wanted[-1].nargs in ("*", "+")):
            action = wanted[min(len(given), len(wanted) - 1)]
            if action.metavar == "key=value":
                yield from _settings(given, word, root)
            else:
                yield from _values(action, word, root)


def _values(action: argparse.Action, word: str, root: Path) -> Iterator[str]:
    if action.choices is not None:
        yield from map(str, action.choices)
    elif action.metavar == "RUN" or action.dest in ("like", "start", "study"):
        if (root / "runs").is_dir():
            names = (entry.name for entry in os.scandir(root / "runs"))
            yield from (name for name in names if not name.startswith("."))
    elif action.metavar == "FILTER":
        from rankzero.catalog.filters import COLUMNS

        yield from (f"{key}=" for key in COLUMNS)
    elif action.type is None or action.type is Path:
        yield from _files(word, ".py" if action.metavar == "EXP" else "")


def _files(word: str, suffix: str) -> Iterator[str]:
    for name in glob.iglob(glob.escape(word) + "*"):  # noqa: PTH207 - as the user has begun it
        if Path(name).is_dir():
            yield name + "/"
        elif name.endswith(suffix):
            yield name


def _settings(given: Sequence[str], word: str, root: Path) -> Iterator[str]:
    """Yield ``key=`` of every setting of the experiment named before, or the key's values."""
    from rankzero import config
    from rankzero.config import values
    from rankzero.experiment import Experiment

    known = {}
    for leaf in config.leaves(Experiment()):
        kind = values.describe_type(leaf.annotation)
        choices = kind.split(" | ") if "int" not in kind and "float" not in kind else []
        known[leaf.key] = _BOOLEANS if leaf.annotation is bool else choices if choices[1:] else []
    known |= _own_settings(_source(given[0], root)) if given else {}
    key, equals, _ = word.partition("=")
    if equals:
        yield from (f"{key}={choice}" for choice in known.get(key, ()))
    else:
        yield from (f"{name}=" for name in known)


def _source(reference: str, root: Path) -> str:
    """Return the text of an experiment's file, named by its path or by a run of it, or ""."""
    try:
        identity = root / "runs" / reference / "run.json"
        if identity.is_file():
            fields = json.loads(identity.read_text(encoding="utf-8"))
            reference = str(fields["experiment_file"] or "")
        file = reference if reference.endswith(".py") else reference.rpartition(":")[0]
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # a damaged run.json, or a file that is not text


def _own_settings(source: str) -> dict[str, list[str]]:
    """Return the settings that a file's classes declare, with their values if those are listed."""
    # No user code is executed: importing PyTorch takes longer than a press of TAB may.
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    classes = {
        node.name: {
            item.target.id: ast.unparse(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in body
        if isinstance(node, ast.ClassDef)
    }
    # A group's keys come with the class that has the group.
    groups = {kind for fields in classes.values() for kind in fields.values()}
    found: dict[str, list[str]] = {}
    for name in classes.keys() - groups:
        found |= _keys(name, classes, "")
    return {key: found[key] for key in found.keys() - {"train", "goal", "search"}}


def _keys(name: str, classes: dict[str, dict[str, str]], prefix: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for field, kind in classes[name].items():
        key = prefix + field.rstrip("_")
        if kind in classes:
            found |= _keys(kind, classes, key + ".")
        else:
            found[key] = _choices(ast.parse(kind, mode="eval").body)
    return found


def _choices(kind: ast.expr) -> list[str]:
    """Return the values of a type if it lists all of them, else nothing."""
    match kind:
        case ast.Name("bool"):
            return _BOOLEANS
        case ast.Constant(None):
            return ["none"]
        case ast.BinOp(left, _, right):
            parts = _choices(left), _choices(right)
            return [*parts[0], *parts[1]] if all(parts) else []
        case ast.Subscript(ast.Name("Literal") | ast.Attribute(attr="Literal"), listed):
            values = listed.elts if isinstance(listed, ast.Tuple) else [listed]
            return [str(one.value) for one in values if isinstance(one, ast.Constant)]
    return []
