"""A process with loading processes, as a rank has them. It prints their ids and waits.

python loading.py METHOD [END]    (default: none is set; END: it ends instead of waiting, while
                                   the loading processes compute without end)
"""

import multiprocessing
import sys
import time

import torch
from torch.utils.data import default_collate

from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import BatchOrder


class Busy:
    """Loads its first batch at once, and the next one never."""

    loaded = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.loaded += 1
        while self.loaded > 8:
            pass
        return index


if __name__ == "__main__":
    if sys.argv[1] != "default":
        multiprocessing.set_start_method(sys.argv[1])
    plan = BatchOrder(samples=1000, batch_size=8, micro_batch=8, world_size=1, seed=3)
    dataset = Busy() if len(sys.argv) > 2 else list(range(1000))
    feed = BatchLoader(dataset, torch.device("cpu"), seed=3, workers=2, collate=default_collate)
    batches = feed.train_batches(plan, 0, 0, 100)
    next(batches)
    print(*(one.pid for one in multiprocessing.active_children()), flush=True)
    if len(sys.argv) == 2:
        time.sleep(600)
