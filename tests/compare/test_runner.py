"""How a comparison reads the runs that it has trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankzero.compare import runner
from rankzero.compare.results import StrategyRun
from rankzero.errors import RunFailed
from rankzero.events import SystemSampled
from rankzero.experiment import Goal
from rankzero.tuning.learning_curve import LearningCurve
from rankzero.tuning.trials.follower import TrialResult
from support.runs import append, make_folder


def test_the_gpus_are_those_of_the_run_that_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = make_folder(tmp_path, name="cmp")
    for child, percent in (("cmp-ddp-2", 10.0), ("cmp-ddp-2-2", 90.0)):
        sample = SystemSampled(0.0, 0, {"system/gpu_0_utilization_percentage": percent})
        append(make_folder(tmp_path, name=child), sample, node=0)
    parent.add_child("cmp-ddp-2-2")
    trained = TrialResult("COMPLETE", LearningCurve(Goal("val/loss")), "", {}, 1.0)
    monkeypatch.setattr(runner, "run_alone", lambda *_: trained)
    monkeypatch.setattr(runner, "_profiled", lambda *_, **__: (_ for _ in ()).throw(RunFailed("")))
    one: Any = SimpleNamespace()
    monkeypatch.setattr(runner.config, "override", lambda *_: one)
    monkeypatch.setattr(runner.describe, "mirrored", lambda _: one)
    log = SimpleNamespace(notice=lambda _: None)
    study: Any = SimpleNamespace(folder=parent, environment={}, log=log)
    run = StrategyRun("ddp", 2)
    found = runner._measure(study, one, one, run, lambda _: None)
    assert found.gpu_percent == 90.0
