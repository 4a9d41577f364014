"""Disjoint shares of a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.errors import UserError
from rankzero.tuning.trials.resources import shares


@given(st.integers(2, 8), st.integers(1, 4), st.integers(0, 32), st.integers(1, 64))
def test_shares_are_disjoint_or_refused(
    parallel: int, processes: int, gpus: int, cores: int
) -> None:
    names = [str(number) for number in range(gpus)]
    try:
        found = shares(parallel, processes, gpus, range(cores), {})
    except UserError as error:
        assert (gpus and parallel * processes > gpus) or parallel > cores, error
        return
    used = [name for share in found for name in share.gpus or ()]
    busy = [core for share in found for core in share.cores or ()]
    assert len(found) == parallel and len(set(used)) == len(used) and len(set(busy)) == len(busy)
    assert set(used) <= set(names) and set(busy) <= set(range(cores))
    assert all(share.cores for share in found)
    assert all(
        share.gpus is None if not gpus else len(share.gpus or ()) == processes for share in found
    )


@pytest.mark.parametrize(
    ("gpus", "visible", "names"),
    [
        (2, None, [("0",), ("1",)]),
        (2, "3, GPU-ab", [("3",), ("GPU-ab",)]),
        (1, "MIG-a,MIG-b", [("MIG-a",), ("MIG-b",)]),
        (0, "", [None, None]),
    ],
)
def test_gpus_have_the_names_of_cuda_visible_devices(
    gpus: int, visible: str | None, names: list[tuple[str, ...] | None]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [share.gpus for share in shares(2, 1, gpus, range(2), environ)] == names


def test_the_error_for_too_few_gpus_has_a_remedy() -> None:
    with pytest.raises(UserError, match=r"needs 8 GPUs, and there are 4: give --nproc 2"):
        shares(2, 4, 4, range(16), {})
