"""What the job's GPUs do. The only file that imports pynvml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class GpuSampler:
    """Reads the job's GPUs."""

    def __init__(self, uuids: Sequence[str] | None, environ: Mapping[str, str]) -> None:
        self.notices: list[str] = []

    def describe(self) -> dict[str, str]:
        return {}

    def sample(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return None
