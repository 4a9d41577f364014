"""Random states in a checkpoint."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rankzero.config import override
from rankzero.training.build import build
from rankzero.training.checkpoints import restore
from rankzero.training.periodic import state_dict
from support.training import ALONE, tiny


@pytest.mark.parametrize(("gpus", "restored"), [(3, {1: 1, 2: 2}), (2, {})])
def test_a_checkpoint_has_the_states_of_all_gpus_of_data_parallel(
    monkeypatch: pytest.MonkeyPatch, gpus: int, restored: dict[int, int]
) -> None:
    found: dict[int, int] = {}

    def keep(state: Tensor, index: int) -> None:
        found[index] = int(state[0])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda index: torch.full((16,), index))
    monkeypatch.setattr(torch.cuda, "set_rng_state", keep)
    job, state = build(tiny(), ALONE)
    assert state_dict(job, state)["replica_randoms"] == []
    job = dataclasses.replace(job, experiment=override(job.experiment, {"train.strategy": "dp"}))
    saved = state_dict(job, state)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    restore.apply(saved, job, state)
    assert found == restored
    # A checkpoint of an older version.
    del saved["replica_randoms"]
    restore.apply(saved, job, state)
