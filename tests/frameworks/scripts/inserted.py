"""Put lines of ours into a script of somebody else."""

from __future__ import annotations

from pathlib import Path

LINES = Path(__file__).parent / "lines"


def blocks(script: str, tracker: str) -> list[tuple[str, list[str]]]:
    """Return our lines, each block with a part of the script's line that it follows."""
    found: list[tuple[str, list[str]]] = []
    for line in (LINES / tracker / f"{script}.txt").read_text().splitlines():
        if line.startswith("@ "):
            found.append((line.removeprefix("@ "), []))
        else:
            found[-1][1].append(line)
    return found


def count(script: str, tracker: str) -> int:
    """Return how many lines of ours a script needs."""
    return sum(len(lines) for _, lines in blocks(script, tracker))


def insert(source: str, inserted: list[tuple[str, list[str]]]) -> str:
    """Return the script with our lines in it, each as deep as what it follows."""
    lines = source.splitlines()
    for after, block in inserted:
        places = [at for at, line in enumerate(lines) if line.lstrip().startswith(after)]
        assert len(places) == 1, f"{after!r} begins {len(places)} lines of the script, not one"
        there = lines[places[0]]
        opens = there.rstrip().endswith(":")
        depth = " " * (len(there) - len(there.lstrip()) + 4 * opens)
        lines[places[0] + 1 : places[0] + 1] = [depth + line for line in block]
    return "\n".join(lines) + "\n"
