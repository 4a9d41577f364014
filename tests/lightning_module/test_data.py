"""The data sets of Lightning's hooks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from rankzero.lightning_module import data


class Hooks:
    """Has a data module's hooks, of which `val_dataloader` is Lightning's own."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        return DataLoader([1, 2])  # type: ignore[arg-type]

    def val_dataloader(self) -> Any: ...


Hooks.val_dataloader.__module__ = "lightning.pytorch.core.hooks"


def test_a_validation_loader_that_is_set_on_the_object_counts() -> None:
    source: Any = Hooks()
    assert data.from_hooks(source).val is None
    source.val_dataloader = lambda: DataLoader([3])  # type: ignore[arg-type]
    assert data.from_hooks(source).val == [3]
