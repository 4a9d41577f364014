"""The user's experiment without the user's file: its settings, read in a process with PyTorch.

The search imports no PyTorch, so it holds no GPU memory and survives whatever the file does. A
child, forked from the server that trials are forked from, loads the file and sends plain values
back. The search makes a class with the same settings of these; see docs/decisions/0024. If the
file's own checks refuse a value, the trial's process reports that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import multiprocessing
import platform
import re
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rankzero import config, experiment_file, ranks
from rankzero.errors import RunFailed, UserError
from rankzero.experiment import Experiment, Train
from rankzero.launch.request import refuse_new, with_changes
from rankzero.search_ranges import Range
from rankzero.telemetry.host import core_count
from rankzero.tuning.space import BATCH, LR, ends

_END_SECONDS = 10.0  # for the process that reads the file, after its answer
_ENDLESS = 1 << 31  # samples of a stream of unknown length
_ADAPTIVE_EXPONENT, _SGD_EXPONENT = 0.5, 1.0  # of the batch size, in the learning rate's rule


@dataclasses.dataclass(frozen=True)
class Question:
    """Which experiment to describe, for which trials."""

    reference: str
    settings: Mapping[str, str]
    processes: int | None = None
    """Those of each trial on each of its machines. None: as many as there are GPUs for it."""
    parallel: int = 1
    """So many trials share the machine."""
    more: Sequence[int] = ()
    """Other numbers of processes that trials may have."""
    machines: int = 1
    """Those of a trial."""
    searches: bool = False
    """Whether trials will have other values of what the experiment's `search` names."""


@dataclasses.dataclass(frozen=True)
class ExperimentDescription:
    """An experiment in plain values, and the machine's part of a search."""

    name: str
    settings: tuple[config.Leaf, ...]
    search: Mapping[str, Range]
    lr_exponent: float
    processes: int
    """Those of a trial, on all of its machines."""
    samples: int
    """In the training set: no batch is larger."""
    is_validated: bool
    """Whether there is a validation set."""
    precisions: tuple[str, ...]
    device: str
    driver: str
    gpus: int = 0
    """Those of the machine that read the experiment."""
    cores: int = 1
    """Processor cores of each trial, on all of its machines."""
    machines: int = 1
    """Those of a trial."""
    loads: bool = False
    """Whether samples are loaded, and not tensors in memory."""
    images: bool = False
    """Whether the model has convolutions over images."""
    batch_norm: bool = False
    """Whether the model normalizes over the samples of a forward."""
    processor: str = ""
    """The model of the machine's processor, which trains if there are no GPUs."""
    code: str = ""
    """A digest of the experiment's file, and of what it has imported from its folder before its
    data are made."""


def describe(asked: Question) -> ExperimentDescription | Exception:
    """Return the description of the experiment in a file, or the error of reading it there.

    A child process reads the file.
    """
    context = multiprocessing.get_context("forkserver")
    try:
        reader, writer = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(writer, asked))
        child.start()
        # So that a child that dies closes the pipe.
        writer.close()
        try:
            answer: ExperimentDescription | Exception = reader.recv()
        except EOFError:
            child.join()
            return RunFailed(f"the process reading {asked.reference} ended with {child.exitcode}")
    except Exception as error:  # it could not start, or sent what only it can read
        return error
    # The user's file may hold memory of a GPU, which the first trial needs.
    child.join(_END_SECONDS)
    child.kill()
    return answer


def mirrored(description: ExperimentDescription) -> Experiment:
    """Return an experiment with the description's settings. It can be configured, not trained."""
    values = {leaf.key: leaf.value for leaf in description.settings}
    # The base class has these three already, with the checks of their values.
    own = [leaf for leaf in description.settings if not leaf.key.startswith(("train.", "goal."))]
    fields = _fields([leaf for leaf in own if leaf.key != "lr"])
    body: dict[str, Any] = {
        "__annotations__": {name: annotation for name, annotation, _ in fields},
        **{name: default for name, _, default in fields},
        "search": dict(description.search),
    }
    cls: type[Experiment] = type(description.name, (Experiment,), body)
    return config.override(cls(), values)


def _fields(leaves: Sequence[config.Leaf]) -> list[tuple[str, Any, Any]]:
    """Return (name, type, default) of the fields that have these settings; groups are nested.

    A trailing underscore is not part of a setting's key. It keeps a field apart from a method.
    """
    fields: list[tuple[str, Any, Any]] = []
    for name, found in itertools.groupby(leaves, lambda leaf: leaf.key.partition(".")[0]):
        members = list(found)
        if members[0].key == name:
            fields.append((f"{name}_", members[0].annotation, members[0].value))
            continue
        inner = [dataclasses.replace(one, key=one.key.removeprefix(f"{name}.")) for one in members]
        group: Any = dataclasses.make_dataclass(name, _fields(inner), frozen=True)
        fields.append((f"{name}_", group, group()))
    return fields


