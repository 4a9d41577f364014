"""docs/structure.md names every file of the package, and docs/guarantees.md real tests only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

PACKAGE = ROOT / "platform" / "rankzero"
STRUCTURE = (ROOT / "docs" / "structure.md").read_text()
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()
# One file for each verb, and one for each thing that MLflow stores: the page names their folder.
NAMED_BY_THEIR_FOLDER = {"cli/commands"}


def described() -> set[str]:
    """Return the files that the page's tree names, as paths below the package."""
    found = set()
    room = ""
    tree = STRUCTURE.split("## The tree")[1].split("### Outside the package")[0]
    for line in tree.splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ").split(" ")[0]
            room = title if title.endswith("/") else ""
        elif line.startswith("| `"):
            cells = line.split("|")
            names = re.findall(r"`([\w/]+\.py)`", cells[1])
            if room == "":  # the ground floor's packages name their files in the text, too
                folder = re.match(r"\| `(\w+/)`", line)
                found |= (
                    {folder.group(1) + name for name in re.findall(r"`(\w+\.py)`", cells[2])}
                    if folder
                    else set()
                )
            found |= {room + name for name in names}
    return found


def written() -> set[str]:
    """Return the package's files that hold code."""
    paths = (path for path in PACKAGE.rglob("*.py") if ast.parse(path.read_text()).body)
    files = {str(path.relative_to(PACKAGE)) for path in paths}
    return {
        name
        for name in files
        if str(Path(name).parent) not in NAMED_BY_THEIR_FOLDER
        and not name.endswith(("__init__.py", "__main__.py"))
    }


def test_the_tree_names_every_file() -> None:
    assert sorted(written() - described()) == []


def test_every_file_of_the_tree_exists() -> None:
    assert sorted(name for name in described() if not (PACKAGE / name).exists()) == []


@pytest.mark.parametrize(
    "reference", sorted(set(re.findall(r"`([\w/]*test_\w+\.py[\w:]*)`", GUARANTEES)))
)
def test_a_guarantee_names_a_test_that_exists(reference: str) -> None:
    path, *names = reference.split("::")
    tree = ast.parse((TESTS / path).read_text())
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert set(names) <= defined


@pytest.mark.parametrize("page", ["docs/guarantees.md", "CHANGELOG.md"])
def test_a_page_has_the_number_of_fault_scenarios(page: str) -> None:
    tree = ast.parse((TESTS / "torture" / "scenarios" / "__init__.py").read_text())
    [scenarios] = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    named = re.findall(r"\b(\d+) (?:fault )?scenarios", (ROOT / page).read_text())
    assert named == [str(len(scenarios.keys))]
