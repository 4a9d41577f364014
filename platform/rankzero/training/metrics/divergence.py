"""Decides whether a loss or a gradient that is no finite number ends the training.

A batch without a known target has the loss NaN and no gradients. fp16's loss scaler skips a step of
which a gradient is not finite. Both do no harm. A weight that is NaN makes every later loss NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rankzero.errors import NotFinite
from rankzero.training.job import State, TrainingContext
from rankzero.training.metrics.window import WindowStats

# A loss that is NaN in each step teaches nothing.
_MOST_REPORTS = 20
# The scaler begins with 2**16 and halves its scale in each step that it skips.
_LEAST_SCALE = 2.0**-16


class Divergence:
    """Follows the reports of one attempt. `notice` gets at most one text."""

    def __init__(self, job: TrainingContext, state: State, notice: Callable[[str], None]) -> None:
        self._world, self._state, self._notice = job.world, state, notice
        self._scaler = job.precision.scaler
        self._reports, self._is_told = 0, False

    def check(self, window: WindowStats) -> None:
        """Raise NotFinite if the training has diverged. Collective if the loss is not finite."""
        self._check_scale()
        # It does not matter on which of its steps a window ends.
        if window.is_finite or any(map(math.isfinite, window.values["loss"])):
            self._reports = 0
        if window.is_finite:
            return
        self._reports += 1
        found = f"train/loss is not finite at step {self._state.step}"
        model = self._state.model
        weights = [one for one in model.parameters() if one.requires_grad]
        is_sound = self._world.all(all(map(_is_sound, (*weights, *model.buffers()))))
        if not is_sound or self._reports >= _MOST_REPORTS:
            again = f" and in {self._reports} reports in a row" if is_sound else ""
            # A buffer may overflow in fp16 before the scale has fallen.
            instead = ", set train.clip, or use bf16" if self._scaler else ", or set train.clip"
            raise NotFinite(f"{found}{again}: lower lr{instead}")
        if not self._is_told:
            self._notice(f"{found}, but every weight is: the training continues")
            self._is_told = True

    def _check_scale(self) -> None:
        # The report has waited for the device, so this costs no wait.
        if self._scaler is not None and (scale := self._scaler.get_scale()) < _LEAST_SCALE:
            raise NotFinite(
                f"the loss scale of fp16 is {scale:.2g} at step {self._state.step}, because the "
                "gradients of many steps were not finite: lower lr, set train.clip, or use bf16"
            )


def _is_sound(tensor: Tensor) -> bool:
    """Return whether this rank's part of a weight is finite, or of a buffer is not NaN."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.requires_grad:
        return bool(local.isfinite().all())
    # A buffer may be infinite on purpose, such as the mask of an attention. No mean is NaN.
    return local.layout is not torch.strided or not local.isnan().any()
