"""Digests of data: equal for equal data, cheap, and computed without random numbers."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from rankzero.training.data.digest import INDICES, ROWS, compute, describe


def tensors(seed: int = 0, count: int = 100) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, 4, generator=generator), torch.arange(count))


class Wrapped(Dataset[Any]):
    """Changes what another makes, at random."""

    def __init__(self, inner: Any, strength: float = 0.1) -> None:
        self.inner, self.strength = inner, strength

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return x + self.strength * torch.randn_like(x), y


class Files(Dataset[Any]):
    """Like torchvision's ImageFolder: a root, and a list of files with labels."""

    def __init__(self, root: Path, count: int = 50) -> None:
        self.root = root
        self.samples = [(str(root / f"class_{n % 3}" / f"{n}.png"), n % 3) for n in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no file needs to be read")


class Computed(Dataset[Any]):
    """Holds nothing. Makes each sample when asked, from its own random numbers and a file."""

    def __init__(self, slope: float = 1.0, noisy: bool = False) -> None:
        self.slope, self.noisy = slope, noisy
        self._file: list[int] | None = None
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        self._file = self._file or []
        self._file.append(index)
        return {
            "x": self.slope * index + torch.rand(3, generator=self.generator),
            "y": (index % 2, "text"),
        }


class Odd:
    """No data set of anybody's making."""

    def __len__(self) -> int:
        return 3

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("do not look at me")

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("nor read me")


def kinds() -> dict[str, Any]:
    return {
        "tensors": tensors(),
        "subset": Subset(tensors(), range(50)),
        "other subset": Subset(tensors(), range(50, 100)),
        "joined": ConcatDataset([tensors(), tensors(1)]),
        "joined otherwise": ConcatDataset([tensors(1), tensors()]),
        "wrapped": Wrapped(tensors()),
        "other numbers": tensors(1),
        "fewer": tensors(0, 99),
        "other type": TensorDataset(tensors().tensors[0].double(), tensors().tensors[1]),
        "files": Files(Path("/data/one")),
        "fewer files": Files(Path("/data/one"), 49),
        "computed": Computed(),
        "computed otherwise": Computed(2.0),
        "random": Computed(noisy=True),
        "some computed": Subset(Computed(), range(50)),
        "others computed": Subset(Computed(), range(50, 100)),
        "odd": Odd(),
        "empty rows": TensorDataset(torch.zeros(5, 0)),
        "bytes": TensorDataset(
            torch.zeros(5, 2, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bool)
        ),
    }


@pytest.mark.parametrize("name", list(kinds()))
def test_a_digest_depends_on_the_data_and_not_on_random_numbers(name: str) -> None:
    torch.manual_seed(1)
    one = compute(kinds()[name])
    torch.manual_seed(2)
    assert compute(kinds()[name]) == one
    assert len(one[0]) == 16 and one[1]


def test_different_data_have_different_digests() -> None:
    found = {name: compute(dataset)[0] for name, dataset in kinds().items()}
    assert len(set(found.values())) == len(found), found


def random_state() -> bytes:
    return pickle.dumps((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()))


def test_no_random_number_is_drawn() -> None:
    before = random_state()
    for dataset in kinds().values():
        compute(dataset)
    assert random_state() == before


def test_augmentation_is_not_run_and_changes_no_digest() -> None:
    assert compute(Wrapped(tensors(), 0.1)) == compute(Wrapped(tensors(), 5.0))
    assert compute(Wrapped(Computed(), 0.1)) == compute(Wrapped(Computed(), 5.0))


def test_no_sample_is_read() -> None:
    computed = Computed()
    before = computed.generator.get_state()
    parts: list[Any] = [
        Subset(computed, range(9)),
        ConcatDataset([computed, tensors()]),
        Wrapped(computed),
    ]
    for dataset in (computed, *parts):
        describe(dataset, "training", "x.py")
    assert computed._file is None and torch.equal(computed.generator.get_state(), before)
    assert compute(computed)[1] == "its type, its length, noisy, slope"


def test_a_digest_does_not_depend_on_the_folder() -> None:
    assert compute(Files(Path("/data/one"))) == compute(Files(Path("/mnt/other")))


class Counted(list[int]):
    """Records which of its entries are looked at; is never walked through."""

    def __init__(self, entries: Any) -> None:
        super().__init__(entries)
        self.places: list[int] = []

    def __getitem__(self, place: Any) -> Any:
        self.places.append(place)
        return super().__getitem__(place)

    def __iter__(self) -> Any:
        raise AssertionError("all of it is read")


class Holding(Dataset[Any]):
    """Holds one thing."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)


def test_only_some_entries_of_long_lists_are_read() -> None:
    indices, labels = Counted([n % 100 for n in range(1_000_000)]), Counted(range(1_000_000))
    compute(Subset(tensors(), indices))
    assert len(indices.places) == INDICES
    assert compute(Holding(labels))[1].endswith("held") and len(labels.places) <= ROWS + 1
    for places in (indices.places, labels.places):
        assert min(places) == 0 and max(places) == 999_999, "from the first to the last"
    few = Counted([5, 6, 7])
    compute(Holding(few))
    assert set(few.places) == {0, 1, 2}


def volumes() -> dict[str, Any]:
    """Return arrays of which no row fits into any machine's memory."""
    shape = 200, 4096, 4096, 4096
    ramp = torch.arange(4096.0).view(1, 4096, 1, 1)
    return {
        "tensor": torch.zeros(1).expand(shape),
        "strided": ramp.expand(shape).transpose(1, 3),
        "array": np.broadcast_to(np.zeros(1, np.float32), shape),
    }


@pytest.mark.parametrize("name", list(volumes()))
def test_only_some_values_of_huge_rows_are_copied(name: str) -> None:
    assert compute(Holding(volumes()[name]))[1] == "up to 64 rows of held"


def test_arrays_tensors_and_views_of_the_same_numbers_have_one_digest(tmp_path: Path) -> None:
    tensor = torch.rand(100, 3, 70, 50)
    turned = tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    alike = [tensor, turned, tensor.numpy(), turned.numpy()]
    assert not turned.is_contiguous() and len({compute(Holding(held)) for held in alike}) == 1
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(100, 3, 70, 50))
    assert compute(Holding(mapped))[1] == "up to 64 rows of held"


