"""The number of cases of the fuzz tests: a few hundred, or ``RANKZERO_FUZZ_CASES``."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("RANKZERO_FUZZ_CASES") or 200)

thorough = settings(
    max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
often = settings(thorough, max_examples=min(CASES, max(200, CASES // 10)))
"""For cases that cost ten times as much."""
seldom = settings(thorough, max_examples=max(10, CASES // 20))
"""For cases that cost twenty times as much."""
patient = pytest.mark.timeout(120 if CASES <= 1000 else 6 * 3600)
