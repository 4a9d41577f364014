"""Handwritten digits as MNIST has them, from scikit-learn, for the files that once loaded MNIST."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

TRAINING_SAMPLES = 1437


def digits(side: int = 28) -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 digits for training and 360 for validation, as MNIST has 60,000 and 10,000.

    Images are [1, side, side] from 0 to 1. They are enlarged from 8 x 8 pixels.
    """
    # Importing scikit-learn would take seconds in every process, so this reads its data file.
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "pip install scikit-learn"
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    small, labels = table[:, :-1].view(-1, 1, 8, 8) / 16, table[:, -1].long()
    images = interpolate(small, side, mode="bilinear")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:TRAINING_SAMPLES], order[TRAINING_SAMPLES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])
