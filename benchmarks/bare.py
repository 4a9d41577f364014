"""Train a hand-written PyTorch DDP loop that logs nothing: the baseline of the other benchmarks.

torchrun --nproc-per-node 2 bare.py Mlp 9 out.json
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import workloads
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def permutation(epoch: int, samples: int) -> torch.Tensor:
    """Return the tracked run's order of samples, so that both do the same arithmetic."""
    from rankzero.training.data.order import mix

    return torch.randperm(samples, generator=torch.Generator().manual_seed(mix(0, epoch)))


def loop(name: str, steps: int) -> tuple[list[float], float]:
    """Train. Return the end time of each step, and the last loss over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    from rankzero.training.rng import seed_all

    experiment = getattr(workloads, name)()
    data, _ = experiment.data()
    x, y = data.tensors
    batch = experiment.train.batch_size
    seed_all(0)
    model = DistributedDataParallel(experiment.model(), gradient_as_bucket_view=True)
    optimizer = experiment.optimizer(model)
    per_epoch, share = len(x) // batch, batch // world
    order, times, loss = permutation(0, len(x)), [], torch.tensor(0.0)
    for step in range(steps):
        position = step % per_epoch
        if step and position == 0:
            order = permutation(step // per_epoch, len(x))
        start = position * batch + rank * share
        indices = order[start : start + share]
        loss = cross_entropy(model(x.index_select(0, indices)), y.index_select(0, indices))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.time())
    dist.all_reduce(loss := loss.detach())
    return times, loss.item() / world


def leave() -> None:
    """End this process at once, after all ranks have arrived here. Collective."""
    # gloo's threads outlive the group. A thread that releases a tensor while Python shuts down
    # aborts the process (one run in 25 with PyTorch 2.15), and torchrun would report a failed run.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def main(name: str, steps: int, out: str) -> None:
    dist.init_process_group("gloo")
    times, loss = loop(name, steps)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"times": times, "loss": loss}))
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
