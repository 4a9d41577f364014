"""Finds values that `measure` returns as means over the batch and that are none, such as AUROC."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankzero.training import rng
from rankzero.training.data.batch import map_tensors, rows_of

Measured = Callable[[Any], Mapping[str, Any] | None]
"""The `measure` of a model in evaluation mode, without gradients: a batch's values."""
# A kernel for another batch size rounds differently, most of all in low precision.
_TOLERANCES = {"fp32": 1e-3, "tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
_SLACK = 1e-5


class MeanCheck:
    """Compares the values of a batch with the means over its two halves, in the first evaluation.

    `notice`: gets one text that names the values that differ. None: no check.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        precision: str = "fp32",
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self._device, self._tolerance = device or torch.device("cpu"), _TOLERANCES[precision]
        self._notice = notice
        self._kept: tuple[Any, int] | None = None
        self._has_run = self._is_told = False

    def keep(self, batch: Any, samples: int, values: Collection[Any] = ()) -> None:
        """Keep the first batch with halves. Notice a mean over other rows in `values`."""
        if self._notice is None or not samples:
            return
        if self._kept is None and samples > 1 and not self._has_run:
            self._kept = batch, samples
        if self._is_told or not any(isinstance(one, Tensor) and not one.dim() for one in values):
            return
        shapes: list[torch.Size] = []
        # A nested tensor has no shape.
        map_tensors(batch, lambda one: None if one.is_nested else shapes.append(one.shape))
        rows = _other_rows(shapes, samples)
        if rows is not None:
            self._notice(
                f"collate() returned {rows} rows for {samples} samples: a mean that measure() "
                f"returns counts as one over {samples}, so val/ may be wrong; return a Ratio, or "
                "keep every sample"
            )
            self._is_told = True

    def run(self, measure: Measured, model: nn.Module) -> None:
        """Check the batch that was kept, once.

        Random numbers drawn here change no others, and `model` stays as it is.
        """
        kept, notice = self._kept, self._notice
        if kept is None or notice is None:
            return
        self._kept, self._has_run = None, True
        states = rng.state(self._device)
        try:
            with _unchanged(model):
                found = self._differing(measure, *kept)
        except Exception:  # The user's code need not work on half a batch.
            found = {}
        finally:
            rng.restore(states, self._device)
        values = "; ".join(
            f"{name} is {whole:.5g} for {kept[1]} samples, and the mean of their halves {mean:.5g}"
            for name, (whole, mean) in found.items()
        )
        if values:
            notice(
                f"values are logged that are no means over samples: {values}. These depend on the "
                "batch size and the number of processes: an Experiment can return a Ratio, or let "
                "an object of metrics() compute the value"
            )

    def _differing(
        self, measure: Measured, batch: Any, samples: int
    ) -> dict[str, tuple[float, float]]:
        """Return the values that are no means, each with the mean over the two halves."""
        lengths: list[int] = []
        map_tensors(batch, lambda tensor: lengths.append(len(tensor)))
        before = rng.state(self._device)
        whole = measure(batch) or {}
        is_random = not torch.equal(before, rng.state(self._device))
        # Nobody knows how to divide a batch with other tensors. And a half draws other numbers.
        if is_random or any(length != samples for length in lengths):
            return {}
        names = [name for name, one in whole.items() if isinstance(one, Tensor) and not one.dim()]
        means = self._means_of_halves(measure, batch, samples, names)
        pairs = {name: (whole[name].item(), mean) for name, mean in means.items()}
        return {
            name: (one, mean)
            for name, (one, mean) in pairs.items()
            if math.isfinite(one) and not abs(one - mean) <= _SLACK + self._tolerance * abs(one)
        }

    def _means_of_halves(
        self, measure: Measured, batch: Any, samples: int, names: Sequence[str]
    ) -> dict[str, float]:
        rows, means = torch.arange(samples, device=self._device), dict.fromkeys(names, 0.0)
        for half in rows.split([samples // 2, samples - samples // 2]):
            values = measure(rows_of(batch, half)) or {}
            for name in names:
                means[name] += values[name].item() * len(half) / samples
        return means


def _other_rows(shapes: Sequence[torch.Size], samples: int) -> int | None:
    """Return the rows that all of a batch's tensors have, if `collate` may have dropped samples."""
    rows = {shape[0] if shape else samples for shape in shapes}
    # Some batches have the time first, and a list may have a tensor for each sample.
    if len(rows) != 1 or len(shapes) >= samples or any(samples in shape[:2] for shape in shapes):
        return None
    (found,) = rows
    # One row may have all samples, packed.
    return found if 1 < found < samples else None


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Set each module's attributes and buffers back to what they are now."""
    # A model may remember something in evaluation, too: a hidden state, or how often it was called.
    # Not restored: what a list, a dictionary or an object of the user contains.
    holders = [holder for one in model.modules() for holder in (vars(one), one._buffers)]
    # The `_buffers` of a torch.jit.script module is a view.
    kept = [(holder, dict(holder)) for holder in holders if isinstance(holder, dict)]
    found = [*model.buffers(), *(one for _, before in kept for one in before.values())]
    tensors = [
        (one, one._version, one.clone())
        for one in {id(one): one for one in found}.values()
        # A tensor of `torch.inference_mode` can neither count its changes nor be written.
        if isinstance(one, Tensor) and not one.is_inference()
    ]
    try:
        yield
    finally:
        for holder, before in kept:
            same = holder.keys() == before.keys()
            # A compiled model looks whether its dictionaries changed.
            if not same or any(holder[name] is not one for name, one in before.items()):
                holder.clear()
                holder.update(before)
        for one, version, value in tensors:
            if one._version != version:
                one.copy_(value)
