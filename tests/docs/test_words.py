"""Words that readers stumble over stay out of docs, docstrings and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

RETIRED = re.compile(
    r"\b(told|tells?|telling|whoever|beside|amid|anew|go(es)? on|went on|ow(ed|es)|obituary|hunt"
    r"|quest|crew|afterword|none of ours|is none that|retold)\b",
    re.IGNORECASE,
)
# A clause or an attribute in the place of the subject. A question is none.
NO_SUBJECT = re.compile(
    r"(?:\A|[.:;!?]\s+|\n\s*\n\s*|\n\s*[-*]\s+|\|\s*)(?:Of|What|Where|Who)(?:ever)?\b[^.?!|]*\."
)
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
MODULES = sorted(ROOT.glob("platform/rankzero/**/*.py"))
CODE = re.compile(r"```.*?```|`[^`]*`|\*[a-z ]+\*", re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without code, names of tests and names of fault scenarios."""
    return CODE.sub("", page.read_text())


def texts(module: Path) -> Iterator[tuple[int, str]]:
    """Yield a module's docstrings and messages: strings of more than one word."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, CODE.sub("", node.value)


def comments(module: Path) -> Iterator[tuple[int, str]]:
    """Yield a module's comments. Lines below each other are one."""
    found: list[tuple[int, str]] = []
    last = 0
    for number, line in enumerate(module.read_text().splitlines(), 1):
        text = line.strip()
        if text.startswith("# "):
            before = found.pop()[1] + " " if found and last == number - 1 else ""
            found.append((number, before + text.removeprefix("# ")))
            last = number
    yield from ((line, CODE.sub("", text)) for line, text in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_no_retired_word(page: Path) -> None:
    assert [found.group() for found in RETIRED.finditer(prose(page))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_of_a_page_begins_with_its_subject(page: Path) -> None:
    assert [found.group() for found in NO_SUBJECT.finditer(prose(page))] == []


def test_docstrings_and_messages_use_no_retired_word() -> None:
    found = [
        f"{module.relative_to(ROOT)}:{line}: {match.group()}"
        for module in MODULES
        for line, text in texts(module)
        for match in RETIRED.finditer(text)
    ]
    assert found == []


def test_a_sentence_of_the_code_begins_with_its_subject() -> None:
    found = [
        f"{module.relative_to(ROOT)}:{line}: {match.group()}"
        for module in MODULES
        for line, text in (*texts(module), *comments(module))
        for match in NO_SUBJECT.finditer(text)
    ]
    assert found == []


def test_the_check_finds_a_retired_word() -> None:
    assert RETIRED.search("The courier is told twice.")
    assert not RETIRED.search("The recorder retries the request.")


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("What a run has. More.", True),
        ("The run ends. Of two ranks, one\nstays.", True),
        ("Steps.\n\n- Where it is set, it counts.", True),
        ("| key | Whoever reads it. |", True),
        ("| What is a run? | A training. |", False),
        ("It shows what a run has.", False),
        ("Whole batches only.", False),
    ],
)
def test_the_check_finds_a_sentence_without_a_subject(text: str, is_found: bool) -> None:
    assert bool(NO_SUBJECT.search(text)) == is_found
