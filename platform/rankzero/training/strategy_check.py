"""Whether a strategy can train an experiment. A command asks at its start: no PyTorch here."""

from __future__ import annotations

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.ranks import SAME_SAMPLES

_REFUSED = (
    ("compile", "true", "false", ("dp", "tp", "pp")),
    ("recompute", "true", "false", ("dp", "pp")),
    ("channels_last", "true", "false", ("fsdp", "tp", "pp")),
    # A pipeline takes batches of one size.
    ("drop_last", "false", "true", ("pp",)),
    # The loss scaler refuses a mixture of plain tensors and DTensors.
    ("precision", "fp16", "bf16", SAME_SAMPLES),
)
"""Settings, their values that these strategies do not take, and what to set."""
NO_PLAN = (
    "train.strategy=tp needs the experiment to say how its layers are divided: def "
    "parallelize(self): return {'layer.name': ColwiseParallel(), …}, as "
    "torch.distributed.tensor.parallel.parallelize_module takes it"
)


def check(experiment: Experiment, processes: int, *, on_gpu: bool) -> None:
    """Raise UserError if the strategy cannot train the experiment in so many processes."""
    train, strategy = experiment.train, experiment.train.strategy
    for setting, value, instead, refusing in _REFUSED:
        if strategy in refusing and str(getattr(train, setting)).lower() == value:
            raise UserError(
                f"train.{setting}={value} and train.strategy={strategy} do not go together: set "
                f"train.{setting}={instead}"
            )
    if strategy == "dp" and not on_gpu:
        raise UserError(
            "train.strategy=dp divides a batch among GPUs, and there is none: use ddp, which runs "
            "on CPUs, too"
        )
    if strategy in ("single", "dp") and processes > 1:
        raise UserError(
            f"train.strategy={strategy} is one process, not {processes}: give --nproc 1 on one "
            "machine, or use ddp"
        )
    # Only a rank may call it: the plan may ask the process group, or for what `model()` has made.
    if strategy == "tp" and type(experiment).parallelize is Experiment.parallelize:
        raise UserError(NO_PLAN)