def test_a_subset_has_one_digest_for_any_type_of_indices() -> None:
    rows = torch.randperm(10_000)
    alike = [rows, rows.numpy(), rows.tolist(), list(rows)]
    assert len({compute(Subset(tensors(), indices)) for indices in alike}) == 1  # type: ignore[arg-type]


def test_a_description_names_the_data_and_their_source() -> None:
    said = describe(Subset(tensors(), range(10)), "training", "experiments/digits.py:Digits")
    assert (said.name, said.context, said.samples) == ("digits", "training", 10)
    assert (said.source_type, said.source) == ("code", "experiments/digits.py:Digits")
    assert said.columns == {"0": "float32[3, 4]", "1": "int64"}
    files = describe(Wrapped(Files(Path("/data/one"))), "validation", "x.py")
    assert (files.name, files.source_type, files.source) == ("Files", "local", "/data/one")
    assert describe(Odd(), "training", "x.py").name == "Odd"


def test_passwords_in_a_root_are_redacted() -> None:
    said = describe(Files(Path("x")), "training", "x.py")
    assert said.source.endswith("/x")
    remote = Files(Path("x"))
    remote.root = "s3://user:hunter2@bucket/data"  # type: ignore[assignment]
    assert describe(remote, "training", "x.py").source == "s3://bucket/data"


class Looped(Wrapped):
    """Knows its length without the data set that it holds."""

    def __len__(self) -> int:
        return 3


def test_data_sets_may_hold_each_other() -> None:
    one, other = Looped(tensors()), Looped(tensors())
    one.inner, other.inner = other, one
    assert describe(one, "training", "x.py").name == "Looped"
