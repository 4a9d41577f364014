"""How malloc treats the memory that a training step frees.

glibc returns it to the kernel, and the next step gets it again page by page. In a forked process it
does so more often. A step of a small convnet took 300 to 850 page faults in a new process, and 600
to 1,250 in a fork: 5 to 20 % of its time on the CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# The names in malloc.h: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# A process keeps at most so much free memory at the end of its heap.
_KEPT_BYTES = 1 << 30
# Larger blocks still come from the kernel. Older versions of glibc accept 32 MiB at most.
_LARGE_BYTES = (1 << 28, 1 << 25)


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> None:
    """Have this process keep the memory that it frees. Call it once the data and the model exist.

    Does nothing without glibc, and nothing if the user has set malloc's own variables.
    """
    is_set = any(name.startswith("MALLOC_") for name in environ)
    if is_set or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGE_BYTES)
