"""Measure what the Lightning adapter costs Lightning's own loop, next to Lightning's own loggers.

    .venv-integrations/bin/python benchmarks/adapters.py [--rounds 3] [--others]

Takes about seven minutes, and twice as long with --others. Run `make environment-integrations`
first.

A round has four trainings, each in a fresh process: no logger, RankZero's logger and callback
twice, no logger. With --others, Lightning's loggers follow, and no logger again. Every logger logs
a point every step. The time is that of `Trainer.fit`, without the first epoch.
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

# Half a minute on one core. Runs of 40 epochs take six seconds, of which MLflow's import is a part.
EPOCHS = 200
WANTED = 0.98
OTHERS = "MLFlowLogger", "CSVLogger", "TensorBoardLogger"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--others", action="store_true", help="measure Lightning's loggers, too")
    options = parser.parse_args()
    # The machine's speed drifts within minutes, so what is compared stands close together.
    order = ["none", "RankZeroLogger", "RankZeroLogger", "none"]
    order += [*OTHERS, "none"] if options.others else []
    seconds: dict[str, list[float]] = {who: [] for who in order}
    for _ in range(options.rounds):
        found: dict[str, list[float]] = {who: [] for who in order}
        for who in order:
            found[who].append(seconds_of(who, options.epochs))
        for who, readings in found.items():
            seconds[who].append(sum(readings) / len(readings))
    none = seconds["none"]
    ratio = {who: ratios(none, seconds[who]) for who in seconds if who != "none"}
    for name, one in ratio.items():
        print(line(f"steps/s with {name} over none", one, f">= {WANTED}"))
    if options.rounds > 2:
        save("adapters", ratio=ratio, seconds=seconds, wanted=WANTED, epochs=options.epochs)


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
    from lightning.pytorch import Callback, Trainer, loggers
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
    if who == "RankZeroLogger":
        logger = RankZeroLogger("adapters")
        callbacks.append(RankZeroCallback(logger))
    elif who == "MLFlowLogger":
        uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
        logger = loggers.MLFlowLogger("adapters", tracking_uri=uri)
    elif who != "none":
        logger = getattr(loggers, who)("logs")
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=callbacks,
        log_every_n_steps=1 if who in OTHERS else 50,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(LitDigits(), DataLoader(train, 64, shuffle=True, drop_last=True))
    print(json.dumps(time.perf_counter() - clock.start))


if __name__ == "__main__":
    child(sys.argv[2], int(sys.argv[3])) if sys.argv[1:2] == ["--child"] else main()
