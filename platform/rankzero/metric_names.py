"""Names of the metrics that RankZero itself logs."""

from __future__ import annotations

SPEED = "throughput/samples_per_second"
TOKENS, MFU = "throughput/tokens_per_second", "throughput/mfu"
STEP_SECONDS, DATA_WAIT = "throughput/step_seconds", "throughput/data_wait_fraction"
WHOLE_RUN = "whole_run"  # sorts behind throughput, train and val
