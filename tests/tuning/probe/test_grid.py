"""The cells that are measured, on devices with a known speed and memory."""

from __future__ import annotations

import dataclasses

import pytest

from rankzero.tuning.probe import grid
from rankzero.tuning.probe.grid import HEADROOM, Cell, ProbeResult

SIZES = (16, 32, 64, 128, 256, 512, 1024)
LIMIT = 10_000


def measure_all(
    world_size: int = 1,
    precisions: tuple[str, ...] = ("fp32",),
    full: float = 100.0,
    base: int = 1000,
    per_sample: int = 10,
    limit: int | None = LIMIT,
    dies: int | None = None,
) -> list[ProbeResult]:
    """Measure until the map is complete.

    The speed is B / (B + full), the memory base + per_sample * micro-batch.
    """
    found: list[ProbeResult] = []
    while (cell := grid.next_cell(found, SIZES, precisions, world_size)) is not None:
        known = [Cell(one.batch_size, one.micro_batch, one.precision) for one in found]
        assert cell not in known, "measured twice"
        found.append(measure(cell, full, base, per_sample, limit, dies))
    return found


def measure(
    cell: Cell, full: float, base: int, per_sample: int, limit: int | None, dies: int | None
) -> ProbeResult:
    memory = base + per_sample * cell.micro_batch
    size = (cell.batch_size, cell.micro_batch, cell.precision)
    if dies is not None and cell.batch_size >= dies:
        return ProbeResult(*size, status="failed", reason="killed")
    if limit is not None and memory > limit:
        return ProbeResult(*size, status="out of memory", memory_limit_bytes=limit)
    speed = 1000 * cell.batch_size / (cell.batch_size + full)
    return ProbeResult(
        *size,
        "ok",
        speed,
        0.01,
        cell.batch_size / speed,
        memory_bytes=memory,
        memory_limit_bytes=limit,
    )


def test_the_grid_ends_if_a_larger_batch_gains_nothing() -> None:
    found = measure_all(full=10.0)
    assert [one.batch_size for one in found] == [16, 32, 64, 128, 256, 512]  # 512 gains 2 %
    assert grid.knee(found) is not None and grid.knee(found).batch_size == 256  # type: ignore[union-attr]


def test_predicted_memory_keeps_cells_from_running_out() -> None:
    found = measure_all(per_sample=50)
    assert {one.status for one in found} == {"ok"}
    assert max(one.micro_batch for one in found) * 50 + 1000 <= HEADROOM * LIMIT
    assert [one.batch_size for one in found][-1] > 160, "a batch that does not fit is accumulated"
    assert all(one.batch_size % one.micro_batch == 0 for one in found)


def test_a_precision_runs_out_of_memory_at_most_once() -> None:
    found = measure_all(
        base=9000, per_sample=100
    )  # 16 samples do not fit, and nothing is known before
    assert [one.status for one in found].count("out of memory") == 1
    assert found[0].status == "out of memory" and all(one.micro_batch <= 8 for one in found[1:])


def test_a_cell_that_kills_its_processes_ends_its_precision_only() -> None:
    found = measure_all(precisions=("fp32", "bf16"), full=1000.0, dies=128)
    assert [one.status for one in found if one.precision == "fp32"] == ["ok", "ok", "ok", "failed"]
    assert [one.batch_size for one in found if one.precision == "bf16"] == [16, 32, 64, 128]


def test_the_micro_batch_is_one_ranks_share() -> None:
    first, second, *_ = measure_all(world_size=2, full=10.0)
    assert (first.batch_size, first.micro_batch) == (16, 8)
    assert (second.batch_size, second.micro_batch) == (32, 16)


def test_each_rank_of_a_tensor_parallel_model_has_the_whole_batch() -> None:
    cell = grid.next_cell([], SIZES, ("fp32",), 4, "tp")
    assert cell == Cell(16, 16, "fp32"), "a trial does one forward of everything"


def test_a_pipeline_measures_whole_batches_as_far_as_they_fit() -> None:
    whole = ProbeResult(16, 16, "fp32", "ok", 100.0, 0.01)
    assert grid.next_cell([whole], SIZES, ("fp32",), 4, "pp") == Cell(32, 32, "fp32")
    lost = ProbeResult(32, 32, "fp32", "out of memory", memory_limit_bytes=1)
    assert grid.next_cell([whole, lost], SIZES, ("fp32",), 4, "tp") == Cell(64, 16, "fp32")
    following = grid.next_cell([whole, lost], SIZES, ("fp32", "bf16"), 4, "pp")
    assert following == Cell(16, 16, "bf16")


@pytest.mark.parametrize(
    ("data", "gradients", "bound"),
    [(0.5, 0.3, "data"), (0.0, 0.3, "communication"), (0.05, 0.1, "compute")],
)
def test_the_bound_of_a_cell(data: float, gradients: float, bound: str) -> None:
    waits = {"data_wait_fraction": data, "communication_fraction": gradients}
    assert grid.parse({**vars(measure_all()[0]), **waits}).bound == bound


def test_a_slow_precision_is_not_worth_searching() -> None:
    slow = [ProbeResult(size, size, "bf16", "ok", 10.0) for size in (16, 32)]
    fast = [ProbeResult(size, size, "fp32", "ok", 100.0) for size in (16, 32)]
    assert grid.worth_searching([*fast, *slow], ("fp32", "bf16")) == ["fp32"]
    assert [one.precision for one in grid.fastest([*slow, *fast]).values()] == ["fp32", "fp32"]


def test_a_measurement_comes_back_from_its_file() -> None:
    one = measure_all()[0]
    assert grid.parse({**dataclasses.asdict(one), "new in a later version": 1}) == one
    old = {"batch_size": 16, "micro_batch": 16, "precision": "fp32", "status": "ok"}
    assert grid.parse(old).plan == "" and grid.parse(old).settings == {}
