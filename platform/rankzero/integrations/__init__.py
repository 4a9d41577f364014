"""Thin adapters for other training frameworks. Each file imports its framework itself.

from rankzero.integrations.lightning import RankZeroLogger, RankZeroCallback
from rankzero.integrations.transformers import RankZeroCallback
from rankzero.integrations.accelerate import RankZeroTracker
from rankzero.integrations.ignite import RankZeroHandler
from rankzero.integrations.keras import RankZeroCallback

`pip install rankzero[FRAMEWORK]` installs a framework. All adapters are safe on every rank. They
use `rankzero.track`, so their runs have a journal, a recorder, GPU usage, checkpoints and the true
status.
"""
