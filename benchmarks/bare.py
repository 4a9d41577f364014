"""Train a hand-written PyTorch loop that logs nothing: the baseline of the other benchmarks.

torchrun --nproc-per-node 2 bare.py Mlp 9 out.json [loading processes [file for rank 0's pid]]
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recipes
import torch
import torch.distributed as dist
import workloads
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset


def permutation(epoch: int, samples: int) -> torch.Tensor:
    """Return the tracked run's order of samples, so that both do the same arithmetic."""
    from rankzero.training.data.order import mix

    return torch.randperm(samples, generator=torch.Generator().manual_seed(mix(0, epoch)))


def gathered(data: TensorDataset, batch: int, rank: int, size: int) -> Iterator[list[torch.Tensor]]:
    """Yield this rank's batches of tensors in memory, without end."""
    share = batch // size
    for epoch in itertools.count():
        order = permutation(epoch, len(data))
        for position in range(len(data) // batch):
            start = position * batch + rank * share
            indices = order[start : start + share]
            yield [tensor.index_select(0, indices) for tensor in data.tensors]


def loaded(experiment: workloads.Workload, data: Dataset[Any], workers: int) -> Iterator[Any]:
    """Yield this rank's batches of a DataLoader, without end."""
    sampler = DistributedSampler[Any](data, drop_last=True)
    share = experiment.train.batch_size // dist.get_world_size()
    loader = DataLoader(
        data,
        batch_size=share,
        sampler=sampler,
        num_workers=workers,
        collate_fn=experiment.collate,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
        drop_last=True,
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def loop(name: str, steps: int, workers: int = 0) -> tuple[list[float], float]:
    """Train. Return the end time of each step, and the last loss over all ranks."""
    torch.set_num_threads(1)
    from rankzero.training.rng import seed_all

    experiment = getattr(workloads, name)()
    data, _ = experiment.data()
    in_memory = isinstance(data, TensorDataset)
    batch = experiment.train.batch_size
    # All stages of a pipeline see all samples.
    whole = experiment.train.strategy == "pp"
    share = (0, 1) if whole else (dist.get_rank(), dist.get_world_size())
    batches = gathered(data, batch, *share) if in_memory else loaded(experiment, data, workers)
    seed_all(0)
    step = recipes.step_of(experiment)
    times, loss = [], torch.tensor(0.0)
    for each in itertools.islice(batches, steps):
        loss = step(each)
        times.append(time.time())
    dist.all_reduce(loss := loss.detach())
    return times, loss.item() / dist.get_world_size()


def leave() -> None:
    """End this process at once, after all ranks have arrived here. Collective."""
    # gloo's threads outlive the group. A thread that releases a tensor while Python shuts down
    # aborts the process (one run in 25 with PyTorch 2.15), and torchrun would report a failed run.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main(name: str, steps: int, out: str, workers: int = 0, pid: str | None = None) -> None:
    dist.init_process_group("gloo")
    if pid and dist.get_rank() == 0:
        Path(pid).write_text(str(os.getpid()))
    times, loss = loop(name, steps, workers)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"times": times, "loss": loss}))
    leave()


if __name__ == "__main__":
    name, steps, out, *rest = sys.argv[1:]
    main(name, int(steps), out, int(rest[0]) if rest else 0, rest[1] if rest[1:] else None)
