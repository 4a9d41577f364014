"""Digits with Ignite, tracked.

python experiments/integrations/ignite_digits.py [epochs]
"""

import sys
from pathlib import Path

import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from rankzero import Goal
from rankzero.integrations.ignite import RankZeroHandler

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet


def main(epochs: int) -> None:
    train, val = Digits().data()
    model = convnet(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        cross_entropy,
        output_transform=lambda x, y, output, loss: {"loss": loss.detach()},
    )
    evaluator = create_supervised_evaluator(
        model, {"accuracy": Accuracy(), "loss": Loss(cross_entropy)}
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(DataLoader(val, 360)))
    handler = RankZeroHandler(
        "ignite-digits", {"lr": 3e-3}, goal=Goal("val/accuracy", "max", target=0.9)
    )
    handler.attach(trainer, evaluator)
    trainer.run(DataLoader(train, 64, shuffle=True, drop_last=True), max_epochs=epochs)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
