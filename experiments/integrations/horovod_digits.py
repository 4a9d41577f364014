"""Digits with Horovod, tracked.

horovodrun -np 2 python experiments/integrations/horovod_digits.py [epochs]
"""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import rankzero
from rankzero import Goal

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

BATCH_SIZE = 64


def main(epochs: int) -> None:
    hvd.init()
    train, val = Digits().data()
    model = convnet(16)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = DistributedSampler(train, hvd.size(), hvd.rank(), drop_last=True)
    loader = DataLoader(train, BATCH_SIZE // hvd.size(), sampler=sampler, drop_last=True)
    images, labels = val.tensors
    step = 0
    config = {"epochs": epochs, "batch_size": BATCH_SIZE, "lr": 3e-3, "processes": hvd.size()}
    goal = Goal("val/accuracy", "max", target=0.9)
    with rankzero.track("horovod-digits", config, goal=goal) as run:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            model.train()
            for batch_images, batch_labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(batch_images), batch_labels)
                loss.backward()
                optimizer.step()
                step += 1
                run.log({"train/loss": loss}, step)
            model.eval()
            with torch.no_grad():
                accuracy = (model(images).argmax(-1) == labels).float().mean()
            run.checkpoint({"model": model.state_dict()}, step, {"val/accuracy": accuracy})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
