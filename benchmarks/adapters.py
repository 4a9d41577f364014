"""Measure what the Lightning adapter costs Lightning's own loop, next to its MLFlowLogger.

    .venv-integrations/bin/python benchmarks/adapters.py [--rounds 5]

Takes about 5 minutes. Run `make test-integrations` first: it makes that environment.

A round has five trainings, each in a fresh process: no logger, RankZero's logger and callback,
Lightning's MLFlowLogger, RankZero's again, no logger again. Both loggers log a point every step.
The time is that of `Trainer.fit`, without the first epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HERE, line, ratios, save

EPOCHS = 40
WANTED = 0.98


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--epochs",
        type=int,
        default=EPOCHS,
        help="200 take half a minute each, with MLflow's import",
    )
    options = parser.parse_args()
    rounds = options.rounds

    def measured(who: str) -> float:
        return seconds_of(who, options.epochs)

    readings = [
        {
            who: [measured(who) for _ in range(times)]
            for who, times in (("none", 1), ("ours", 1), ("mlflow", 1))
        }
        | {"again": [measured("ours"), measured("none")]}
        for _ in range(rounds)
    ]
    none = [(one["none"][0] + one["again"][1]) / 2 for one in readings]
    ours = [(one["ours"][0] + one["again"][0]) / 2 for one in readings]
    mlflow = [one["mlflow"][0] for one in readings]
    found = {"rankzero": ratios(none, ours), "MLFlowLogger": ratios(none, mlflow)}
    for name, ratio in found.items():
        print(line(f"steps/s with {name} over none", ratio, f">= {WANTED}"))
    if rounds > 2:
        save(
            "adapters",
            ratio=found,
            seconds={"none": none, "rankzero": ours, "MLFlowLogger": mlflow},
            wanted=WANTED,
            epochs=options.epochs,
        )


def seconds_of(who: str, epochs: int) -> float:
    """Return the training seconds of a fresh process with this logger."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--child", who, str(epochs)]
        done = subprocess.run(
            words,
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stdout[-1000:] + done.stderr[-3000:])
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def child(who: str, epochs: int) -> None:
    """Train, and print the seconds of all epochs but the first."""
    sys.path[:0] = [
        str(HERE.parent / "experiments"),
        str(HERE.parent / "experiments" / "integrations"),
    ]
    from digits import Digits
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.loggers import MLFlowLogger
    from lightning_digits import LitDigits
    from torch.utils.data import DataLoader

    from rankzero.integrations.lightning import RankZeroCallback, RankZeroLogger

    class Clock(Callback):
        start = 0.0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.start = self.start or time.perf_counter()

    clock, train = Clock(), Digits().data()[0]
    logger: Any = False
    callbacks: list[Any] = [clock]
    if who == "ours":
        logger = RankZeroLogger("adapters")
        callbacks.append(RankZeroCallback(logger))
    if who == "mlflow":
        logger = MLFlowLogger("adapters", tracking_uri=f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=callbacks,
        log_every_n_steps=1 if who == "mlflow" else 50,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(LitDigits(), DataLoader(train, 64, shuffle=True, drop_last=True))
    print(json.dumps(time.perf_counter() - clock.start))


if __name__ == "__main__":
    child(sys.argv[2], int(sys.argv[3])) if sys.argv[1:2] == ["--child"] else main()
