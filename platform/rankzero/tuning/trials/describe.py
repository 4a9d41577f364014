"""The user's experiment without the user's file: its settings, read in a process that may import PyTorch.

The search itself imports none, so that it holds no GPU memory and survives whatever the file does. A child, forked
from the server that trials are forked from, loads the file and sends back plain values; out of these the search makes
a class with the same settings. Whatever the file's own checks refuse, a trial's process says.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rankzero import config, experiment_file
from rankzero.errors import RunFailed, UserError
from rankzero.experiment import Experiment, Goal, Range, Train

ADAPTIVE, PLAIN = 0.5, 1.0


@dataclasses.dataclass(frozen=True)
class ExperimentDescription:
    """An experiment in plain values, and what the machine offers it."""

    name: str
    settings: tuple[config.Leaf, ...]
    search: Mapping[str, Range]
    lr_exponent: float
    processes: int
    samples: int
    """In the training set: no batch is larger."""
    precisions: tuple[str, ...]
    device: str
    driver: str
    gpus: int = 0


class _Pipe(Protocol):
    def send(self, what: Any) -> None: ...
    def close(self) -> None: ...


def describe(
    reference: str, settings: Mapping[str, str], processes: int | None, parallel: int = 1
) -> ExperimentDescription:
    """Return the description of the experiment in a file, read in a child. Raises UserError, ConfigError, RunFailed.

    `processes`: of each trial; None: as many as there are GPUs for each of the `parallel` ones.
    """
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(reference, dict(settings), processes, parallel, writer)
    )
    child.start()
    writer.close()
    try:
        kind, content = reader.recv()
    except EOFError:
        child.join()
        raise RunFailed(f"the process that reads {reference} ended with {child.exitcode}") from None
    child.join()
    if kind == "described":
        found: ExperimentDescription = content
        return found
    raise {"user": UserError, "config": config.ConfigError}.get(kind, RunFailed)(content)


def mirrored(description: ExperimentDescription) -> Experiment:
    """Return an experiment with the description's settings; it cannot be trained, only configured."""
    fields: dict[str, Any] = {"search": dict(description.search)}
    annotations: dict[str, Any] = {}
    for name, leaves in _by_first_part(description.settings).items():
        if name in ("train", "goal", "lr"):
            continue
        if leaves[0].key == name:
            annotations[name + "_"], fields[name + "_"] = leaves[0].annotation, leaves[0].value
        else:
            group = _group(name, leaves)
            annotations[name + "_"], fields[name + "_"] = group, group()
    known = {leaf.key: leaf.value for leaf in description.settings}
    fields["train"] = config.override(Train(), _of_group(known, "train"))
    fields["goal"] = Goal(**_of_group(known, "goal"))
    fields["lr"] = known["lr"]
    annotations |= {"train": Train, "goal": Goal, "lr": float}
    cls: type[Experiment] = type(
        description.name, (Experiment,), {"__annotations__": annotations, **fields}
    )
    return cls()


def _child(
    reference: str, settings: Mapping[str, str], processes: int | None, parallel: int, pipe: _Pipe
) -> None:
    from rankzero.launch import failures, signals

    signals.unblock()
    try:
        pipe.send(("described", _described(reference, settings, processes, parallel)))
    except UserError as error:
        pipe.send(("user", str(error)))
    except config.ConfigError as error:
        pipe.send(("config", str(error)))
    except Exception as error:  # the user's own code
        pipe.send(("failed", failures.reason(error)))
    pipe.close()


def _described(
    reference: str, settings: Mapping[str, str], processes: int | None, parallel: int
) -> ExperimentDescription:
    import torch

    from rankzero.training import strategies
    from rankzero.training.data.order import micro_batch_size
    from rankzero.training.distributed.device import check_gpus, driver_version

    experiment = config.override(experiment_file.load(reference)(), settings)
    strategy, gpus = experiment.train.strategy, torch.cuda.device_count()
    if strategy == "dp" and parallel > 1:
        raise UserError(
            "train.strategy=dp takes all GPUs for one trial: leave out --parallel, or use ddp"
        )
    processes = (
        processes if processes is not None else strategies.processes(strategy, gpus // parallel)
    )
    if processes < 1:
        raise UserError("--nproc must be at least 1")
    check_gpus(processes)
    micro_batch_size(experiment.train, strategies.shards(experiment.train.strategy, processes))
    optimizer = experiment.optimizer(experiment.model())
    return ExperimentDescription(
        name=type(experiment).__name__,
        settings=tuple(config.leaves(experiment)),
        search=dict(type(experiment).search),
        lr_exponent=PLAIN if "sgd" in type(optimizer).__name__.lower() else ADAPTIVE,
        processes=processes,
        samples=len(experiment.data()[0]),
        precisions=_precisions(),
        device=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        driver=driver_version() if torch.cuda.is_available() else "",
        gpus=gpus,
    )


def _precisions() -> tuple[str, ...]:
    """Return the number formats that this machine computes fast in; this child may touch CUDA, it ends at once."""
    import torch

    if not torch.cuda.is_available():
        return ("fp32", "bf16") if _cpu_has_bf16() else ("fp32",)
    major, _ = torch.cuda.get_device_capability(0)
    return ("fp32", "tf32", "bf16", "fp16") if major >= 8 else ("fp32", "fp16")


def _cpu_has_bf16() -> bool:
    """Tell whether the processor multiplies bf16 by itself, which AVX-512 BF16 and AMX do."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _by_first_part(settings: Sequence[config.Leaf]) -> dict[str, list[config.Leaf]]:
    groups: dict[str, list[config.Leaf]] = {}
    for leaf in settings:
        groups.setdefault(leaf.key.partition(".")[0], []).append(leaf)
    return groups


def _of_group(known: Mapping[str, Any], group: str) -> dict[str, Any]:
    return {
        key.removeprefix(group + "."): value
        for key, value in known.items()
        if key.startswith(group + ".")
    }


def _group(prefix: str, leaves: Sequence[config.Leaf]) -> type[Any]:
    """Return a frozen dataclass with the settings of a group, and of groups within it."""
    inner = [dataclasses.replace(leaf, key=leaf.key.removeprefix(prefix + ".")) for leaf in leaves]
    fields: list[tuple[str, Any, Any]] = []
    for name, found in _by_first_part(inner).items():
        kind = found[0].annotation if found[0].key == name else _group(name, found)
        default = found[0].value if found[0].key == name else kind()
        fields.append((name + "_", kind, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(prefix, fields, frozen=True)
