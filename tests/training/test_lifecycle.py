"""What an attempt writes when it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero import config
from rankzero.catalog.lookup import last_end
from rankzero.experiment_file import CODE
from rankzero.launch.request import OUT_OF_MEMORY, write_config
from rankzero.run_store.journal import Journal
from rankzero.tracking.run_log import RunLog
from rankzero.training.lifecycle import tracked
from rankzero.training.metrics.throughput import RunTotals
from support.runs import make_folder
from support.training import ALONE, tiny


@pytest.mark.parametrize("fails", [False, True])
def test_the_settings_are_kept_once_the_set_up_is_over(tmp_path: Path, fails: bool) -> None:
    """Or a plain resume after a mistaken setting would fail for ever."""
    folder = make_folder(tmp_path)
    write_config(folder, tiny(train__steps=4))
    log = RunLog(folder, Journal(folder.events), 2, None)
    with pytest.raises(KeyError), tracked(log, tiny(train__steps=8), {}, ALONE, RunTotals()) as run:
        assert config.read_file(folder.config)["train.steps"] == 4
        if not fails:
            run.start(4, 8)
        raise KeyError("in data()")
    assert config.read_file(folder.config)["train.steps"] == (4 if fails else 8)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_set_up_that_fails_with_half_the_micro_batch_names_it(
    tmp_path: Path, is_later: bool
) -> None:
    folder = make_folder(tmp_path)
    log, tags = RunLog(folder, Journal(folder.events), 2, None), {OUT_OF_MEMORY: "8 -> 4"}
    with pytest.raises(KeyError), tracked(log, tiny(), tags, ALONE, RunTotals()) as run:
        if is_later:
            run.start(0, 8)
        raise KeyError("odd")
    ended = last_end(folder)
    assert ended and ended.reason.endswith(" (after out of memory: 8 -> 4)") is not is_later


def test_a_stream_has_had_no_digest_before(tmp_path: Path) -> None:
    folder, before = make_folder(tmp_path), {"rankzero.data.training": "not computed: a stream"}
    log = RunLog(folder, Journal(folder.events), 2, None, tags_before=before)
    with tracked(log, tiny(), {}, ALONE, RunTotals()) as run:
        run.start(4, 8, tags={"rankzero.data.training": "ab"})
    assert "other data" not in folder.events.read_text()


def test_an_attempt_with_edited_code_says_so(tmp_path: Path) -> None:
    """As after a restart by torchrun or Slurm, which imports the file again."""
    folder, before = make_folder(tmp_path), {f"{CODE}exp.py": "1", f"{CODE}net.py": "1"}
    log = RunLog(folder, Journal(folder.events), 2, None, tags_before=before)
    with tracked(log, tiny(), {}, ALONE, RunTotals()) as run:
        run.start(4, 8, tags={**before, f"{CODE}net.py": "2"})
    assert "other code than in the attempt before (net.py): the" in folder.events.read_text()
