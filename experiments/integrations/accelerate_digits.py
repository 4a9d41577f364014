"""Digits with Accelerate, tracked.

accelerate launch experiments/integrations/accelerate_digits.py [epochs]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from rankzero import Goal
from rankzero.integrations.accelerate import RankZeroTracker

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet


def main(epochs: int) -> None:
    tracker = RankZeroTracker("accelerate-digits", goal=Goal("val/accuracy", "max", target=0.9))
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("accelerate-digits", config={"epochs": epochs, "lr": 3e-3})
    train, val = Digits().data()
    model = convnet(16)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(train, 64, shuffle=True, drop_last=True),
    )
    images, labels = (tensor.to(accelerator.device) for tensor in val.tensors)
    step = 0
    for _ in range(epochs):
        model.train()
        for batch_images, batch_labels in loader:
            loss = cross_entropy(model(batch_images), batch_labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.log({"train/loss": loss}, step=step)
        model.eval()
        with torch.no_grad():
            accuracy = (model(images).argmax(-1) == labels).float().mean()
        if accelerator.is_main_process:
            state = accelerator.unwrap_model(model).state_dict()
            tracker.tracker.checkpoint({"model": state}, step, {"val/accuracy": accuracy})
    accelerator.end_training()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
