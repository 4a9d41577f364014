"""``rankzero init FILE [--template T]``: write an experiment that trains at once."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
import sys
from pathlib import Path

from rankzero.catalog import command_lines
from rankzero.cli import templates
from rankzero.errors import UserError

TEMPLATES = ("vision", "text", "tabular", "lightning")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the new file: my_experiment.py")
    kind = "the data that it begins with: %(choices)s (default: %(default)s)"
    parser.add_argument(
        "--template", choices=TEMPLATES, default=TEMPLATES[0], metavar="NAME", help=kind
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    path: Path = arguments.file
    if path.suffix != ".py":
        raise UserError(f"{path} is no Python file: write {path.stem or 'my_experiment'}.py")
    # The folder of an experiment is where its imports are looked for first.
    is_taken = path.stem in sys.modules or (
        path.stem.isidentifier() and importlib.util.find_spec(path.stem) is not None
    )
    if is_taken and not path.exists():
        raise UserError(f"{path} would hide the module {path.stem!r} from imports: choose another")
    text = _text(arguments.template, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"{error.filename} exists already: choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    _print_next(arguments)
    return 0


def _text(template: str, path: Path) -> str:
    """Return the text of a template for the file `path`, with a class of the file's name."""
    source = Path(templates.__path__[0]) / f"{template}.py"
    text = source.read_text(encoding="utf-8")
    name = "".join(word.capitalize() for word in re.findall(r"[A-Za-z0-9]+", path.stem))
    head = f"class {template.capitalize()}("
    is_legal = name.isidentifier() and not keyword.iskeyword(name)
    if not is_legal or re.search(rf"\b{name}\b", text.replace(head, "")):
        name = f"My{name}"
    # With spaces, because the text may import from lightning.pytorch.
    file = path.name if path.is_absolute() else str(path)
    text = text.replace(f" {source.name} ", f" {shlex.quote(file)} ")
    return text.replace(head, f"class {name}(")


def _print_next(arguments: argparse.Namespace) -> None:
    is_module = arguments.template == "lightning"
    content = "a LightningModule" if is_module else f"an experiment on {arguments.template} data"
    print(f"{arguments.file}: {content}, to be changed into yours")
    if is_module and importlib.util.find_spec("lightning") is None:
        print("needs:  pip install 'rankzero[lightning]'")
    print(f"train:  {command_lines.line(arguments.dir, 'train', str(arguments.file))}")
    print(f"look:   {command_lines.line(arguments.dir, 'ui')}")
