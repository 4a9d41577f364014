"""Thin adapters for other training frameworks. Each file imports its framework itself.

    pip install rankzero[lightning]      from rankzero.integrations.lightning import RankZeroLogger,
    RankZeroCallback pip install rankzero[transformers]   from rankzero.integrations.transformers
    import RankZeroCallback pip install rankzero[accelerate]     from
    rankzero.integrations.accelerate import RankZeroTracker pip install rankzero[ignite]
    from rankzero.integrations.ignite import RankZeroHandler pip install rankzero[keras]
    from rankzero.integrations.keras import RankZeroCallback

All are safe on every rank. They use `rankzero.track`, so their runs have a journal, a recorder, GPU
usage, checkpoints and the true status.
"""
