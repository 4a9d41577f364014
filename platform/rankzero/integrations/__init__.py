"""Thin adapters for people who train with another framework: each a file, each imports its framework itself.

    pip install rankzero[lightning]      from rankzero.integrations.lightning import RankZeroLogger, RankZeroCallback
    pip install rankzero[transformers]   from rankzero.integrations.transformers import RankZeroCallback
    pip install rankzero[accelerate]     from rankzero.integrations.accelerate import RankZeroTracker
    pip install rankzero[ignite]         from rankzero.integrations.ignite import RankZeroHandler
    pip install rankzero[keras]          from rankzero.integrations.keras import RankZeroCallback

All are safe on every rank, and stand on `rankzero.track`: journal, recorder, GPU use, checkpoints, truthful status.
"""
