"""Digits with Transformers' Trainer, tracked.

python experiments/integrations/transformers_digits.py [epochs]
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from rankzero import Goal
from rankzero.integrations.transformers import RankZeroCallback

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = convnet(16)

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def main(epochs: int) -> None:
    train, val = (
        [{"images": image, "labels": label} for image, label in data] for data in Digits().data()
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=360,
            learning_rate=3e-3,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,
        )
        trainer = Trainer(
            Classifier(),
            arguments,
            train_dataset=train,
            eval_dataset=val,
            compute_metrics=accuracy,
            callbacks=[
                RankZeroCallback(
                    "transformers-digits", goal=Goal("val/accuracy", "max", target=0.9)
                )
            ],
        )
        trainer.train()


def accuracy(evaluated):
    return {
        "accuracy": float(
            (
                torch.as_tensor(evaluated.predictions).argmax(-1)
                == torch.as_tensor(evaluated.label_ids)
            )
            .float()
            .mean()
        )
    }


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
