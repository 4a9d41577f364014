"""Memory that a step frees stays in its process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
from rankzero.training.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()

def step():
    held = [b"x" * (4 << 20) for _ in range(16)]

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def page_faults(mode: str, **environ: str) -> float:
    """Return the page faults of a step that needs 64 MiB for a moment."""
    command = [sys.executable, "-c", STEPS, mode]
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_a_step_gets_the_memory_of_the_step_before() -> None:
    assert page_faults("keep") < 100 < page_faults("leave")


def test_a_users_own_setting_of_malloc_stays() -> None:
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > 100
    assert page_faults("keep", GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072") > 100
