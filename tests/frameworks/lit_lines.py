"""A Lightning file with a data module, metric objects, a scheduler and hyperparameters."""

from lightning.pytorch import LightningDataModule, LightningModule
from tests_data import points
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, random_split
from torchmetrics.classification import MulticlassAccuracy

from rankzero import Choice, Goal, Train

train = Train(epochs=3, batch_size=32)
goal = Goal("val/acc", "max", target=0.9)
search = {"width": Choice(4, 8)}


class Points(LightningDataModule):
    def __init__(self, samples: int = 400, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def prepare_data(self):
        points(self.hparams.samples)

    def setup(self, stage):
        assert stage == "fit"
        self.train_set, self.val_set = random_split(points(self.hparams.samples), [0.75, 0.25])

    def train_dataloader(self):
        return DataLoader(self.train_set, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, self.hparams.batch_size)


class Lines(LightningModule):
    def __init__(self, width: int = 8, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        assert inputs.device == self.device and batch_idx < self.trainer.num_training_batches
        loss = cross_entropy(self(inputs), labels)
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch):
        inputs, labels = batch
        outputs = self(inputs)
        self.accuracy(outputs, labels)
        self.log_dict({"val_loss": cross_entropy(outputs, labels), "val_acc": self.accuracy})

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = optim.lr_scheduler.CosineAnnealingLR(
            optimizer, self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
