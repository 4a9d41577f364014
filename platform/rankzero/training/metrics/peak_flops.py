"""How many operations per second a GPU can do at most, by its name. Pure.

Source: NVIDIA's data sheets, in TFLOP/s, without sparsity. For GeForce and RTX, the Tensor Core
figures with fp32 accumulation of NVIDIA's architecture white papers.
"""

from __future__ import annotations

import re

# The words of a name, and the peaks in fp32, tf32, and bf16 or fp16. The first match counts.
_TERAFLOPS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    ("B200", 75, 1125, 2250),
    ("H200 NVL", 60, 417.5, 835.5),
    ("H200", 67, 494.5, 989.5),
    ("GH200", 67, 494.5, 989.5),
    ("H100 PCIe", 51, 378, 756),
    ("H100 NVL", 60, 417.5, 835.5),
    ("H100", 67, 494.5, 989.5),
    ("A100", 19.5, 156, 312),
    ("A40", 37.4, 74.8, 149.7),
    ("A30", 10.3, 82, 165),
    ("A10", 31.2, 62.5, 125),
    ("L40S", 91.6, 183, 362),
    ("L40", 90.5, 90.5, 181),
    ("L4", 30.3, 60, 121),
    ("RTX 6000 Ada", 91.1, 182.1, 364.2),
    ("RTX A6000", 38.7, 77.4, 154.8),
    ("RTX 4090", 82.6, 82.6, 165.2),
    ("RTX 3090", 35.6, 35.6, 71),
    ("V100 SXM2", 15.7, None, 125),
    ("T4", 8.1, None, 65),
)
# A part of a GPU, and slower ones of the same name.
_OTHERS = {"MIG", "Laptop", "Ti", "D", "Max"}


def peak_flops(name: str, precision: str) -> float | None:
    """Return FLOP/s of the GPU that PyTorch calls `name`, or None if it is not known."""
    words = set(re.split(r"[\s-]+", name))
    for known, fp32, tf32, half in _TERAFLOPS:
        if set(known.split()) <= words and not words & _OTHERS:
            # The V100 and the T4 compute fp16 in Tensor Cores, and bf16 without them.
            peak = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": tf32 and half}[precision]
            return None if peak is None else peak * 1e12
    return None
