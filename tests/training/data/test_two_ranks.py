"""Chosen batches and streams on two ranks: divided, resumed, refused."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from support import two_ranks
from support.paths import FIXTURES
from support.two_ranks import Case, attempted_alone

FLOWING = FIXTURES / "flowing.py"
STRATEGIES = ("ddp", "zero1", "fsdp")
CASES = [
    *(
        Case(
            f"{strategy}-{kind}{end}",
            {"train__strategy": strategy, "kind": kind},
            stop_at=stop_at,
            file=FLOWING,
        )
        for strategy in STRATEGIES
        for kind in ("lists", "saved")
        for end, stop_at in (("", None), ("-again", 3))
    ),
    Case("stream-again", {"kind": "stream"}, stop_at=3, file=FLOWING),
    Case(
        "other-layout",
        {"kind": "saved", "train__strategy": "tp"},
        stop_at=3,
        before={"train__strategy": "ddp"},
        file=FLOWING,
    ),
    Case("differing", {"kind": "differing", "train__steps": 16}, file=FLOWING),
    Case("uneven", {"train__micro_batch": 1}, file=FLOWING),
    Case("pipeline", {"train__strategy": "pp"}, file=FLOWING),
    Case("endless", {"kind": "stream", "train__steps": None}, file=FLOWING),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases in one process group, through the real launcher."""
    return two_ranks.launched(tmp_path_factory.mktemp("data"), 2, CASES)


# Some cases end with an error, which their tests expect.
seen = functools.partial(two_ranks.seen, fails=True)


@pytest.mark.parametrize("kind", ["lists", "saved"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_bit_identical(folder: Path, strategy: str, kind: str) -> None:
    straight = seen(folder, f"{strategy}-{kind}")
    again = seen(folder, f"{strategy}-{kind}-again")
    assert "error" not in straight and len(straight["losses"]) == 8
    assert again["losses"] == straight["losses"], "not bit for bit"
    assert again["evaluated"] == straight["evaluated"] and len(again["evaluated"]) == 2
    assert again["begun"][1] >= 3 and not again["notices"]
    assert straight["losses"] == pytest.approx(seen(folder, f"ddp-{kind}")["losses"], rel=1e-4)


@pytest.mark.parametrize("kind", ["lists", "saved"])
def test_resume_is_bit_identical_on_one_process(tmp_path: Path, kind: str) -> None:
    changes = {"kind": kind, "train__workers": 2, "train__micro_batch": 4}
    straight = attempted_alone(Case("one", changes, file=FLOWING), tmp_path / "one")
    again = attempted_alone(Case("two", changes, stop_at=3, file=FLOWING), tmp_path / "two")
    assert "error" not in again and len(straight["losses"]) == 8
    assert again["losses"] == straight["losses"] and again["begun"][1] >= 3


def test_a_stream_without_a_state_is_read_again_with_a_notice(folder: Path) -> None:
    again = seen(folder, "stream-again")
    assert again["trained"] == list(range(1, 9))
    (notice,) = again["notices"]
    assert "this resume is not exact" in notice and "no state_dict()" in notice
    assert notice.endswith("from its first sample again, as epoch 1")


def test_ranks_that_had_other_samples_do_not_continue_their_streams(folder: Path) -> None:
    again = seen(folder, "other-layout")
    assert "error" not in again and again["trained"] == list(range(1, 9))
    assert "there are other processes" in again["notices"][0]


def test_what_cannot_be_divided_or_has_no_end_is_refused(folder: Path) -> None:
    assert "make each length a multiple of 8" in seen(folder, "uneven")["error"]
    assert "pp takes batches of one size" in seen(folder, "pipeline")["error"]
    assert "set train.steps" in seen(folder, "endless")["error"]
    differing = seen(folder, "differing")
    assert "batches() returned other lists on rank 1" in differing["error"]
    assert next(iter(differing["evaluated"])) == "4", "the ranks differ after the first epoch"
