"""This process's rank, from each launcher's environment variables."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankzero.ranks import Ranks, default_count, detect


def tf_config(kind: str, index: int) -> str:
    cluster = {"ps": ["d"], "worker": ["b", "c"], "chief": ["a"]}
    found = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return json.dumps(found, separators=(",", ":"))


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ("", Ranks()),
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1", Ranks(5, 8, 1, 4, 1)),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_RANK=1", Ranks(3, 4, 1, 2, 1)),
        (
            "HOROVOD_RANK=1 HOROVOD_SIZE=2 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2",
            Ranks(1, 2, 1, 2, 0),
        ),
        ("OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", Ranks(3, 4, 0, 1, 3)),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1",
            Ranks(3, 4, 1, 2, 1),
        ),
        ("PMI_RANK=5 PMI_SIZE=6 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=3", Ranks(5, 6, 2, 3, 1)),
        ("SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_NODEID=1 SLURM_STEP_ID=0", Ranks(2, 4, 0, 1, 1)),
        (
            "SLURM_PROCID=6 SLURM_NTASKS=8 SLURM_NODEID=2 SLURM_LOCALID=1 SLURM_STEP_ID=0 "
            "SLURM_STEP_TASKS_PER_NODE=3(x2),2 SLURM_NTASKS_PER_NODE=4",
            Ranks(6, 8, 1, 2, 2),
        ),
        ("SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_STEP_ID=0 RANK=0 WORLD_SIZE=1", Ranks()),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", Ranks()),
        (
            "RAY_RAYLET_PID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 PMI_RANK=1 PMI_SIZE=2",
            Ranks(),
        ),
        (
            "RAY_RAYLET_PID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 RANK=2 WORLD_SIZE=3",
            Ranks(2, 3),
        ),
        ("RANK=x WORLD_SIZE=2", Ranks()),
        ("RANK=-1 WORLD_SIZE=-1", Ranks()),
        ("RANK=2 WORLD_SIZE=2", Ranks()),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", Ranks(1, 2, 1, 1, 0)),
        (f"TF_CONFIG={tf_config('worker', 1)}", Ranks(2, 4, 0, 1, 2)),
        (f"TF_CONFIG={tf_config('ps', 0)}", Ranks(3, 4, 0, 1, 3)),
        (f"TF_CONFIG={tf_config('evaluator', 0)}", Ranks(4, 5, 0, 1, 4)),
        ("TF_CONFIG={", Ranks()),
        ("TF_CONFIG=[1]", Ranks()),
        ("TF_CONFIG={} RANK=0 WORLD_SIZE=3", Ranks(0, 3)),
    ],
)
def test_ranks_are_read_from_each_launcher(environ: str, ranks: Ranks) -> None:
    assert detect(dict(word.split("=") for word in environ.split())) == ranks
    assert ranks.first == (ranks.rank == 0)


def test_nodes_are_counted() -> None:
    assert Ranks(world_size=8, local_world_size=4).node_count == 2
    assert Ranks().node_count == 1
    assert Ranks(world_size=7, local_world_size=4).node_count == 2


VARIABLES = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_ID",
    "SLURM_STEP_TASKS_PER_NODE",
    "TF_CONFIG",
    "PMI_RANK",
    "PMI_SIZE",
]


@given(
    st.dictionaries(st.sampled_from(VARIABLES), st.integers(-2, 9).map(str) | st.text(max_size=8))
)
def test_any_environment_gives_valid_ranks(environ: dict[str, str]) -> None:
    found = detect(environ)
    assert (
        0 <= found.rank < found.world_size and found.local_world_size >= 1 and found.node_count >= 1
    )


def test_default_number_of_processes() -> None:
    names = ("ddp", "fsdp", "single", "dp")
    assert [default_count(name, 8) for name in names] == [8, 8, 1, 1]
    assert default_count("ddp", 0) == default_count("single", 0) == 1
