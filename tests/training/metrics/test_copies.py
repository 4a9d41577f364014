"""Metrics whose memory a later step writes: each step keeps its own value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.training import Trainer, tiny


class Watched(type(tiny())):  # type: ignore[misc]
    """Returns what later steps write, each with a copy of its value."""

    def model(self) -> nn.Module:
        model = super().model()
        model.scale = nn.Parameter(torch.ones(()))
        model.pair = nn.Parameter(torch.ones(2))
        model.register_buffer("mean", torch.zeros(()))
        model.kept = torch.zeros(())
        return model

    def measure(self, model: Any, batch: Any) -> dict[str, Tensor]:
        found = super().measure(model, batch)
        found["loss"] = found["loss"] * model.scale + model.pair.prod()
        model.mean.data.lerp_(batch[0].mean(), 0.1)
        model.kept.copy_(found["loss"].detach())
        own = {"scale": model.scale, "value": model.scale.data, "part": model.pair[0]}
        own |= {"mean": model.mean, "kept": model.kept}
        return {**found, **own, **{f"{name} then": one.detach() * 1 for name, one in own.items()}}


@pytest.mark.parametrize("micro_batch", [32, 8])
def test_a_parameter_as_a_metric_has_the_value_of_its_step(
    train: Trainer, micro_batch: int
) -> None:
    trained = train(Watched(**vars(tiny(train__steps=12, train__micro_batch=micro_batch))))
    for name in ("scale", "value", "part", "mean", "kept"):
        values = trained.series(f"train/{name}")
        assert values == trained.series(f"train/{name} then"), name
        assert len(set(values.values())) == 12, name


def test_usual_metrics_are_not_copied(train: Trainer, tmp_path: Path) -> None:
    assert not train(tiny(train__steps=1), tmp_path / "usual").job.metric_copies[None].are_due
    assert train(Watched(**vars(tiny(train__steps=1)))).job.metric_copies[None].are_due
