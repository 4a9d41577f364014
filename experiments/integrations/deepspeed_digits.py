"""Digits with DeepSpeed's ZeRO, stage 1, 2 or 3, tracked.

deepspeed experiments/integrations/deepspeed_digits.py [epochs] [--stage 3] [--name NAME]

A second call with the same name continues from the last checkpoint.

On two processes without GPUs: DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 …
(or torchrun --nproc-per-node 2 …).
"""

import argparse
import sys
from pathlib import Path

import deepspeed
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankzero
from rankzero import Goal

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

BATCH_SIZE = 64


def settings(lr: float, stage: int) -> dict:
    return {
        "train_batch_size": BATCH_SIZE,
        # Without torch_adam, DeepSpeed compiles an optimizer of its own.
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def accuracy(engine: deepspeed.DeepSpeedEngine, data: TensorDataset) -> Tensor:
    """Return it on every rank: with stage 3, the forward pass needs all of them."""
    images, labels = (tensor.to(engine.device) for tensor in data.tensors)
    engine.eval()
    with torch.no_grad():
        return (engine(images).argmax(-1) == labels).float().mean()


def main(epochs: int, stage: int, name: str | None) -> None:
    train, val = Digits().data()
    config = settings(3e-3, stage)
    model = convnet(16)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    sampler = DistributedSampler(train, engine.world_size, engine.global_rank, drop_last=True)
    loader = DataLoader(train, BATCH_SIZE // engine.world_size, sampler=sampler, drop_last=True)
    goal = Goal("val/accuracy", "max", target=0.9)
    with rankzero.track(
        "deepspeed-digits", {**config, "epochs": epochs}, name=name, goal=goal
    ) as run:
        # Each rank has a part of the state, so the ranks save and load it together.
        folder = Path("deepspeed", name or "unnamed").resolve()
        resumes = name is not None and folder.exists()
        loaded, state = engine.load_checkpoint(folder) if resumes else (None, {})
        first = state["epoch"] + 1 if loaded else 0
        for epoch in range(first, epochs):
            sampler.set_epoch(epoch)
            engine.train()
            for step, batch in enumerate(loader, epoch * len(loader) + 1):
                batch_images, batch_labels = (tensor.to(engine.device) for tensor in batch)
                loss = cross_entropy(engine(batch_images), batch_labels)
                engine.backward(loss)
                engine.step()
                run.log({"train/loss": loss}, step)
            run.evaluated({"val/accuracy": accuracy(engine, val)}, step)
            engine.save_checkpoint(folder, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
        run.log_artifact(folder / f"epoch-{epochs - 1}", "deepspeed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=5)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--name")
    parser.add_argument("--local_rank", help="what DeepSpeed's launcher adds")
    options = parser.parse_args()
    main(options.epochs, options.stage, options.name)