def _child(pipe: Connection, asked: Question) -> None:
    from rankzero.launch import failures, signals

    # The server that this process is a fork of holds signals back.
    signals.unblock()
    try:
        pipe.send(_described(asked))
    # Every process knows these classes. One of the user's file cannot be unpickled elsewhere.
    except (UserError, config.ConfigError) as error:
        pipe.send(UserError(str(error)))
    except Exception as error:
        pipe.send(RunFailed(failures.reason(error)))
    pipe.close()


def _described(asked: Question) -> ExperimentDescription:
    import torch
    from torch import nn

    from rankzero.training.build import model_of
    from rankzero.training.data.loader import in_memory
    from rankzero.training.data.stream import length_of
    from rankzero.training.distributed.device import check_driver, driver_version

    experiment = with_changes(experiment_file.load(asked.reference)(), asked.settings)
    refuse_new(type(experiment), asked.settings)
    if asked.searches:
        _refuse_stale(experiment)
    strategy, gpus = experiment.train.strategy, torch.cuda.device_count()
    processes = asked.processes
    if processes is None:
        processes = ranks.default_count(strategy, gpus // asked.parallel)
    cores = max(1, core_count() // asked.parallel)
    counts = (processes, *asked.more)
    _check_processes(experiment.train, counts, asked.parallel, cores, asked.machines)
    model = model_of(experiment)
    # A model may import more. Data may, too, but often only where a prepared file is missing.
    parts = experiment_file.code(experiment_file.split(asked.reference)[0].parent).items()
    data, validation = experiment.data()
    check_driver()
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    made = experiment.optimizer(model)
    optimizer = type(next(iter(made.values())) if isinstance(made, Mapping) else made).__name__
    processors = re.findall(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return ExperimentDescription(
        name=type(experiment).__name__,
        settings=tuple(config.leaves(experiment)),
        search=dict(type(experiment).search),
        # By the optimizer's name: its class may be any library's.
        lr_exponent=_SGD_EXPONENT if "sgd" in optimizer.lower() else _ADAPTIVE_EXPONENT,
        processes=processes * asked.machines,
        machines=asked.machines,
        samples=length_of(data) or _ENDLESS,
        is_validated=validation is not None,
        precisions=_fast_precisions(),
        device=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        driver=driver_version() if torch.cuda.is_available() else "",
        gpus=gpus,
        cores=cores * asked.machines,
        loads=not in_memory(data, experiment.collate),
        images=any(parameter.dim() == 4 for parameter in model.parameters()),
        batch_norm=any(isinstance(part, norms) for part in model.modules()),
        processor="" if torch.cuda.is_available() else [*processors, platform.machine()][0],
        code=hashlib.sha256(b"".join(repr(part).encode() for part in parts)).hexdigest()[:16],
    )


def _refuse_stale(experiment: Experiment) -> None:
    """Raise ConfigError if a field would not follow a setting that the search varies."""
    ranges = {key: ends(one) for key, one in type(experiment).search.items()}
    # Without a range of the experiment's own, the search chooses one.
    ranges.setdefault(BATCH, (2 * experiment.train.batch_size, experiment.train.batch_size))
    ranges.setdefault(LR, (2 * experiment.lr, experiment.lr))
    for key, values in ranges.items():
        for value in values if len(values) > 1 else ():
            config.refuse_stale(experiment, {key: value})


def _check_processes(
    train: Train, counts: Sequence[int], parallel: int, cores: int, machines: int
) -> None:
    """Raise UserError unless a trial can have so many processes on each of its machines."""
    import torch

    from rankzero.training.data.order import micro_batch_size
    from rankzero.training.distributed.device import check_gpus

    strategy, several = train.strategy, len(counts) > 1
    if strategy == "dp" and parallel > 1:
        raise UserError(
            "train.strategy=dp takes all GPUs for one trial: leave out --parallel, or use ddp"
        )
    if min(counts) < 1:
        raise UserError("--nproc must be at least 1")
    if (several or machines > 1) and strategy in ("single", "dp"):
        one = "one --nproc and one machine"
        raise UserError(f"train.strategy={strategy} is one process: use ddp, or {one}")
    if several and not torch.cuda.device_count() and max(counts) > cores:
        raise UserError(f"--nproc {max(counts)}: each trial has {cores} processor cores for them")
    for count in counts:
        check_gpus(count)
        # Called for its check: it raises if the batch cannot be divided.
        micro_batch_size(train, ranks.shards(strategy, count * machines))
        # Only the first is yours. Trials on others have a micro-batch that divides their share.
        train = dataclasses.replace(train, micro_batch=None)


def _fast_precisions() -> tuple[str, ...]:
    """Return the number formats that this machine computes fast in."""
    import torch

    # This child may initialize CUDA: it ends at once, and no rank is forked from it.
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability(0)
        return ("fp32", "tf32", "bf16", "fp16") if major >= 8 else ("fp32", "fp16")
    flags = _cpu_info()
    # AVX-512 BF16 and AMX multiply bf16 in hardware. Other processors emulate it, slowly.
    has_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    return ("fp32", "bf16") if has_bf16 else ("fp32",)


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
