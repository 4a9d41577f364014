"""Digits with DistributedDataParallel in processes that MPI starts, tracked.

mpirun -np 2 python experiments/integrations/mpirun_digits.py [epochs]

For several machines, add `-x MASTER_ADDR=…` with the address of the first machine. The variables of
Horovod's launcher (HOROVOD_RANK …) work as well.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rankzero
from rankzero import Goal

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

BATCH_SIZE = 64
LAUNCHERS = {
    "HOROVOD_RANK": "HOROVOD_SIZE",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
}


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    found = (
        (int(os.environ[rank]), int(os.environ[size]))
        for rank, size in LAUNCHERS.items()
        if rank in os.environ
    )
    return next(found, (0, 1))


def main(epochs: int) -> None:
    rank, size = place()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train, val = Digits().data()
    model = DistributedDataParallel(convnet(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, BATCH_SIZE // size, sampler=sampler, drop_last=True)
    images, labels = val.tensors
    step = 0
    config = {"epochs": epochs, "batch_size": BATCH_SIZE, "lr": 3e-3, "processes": size}
    with rankzero.track(
        "mpirun-digits", config, goal=Goal("val/accuracy", "max", target=0.9)
    ) as run:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            model.train()
            for batch_images, batch_labels in loader:
                loss = cross_entropy(model(batch_images), batch_labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                run.log({"train/loss": loss}, step)
            model.eval()
            with torch.no_grad():
                accuracy = (model.module(images).argmax(-1) == labels).float().mean()
            run.checkpoint({"model": model.module.state_dict()}, step, {"val/accuracy": accuracy})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
