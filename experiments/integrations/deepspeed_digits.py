"""Digits with DeepSpeed's ZeRO-1, tracked.

deepspeed experiments/integrations/deepspeed_digits.py [epochs]

On two processes without GPUs: DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 …
(or torchrun --nproc-per-node 2 …).
"""

import argparse
import sys
from pathlib import Path

import deepspeed
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import rankzero
from rankzero import Goal

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

BATCH_SIZE = 64


def settings(lr: float) -> dict:
    return {
        "train_batch_size": BATCH_SIZE,
        # Without torch_adam, DeepSpeed compiles an optimizer of its own.
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }


def main(epochs: int) -> None:
    train, val = Digits().data()
    config = settings(lr=3e-3)
    model = convnet(16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    sampler = DistributedSampler(train, engine.world_size, engine.global_rank, drop_last=True)
    loader = DataLoader(train, BATCH_SIZE // engine.world_size, sampler=sampler, drop_last=True)
    images, labels = (tensor.to(engine.device) for tensor in val.tensors)
    step = 0
    goal = Goal("val/accuracy", "max", target=0.9)
    with rankzero.track("deepspeed-digits", {**config, "epochs": epochs}, goal=goal) as run:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            engine.train()
            for batch_images, batch_labels in loader:
                loss = cross_entropy(
                    engine(batch_images.to(engine.device)), batch_labels.to(engine.device)
                )
                engine.backward(loss)
                engine.step()
                step += 1
                run.log({"train/loss": loss}, step)
            engine.eval()
            with torch.no_grad():
                accuracy = (engine(images).argmax(-1) == labels).float().mean()
            # Rank 0 has all weights, but only its part of the optimizer.
            # DeepSpeed's save_checkpoint would save all of the optimizer.
            run.checkpoint({"model": engine.module.state_dict()}, step, {"val/accuracy": accuracy})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=5)
    parser.add_argument("--local_rank", help="what DeepSpeed's launcher adds")
    main(parser.parse_args().epochs)
