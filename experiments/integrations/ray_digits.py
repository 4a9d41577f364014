"""Digits with Ray Train on two CPU workers, tracked.

python experiments/integrations/ray_digits.py [epochs] [name]

If a worker dies, Ray starts all of them again, and the run continues from its last checkpoint. So
does a second call with the same name.
"""

import os
import secrets
import sys
from pathlib import Path

import ray
import torch
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import rankzero
from rankzero import Goal

sys.path.insert(0, str(Path(__file__).parents[1]))

from digits import Digits, convnet

BATCH_SIZE = 64
WORKERS = 2


def train_loop_per_worker(config: dict) -> None:
    training_set, validation_set = Digits().data()
    size = train.get_context().get_world_size()
    model = convnet(16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    goal = Goal("val/accuracy", "max", target=0.9)
    with rankzero.track(
        "ray-digits", config, name=config["name"], goal=goal, folder=config["folder"]
    ) as run:
        state, first = run.latest(), 0
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["epoch"] + 1
        model = prepare_model(model)
        loader = prepare_data_loader(
            DataLoader(training_set, BATCH_SIZE // size, shuffle=True, drop_last=True)
        )
        images, labels = validation_set.tensors
        for epoch in range(first, config["epochs"]):
            loader.sampler.set_epoch(epoch)
            model.train()
            for number, (batch_images, batch_labels) in enumerate(loader, epoch * len(loader) + 1):
                loss = cross_entropy(model(batch_images), batch_labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log({"train/loss": loss}, step=number)
            net = getattr(model, "module", model).eval()
            with torch.no_grad():
                accuracy = (net(images).argmax(-1) == labels).float().mean()
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            }
            run.checkpoint(state, number, {"val/accuracy": accuracy})
            train.report({"val/accuracy": float(accuracy)})


def main(epochs: int, name: str | None = None) -> None:
    # The workers import digits.py, too.
    environ = {"PYTHONPATH": str(Path(__file__).parents[1])}
    ray.init(num_cpus=WORKERS, include_dashboard=False, runtime_env={"env_vars": environ})
    config = {
        "epochs": epochs,
        "lr": 3e-3,
        # The workers of a second attempt find the run by its name.
        "name": name or f"ray-{secrets.token_hex(3)}",
        # A worker has a working directory of its own.
        "folder": str(Path(os.environ.get("RANKZERO_DIR", "mlruns")).resolve()),
    }
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            storage_path=str(Path("ray").resolve()), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, *sys.argv[2:3])
