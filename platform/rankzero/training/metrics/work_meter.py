"""How much a training computes: its tokens, and the FLOPs of its model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rankzero import ranks
from rankzero.experiment import Experiment, Train
from rankzero.ratio import Ratio
from rankzero.training import rng
from rankzero.training.data.batch import to_device
from rankzero.training.distributed.world import World
from rankzero.training.metrics.peak_flops import peak_flops
from rankzero.training.strategies.base import Measure, set_trained
from rankzero.training_position import Progress, bound, takes_progress

_CPU = torch.device("cpu")


class WorkMeter:
    """Counts the tokens of the batches on this rank, and the FLOPs of one.

    `tokens`: the experiment's method, or None, and then nothing is counted. `share`: the part of a
    batch's tokens that this rank counts, if other ranks see the same batch. `peak`: FLOP/s of all
    ranks' devices, or None, and then no FLOPs are counted. `model`: not yet divided. `measures`:
    what a step calls.
    """

    def __init__(
        self,
        tokens: Callable[[Any], int] | None = None,
        share: float = 1.0,
        peak: float | None = None,
        model: nn.Module | None = None,
        measures: Sequence[Measure] = (),
        device: torch.device = _CPU,
    ) -> None:
        self._count, self._share, self._peak, self._measures = tokens, share, peak, measures
        self._device, self._tokens = device, 0.0
        self._flops: float | None = None
        """The FLOPs of one token, if counted."""
        # A strategy is going to divide the model, or to compile it.
        self._model = None if peak is None or model is None else _on_meta(model)
        self._is_due = self._model is not None

    def train_only(self, names: Collection[str]) -> None:
        """Count the next batch, with gradients of the parameters with these names alone."""
        if self._model is not None:
            set_trained(self._model, names)
            self._is_due = True

    def watch(self, batches: Iterator[Any], notice: Callable[[str], None]) -> Iterator[Any]:
        """Return `batches`, counted as they are taken. `notice` gets the reason for no FLOPs."""
        return batches if self._count is None else self._counted(self._count, batches, notice)

    def _counted(
        self, count: Callable[[Any], int], batches: Iterator[Any], notice: Callable[[str], None]
    ) -> Iterator[Any]:
        for batch in batches:
            tokens = count(batch)
            self._tokens += tokens * self._share
            if self._is_due:
                # The user's code may draw numbers. A resume counts again, and must change nothing.
                random_states = rng.state(self._device)
                try:
                    self._flops = self._count_flops(batch) / tokens
                except Exception as error:  # the user's code need not run on such tensors
                    notice(f"throughput/mfu is unknown: {type(error).__name__}: {error}")
                    self._model = self._flops = None
                rng.restore(random_states, self._device)
                self._is_due = False
            yield batch

    def _count_flops(self, batch: Any) -> int:
        """Return the FLOPs of a forward and a backward. Nothing is computed."""
        from torch.utils.flop_counter import FlopCounterMode

        assert self._model is not None
        meta = to_device(batch, torch.device("meta"))
        with FlopCounterMode(display=False) as counter:
            for measure in self._measures:
                loss = measure(self._model, meta)["loss"]
                loss = loss.numerator if isinstance(loss, Ratio) else loss
                if loss.requires_grad:  # `frozen` may hold all parameters of a turn
                    loss.backward()
        return int(counter.get_total_flops())

    def read(self) -> float:
        """Return this rank's tokens since the last call."""
        tokens, self._tokens = self._tokens, 0.0
        return tokens

    def rates(self, tokens: float, seconds: float) -> dict[str, float]:
        """Return what is known of ``tokens_per_second`` and ``mfu``, over all ranks.

        ``mfu``: the FLOP/s of the model's forward and backward, divided by the peak. Recomputed
        activations do not count: Chowdhery et al. 2022, PaLM, appendix B.
        """
        found = {"tokens_per_second": tokens / seconds} if self._count else {}
        if self._flops is not None and self._peak is not None:
            found["mfu"] = self._flops * tokens / seconds / self._peak
        return found


def of(
    experiment: Experiment, measure: Measure, model: nn.Module, world: World, at: Progress
) -> WorkMeter:
    """Return what counts the experiment's work on this rank. `model`: on the host."""
    train = experiment.train
    counts_tokens = type(experiment).tokens is not Experiment.tokens
    # The content of a helper is on the device, that of the copied model is nowhere.
    peak = _peak(train, model, world) if counts_tokens and not at.helpers else None
    places = [dataclasses.replace(at, turn=turn) for turn in experiment.turns or (None,)]
    has_progress = takes_progress(experiment.measure)
    measures = [bound(measure, place) for place in places] if has_progress else [measure]
    return WorkMeter(
        experiment.tokens if counts_tokens else None,
        ranks.shards(train.strategy, world.size) / world.size,
        peak,
        model,
        measures,
        world.device,
    )


def _peak(train: Train, model: nn.Module, world: World) -> float | None:
    """Return the FLOP/s that all ranks' devices can do in the model's number format, if known."""
    if world.device.type != "cuda":
        return None
    # A model that is half-precision by itself needs no autocast.
    halves = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    own = {halves[p.dtype] for p in model.parameters() if p.dtype in halves}
    precision = max(own, default=train.precision)
    peak = peak_flops(torch.cuda.get_device_name(world.device), precision)
    # DataParallel uses all GPUs in one process.
    devices = torch.cuda.device_count() if train.strategy == "dp" else world.size
    return None if peak is None else peak * devices


def _on_meta(model: nn.Module) -> nn.Module | None:
    """Return a copy whose weights have no content, or None if the model cannot be copied."""
    memo: dict[int, Any] = {}
    # Copying runs the user's code, and the parameters of a lazy module have no shape yet.
    with contextlib.suppress(Exception):
        for parameter in model.parameters():
            empty = torch.empty_like(parameter, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        return copy.deepcopy(model, memo)
    return None
