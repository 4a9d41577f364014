"""The run on every other rank than 0."""

from __future__ import annotations

from typing import Any

from rankzero.integrations.own_loop.tracked_run import TrackedRun


class NullTrackedRun(TrackedRun):
    """All methods but `latest` do nothing, at no cost."""

    name = folder = id = url = unless_ended = None
    step = highest_step = 0
    was_elsewhere = trains = False

    def __init__(self) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    finish = tell = mlflow = log = log_metrics = log_metric = checkpoint = _nothing
    log_params = log_param = set_tags = set_tag = _nothing
    log_artifact = log_artifacts = log_text = log_dict = log_table = log_figure = _nothing
    log_image = log_model = judge_logged = _nothing

    def reopen(self) -> bool:
        return False

    def child(self, *_: Any, **__: Any) -> TrackedRun:
        return self

    def evaluated(self, *_: Any, **__: Any) -> bool:
        return False

    had = evaluated

    def latest(self) -> dict[str, Any] | None:
        from rankzero.integrations.own_loop import last_checkpoint

        found = last_checkpoint.load(None, print)
        return None if found is None else found[0]
