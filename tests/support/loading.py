"""A process with loading processes, as a rank has them. It prints their ids and waits.

python loading.py METHOD [END]    (default: none is set; END: it ends instead of waiting)
"""

import multiprocessing
import sys
import time

import torch
from torch.utils.data import default_collate

from rankzero.training.data.loader import BatchLoader
from rankzero.training.data.order import BatchOrder

if __name__ == "__main__":
    if sys.argv[1] != "default":
        multiprocessing.set_start_method(sys.argv[1])
    plan = BatchOrder(samples=1000, batch_size=8, micro_batch=8, world_size=1, seed=3)
    feed = BatchLoader(
        list(range(1000)), torch.device("cpu"), seed=3, workers=2, collate=default_collate
    )
    batches = feed.train_batches(plan, 0, 0, 100)
    next(batches)
    print(*(one.pid for one in multiprocessing.active_children()), flush=True)
    if len(sys.argv) == 2:
        time.sleep(600)
