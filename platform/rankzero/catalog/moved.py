"""Whether the embedded store was moved or copied: MLflow keeps absolute paths. Decision 0044."""

from __future__ import annotations

import contextlib
import urllib.parse
from pathlib import Path

from rankzero.catalog import command_lines, deleted

ARTIFACTS = "artifacts"


def former_places(root: Path) -> set[Path]:
    """Return the folders in which MLflow seeks the artifacts that are in `root`."""
    found = set()
    for place in deleted.artifact_folders(root / "runs"):
        path = local(place)
        # An experiment that mlflow itself made has a folder with its number in the store.
        is_ours = path.parent.name == ARTIFACTS
        store = path.parent.parent if is_ours else path.parent
        # A user may have chosen a folder elsewhere for an experiment. Then it is not here.
        is_here = (is_ours or path.name.isdecimal()) and (root / path.relative_to(store)).is_dir()
        if path.is_absolute() and is_here and not same(store, root):
            found.add(store)
    return found


def local(place: str) -> Path:
    """Return the path of a place that MLflow has as a path or as a file's URI."""
    is_uri = place.startswith("file:")
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(place).path) if is_uri else place)


def same(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same folder, as one with a link does."""
    with contextlib.suppress(OSError):
        return one.samefile(other)
    return False


def note(root: Path) -> str | None:
    """Return what to do about a store that was moved or copied, or None if it was not."""
    places = sorted(map(str, former_places(root)))
    if not places:
        return None
    return (
        f"{root} was moved or copied from {', '.join(places)}, where MLflow still seeks and writes "
        f"its artifacts: {command_lines.line(root, 'relocate')}"
    )
