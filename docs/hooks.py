"""MkDocs hooks: generate the reference pages, and replace links that leave the site.

The references come from the config classes and the argument parsers, the benchmarks from their own
folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from rankzero import Goal, Train
from rankzero.cli import main
from rankzero.config import leaves
from rankzero.config.descriptions import descriptions
from rankzero.config.values import describe_type, render

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!\w+\.md|decisions|reference)[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "reference/settings.md", content=settings()))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    files.append(File.generated(config, "benchmarks.md", content=benchmarks()))
    for path in (BENCHMARKS / "results").glob("*.png"):
        files.append(File.generated(config, f"images/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files that the site does not have by their text. Rank pages for the search.

    Guides answer what people type, so the reasons and the internals come after them.
    """
    markdown = markdown.replace("](../benchmarks/README.md", "](benchmarks.md")
    if page.file.src_uri.startswith(("decisions/", "guarantees", "structure", "benchmarks")):
        page.meta["search"] = {"boost": 0.2}
    return (
        markdown if page.file.src_uri.startswith("decisions/") else OUTSIDE.sub(r"`\1`", markdown)
    )


def benchmarks() -> str:
    """Return the measurements as they are next to their scripts, with this site's links."""
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8").replace("](../docs/", "](")
    return re.sub(r"\[([^\]]+)\]\(results/\w+\.md\)", r"`\1`", text).replace(
        "](results/", "](images/"
    )


def settings() -> str:
    """Return the page of all settings, from the classes that define them."""
    parts = [
        "# Settings\n",
        "Every field is a key on the command line and a param in MLflow: "
        "`rankzero train EXP train.batch_size=512`.",
        "`rankzero config EXP` shows an experiment's own as well.\n",
    ]
    for prefix, cls in (("train", Train), ("goal", Goal)):
        parts += [
            f"## {prefix}\n",
            "| key | type | default | |",
            "|---|---|---|---|",
            *_rows(prefix, cls),
            "",
        ]
    parts += [
        "## The experiment's own\n",
        "`lr` (float, default 0.001), and the fields of the class.\n",
    ]
    return "\n".join(parts)


def _rows(prefix: str, cls: type[Any]) -> Iterator[str]:
    defaults = cls()
    texts = descriptions(defaults)
    for leaf in leaves(defaults):
        text = texts.get(leaf.key, "").replace("|", "\\|")
        kind, default = describe_type(leaf.annotation).replace("|", "\\|"), render(leaf.value)
        yield f"| `{prefix}.{leaf.key}` | {kind} | `{default}` | {text} |"


def commands() -> str:
    """Return the page of all commands, from the parser."""
    parts = ["# Commands\n"]
    for verb, known in main.VERBS.items():
        text = main.parser_of(verb).format_help()
        parts += [
            f"## rankzero {verb}\n",
            f"{known.summary.capitalize()}.\n",
            f"```text\n{text}```\n",
        ]
    return "\n".join(parts)
