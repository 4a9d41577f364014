"""Which rank am I, by each launcher's environment."""

from __future__ import annotations

import json

import pytest

from rankzero.tracking.ranks import Ranks, detect


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, Ranks()),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"},
            Ranks(5, 8, 1, 4, 1),
        ),
        (
            {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
            Ranks(1, 2, 1, 2, 0),
        ),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, Ranks(3, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}, Ranks(2, 4, 0, 1, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Ranks()),
        ({"RANK": "x", "WORLD_SIZE": "2"}, Ranks()),
        (
            {"TF_CONFIG": json.dumps({"cluster": {"chief": ["a"], "worker": ["b", "c"]},
                                      "task": {"type": "worker", "index": 1}})},
            Ranks(2, 3, 0, 1, 2),
        ),
        ({"TF_CONFIG": "not json"}, Ranks()),
    ],
)  # fmt: skip
def test_launchers(environ: dict[str, str], ranks: Ranks) -> None:
    assert detect(environ) == ranks
    assert ranks.first == (ranks.rank == 0)


def test_nodes_are_counted() -> None:
    assert Ranks(world_size=8, local_world_size=4).node_count == 2
    assert Ranks().node_count == 1
