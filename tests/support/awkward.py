"""A data set that no process can send to another, and a rank that loads it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from rankzero import ranks as launcher
from rankzero.launch.signals import unblocks_itself
from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import BatchOrder
from rankzero.training.stop import StopRequest, handle_signals


class Filed(Dataset[Any]):
    """Numbers in a file that stays open. Between seek and read, another process may seek."""

    def __init__(self, count: int, path: Path) -> None:
        self.count = count
        path.write_bytes(b"".join(number.to_bytes(8, "big") for number in range(count)))
        self.reading = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.reading.seek(8 * index)
        time.sleep(0.001)
        return torch.tensor(int.from_bytes(self.reading.read(8), "big"))


def awkward(count: int, path: Path) -> Dataset[Any]:
    """Return a local class with a lambda, an open file, and more tensors than a message takes."""

    class Local(Filed):
        def __init__(self) -> None:
            super().__init__(count, path)
            self.tensors = [torch.tensor(number) for number in range(count)]
            self.change = lambda tensor: tensor + 1000

        def __getitem__(self, index: int) -> Tensor:
            return self.change(super().__getitem__(index) + self.tensors[index])

    return Local()


@unblocks_itself
def load(folder: str) -> str:
    """Load an epoch, while its loading processes get the signals of a scheduler."""
    ranks = launcher.detect()
    handle_signals(stop := StopRequest())
    dataset = awkward(400, Path(folder) / f"{ranks.rank}.bin")
    loader = BatchLoader(dataset, torch.device("cpu"), seed=3, workers=2, collate=default_collate)
    batches = loader.train_batches(BatchOrder(400, 8, 4, 2, 3), ranks.rank, 0, 50)
    values = next(batches).tolist()
    loading = [str(one.pid) for one in multiprocessing.active_children()]
    for number in ("TERM", "USR1", "INT"):
        # From another process: they end if their own rank terminates them.
        subprocess.run(["kill", f"-{number}", *loading], check=True)
    values += [value for batch in batches for value in batch.tolist()]
    found = {"values": values, "stopped": bool(stop.code)}
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(found))
    return "FINISHED"
