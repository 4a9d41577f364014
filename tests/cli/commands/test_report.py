"""`rankzero report` on studies, and the command that names it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rankzero.cli.commands.search import report_command
from rankzero.cli.main import main
from rankzero.tuning.study import open_study
from rankzero.tuning.verdict.confirm import CONFIRMATIONS, DISTURBED
from support.runs import append, make_folder, started


def test_a_study_that_has_no_trials_here_is_shown_as_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, name="s")
    append(folder, started(**{"search.sampler": "tpe"}))
    folder.description.write_text("**The sweet spot reaches it.**\n")
    for storage in ("missing", "another"):
        assert main(["report", "s", "--dir", str(tmp_path)]) == 0, storage
        assert "The sweet spot reaches it." in capsys.readouterr().out
        # A database without this study.
        (tmp_path / "studies.db").touch()
    assert main(["report", "s", "--dir", str(tmp_path), "--storage", f"sqlite:///{tmp_path}/x"])


def test_a_report_leaves_out_rounds_that_were_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 's.db'}"
    study = open_study(url, "s", sampler="tpe", pruner="none", seed=0)
    runs = ((1000, 1.5), (1001, 77.0), (1006, 2.5))
    study.note(
        CONFIRMATIONS,
        [{"trial": 0, "seed": seed, "value": value, "quality": 1.0} for seed, value in runs],
    )
    study.note(DISTURBED, [1001])
    assert main(["report", "s", "--dir", str(tmp_path), "--storage", url]) == 0
    shown = capsys.readouterr().out
    assert "confirmed  trial   0: 1.5, 2.5" in shown and "77" not in shown


def test_the_command_that_shows_a_study_names_its_storage(tmp_path: Path) -> None:
    assert report_command(tmp_path, "s", None).endswith(f"report s --dir {tmp_path}")
    found = report_command(tmp_path, "s", "postgresql://me:secret@db/studies")
    assert "report s --storage" in found and "secret" not in found


def test_long_commands_do_not_widen_the_table_of_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        tags = {"rankzero.command": f"rankzero train x.py note={name * 300}"}
        append(make_folder(tmp_path, name=name), dataclasses.replace(started(), environment=tags))
    assert main(["report", "a", "b", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["b:", f"rankzero train x.py note={'b' * 300}"]
    assert max(map(len, lines)) < 400
