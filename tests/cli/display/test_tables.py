"""Tables on terminals of any width, and into a pipe: nothing of their text may be missing."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path

import pytest

from rankzero.cli.commands import probe
from rankzero.cli.display.live import Console
from rankzero.cli.display.terminal import print_table
from rankzero.cli.main import main
from rankzero.events import Evaluated
from rankzero.experiment import Goal
from rankzero.run_store.folder import RunFolder
from rankzero.tuning.options import default_storage
from rankzero.tuning.probe.grid import ProbeResult
from rankzero.tuning.study import open_study
from rankzero.tuning.verdict.confirm import CONFIRMATIONS
from support.runs import T0, append, ended, evaluated, make_folder, saved, started, steps

WIDTHS = (60, 80, 100, 200)
REASON = "a trial of 12 s cannot win: val/accuracy 0.51 at step 40, and the best had 0.93 there"


class Terminal(io.StringIO):
    """A terminal in memory."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a-run-with-quite-a-long-name-20261121-093005-3fa1c8", "b"):
        folder = make_folder(tmp_path, name=name)
        long = {"a_long_setting_of_the_user.with_a_group": "some/long/path/of/a/file-" * 5}
        append(folder, started(**(long if name != "b" else {})), steps(1, 50), evaluated(50, 0.6))
        append(folder, Evaluated(T0 + 50, 50, {"val/accuracy": 0.7, f"val/{'x' * 99}": 0.1}, True))
        append(folder, saved(folder, 50), ended(metrics={"samples_per_second": 123_456.0}))
    study = open_study(
        default_storage(tmp_path), "digits-search-ec4a15", sampler="random", pruner="none", seed=0
    )
    for number in range(12):
        facts = {"batch_size": 1024, "precision": "bf16", "lr": 0.001234, "best": 0.98123}
        facts |= {"samples_per_second": 123456.7, "reason": REASON}
        study.ask()
        study.tell(number, "COMPLETE" if number % 2 else "PRUNED", 12.5, {}, facts)
    runs = [{"trial": 1, "seed": seed, "value": 2.5, "quality": 0.9} for seed in (1, 2)]
    study.note(CONFIRMATIONS, [*runs, {"trial": 1, "seed": 3, "value": None, "quality": 0.1}])
    study.note("sentence", f"Your configuration is the fastest that {'was tried, and ' * 9}won.")
    return tmp_path


def shown(width: int, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {"COLUMNS": str(width), "LINES": "50", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(Terminal()) as terminal:
        assert main(words) == 0
    return terminal.getvalue()


def characters(text: str) -> Counter[str]:
    """Return the characters without lines, spaces and marks of Markdown."""
    boxes = "".join(map(chr, range(0x2500, 0x2580)))
    return Counter(one for one in text if one not in f"{boxes} \n|-#`*…•")


@pytest.mark.parametrize("verb", ["report study", "report run", "report two", "runs"])
def test_nothing_is_missing_at_any_width(
    verb: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a-run-with-quite-a-long-name-20261121-093005-3fa1c8"
    words = {
        "report study": ["report", "digits-search-ec4a15"],
        "report run": ["report", long],
        "report two": ["report", long, "b"],
        "runs": ["runs", "--sort", "a_long_setting_of_the_user.with_a_group"],
    }[verb]
    words += ["--dir", str(root)]
    assert main(words) == 0
    piped = capsys.readouterr().out
    if verb == "report study":
        assert f"trial   3: {REASON}" in piped.splitlines()
        assert "confirmed  trial   1: 2.5, 2.5, missed" in piped.splitlines()
    for width in WIDTHS:
        lines = shown(width, words, monkeypatch)
        assert max(map(len, lines.splitlines())) <= width
        missing = characters(piped.replace("```sh", "")) - characters(lines)
        assert not missing, (width, missing, lines)


def test_a_study_is_readable_at_80_columns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(80, ["report", "digits-search-ec4a15", "--dir", str(root)], monkeypatch)
    row = next(line for line in lines.splitlines() if "COMPLETE" in line)
    cells = " ".join(row.replace("│", " ").split())
    assert cells == "1 COMPLETE 12.5 0.9812 123,457 1024 bf16 0.001234"


def test_a_table_and_a_result_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, row = ["strategy", "a long heading"] * 4, ["[bold]ddp", "123,456 ± 12.3%"] * 4
    print_table("the same work", head, [row, row])
    assert "│".join(row) in capsys.readouterr().out, "a row is one line"
    monkeypatch.setenv("COLUMNS", "60")
    folder = RunFolder(make_folder(tmp_path).path)
    reason = "x" * 300
    with contextlib.redirect_stdout(Terminal()) as terminal:
        print_table("the same work", head, [row, row])
        Console(folder, Goal()).result(ended(reason=reason))
    text = terminal.getvalue()
    assert not characters(" ".join([*head, *row, *row, reason])) - characters(text), text


@pytest.mark.parametrize("terminal", [io.StringIO, Terminal])
def test_a_probes_map_keeps_all_numbers(
    terminal: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    names = ("bf16 [dp]", "fp16 [ddp]", "fp32 [fsdp]", "tf32 [zero1]")
    cells = [
        ProbeResult(size, size, name, "ok", 123456.0 + size, 0.0125, memory_bytes=2**34)
        for size in (1024, 2048)
        for name in names
    ]
    with contextlib.redirect_stdout(terminal()) as output:
        probe._print_map(cells, 200_000.0)
    text = output.getvalue()
    assert "…" not in text and text.count("GiB") == len(cells), text
    if terminal is io.StringIO:
        assert text.count("125,504 ± 1.2%  16.0 GiB") == len(names), text
