"""Images of an experiment's `pictures`, and the class names of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from rankzero.training.sample_images.user_images import (
    MAX_CLASSES,
    MAX_NAME_BYTES,
    MAX_PIXELS,
    class_names,
    images_of,
)

X, Y, OUT = torch.rand(4, 3, 5, 5), torch.tensor([0, 1, 0, 1]), torch.rand(4, 2)


def test_class_names_of_a_subset_are_those_of_its_data_set() -> None:
    inner = TensorDataset(X, Y)
    assert class_names(Subset(inner, [0])) == []
    inner.classes = ("cat", "dog")  # type: ignore[attr-defined]
    assert class_names(Subset(Subset(inner, [0, 1]), [0])) == ["cat", "dog"]
    looped = Subset(inner, [0])
    looped.dataset = looped
    assert class_names(looped) == []


class Lazy(TensorDataset):
    """Computes its classes from all of its labels."""

    asked = 0

    @property
    def classes(self) -> list[str]:
        Lazy.asked += 1
        return ["a"]


def test_class_names_are_not_read_from_properties() -> None:
    Lazy.asked = 0
    assert class_names(Subset(Lazy(X, Y), [0])) == [] and Lazy.asked == 0
    inner = TensorDataset(X, Y)
    inner.classes = [("tench", "Tinca tinca"), ("goldfish",), "shark"]  # type: ignore[attr-defined]
    assert class_names(inner) == ["tench", "goldfish", "shark"]
    inner.classes = ["x"] * (MAX_CLASSES + 1)  # type: ignore[attr-defined]
    assert class_names(inner) == []


def test_names_of_own_pictures_are_short_and_unique() -> None:
    keys = ["é" * 100, "é" * 101, "é" * 30, 1, "1", "a\ud800"]
    found = list(images_of(dict.fromkeys(keys, X[0])))
    assert found == ["é" * 30, "é" * 28 + " (2)", "é" * 28 + " (3)", "1", "1 (2)", "a?"]
    assert all(len(name.encode()) <= MAX_NAME_BYTES for name in found)


def images() -> dict[str, tuple[Any, tuple[int, ...]]]:
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(2, 1))
    figure.subplots()
    return {
        "tensor": (torch.rand(3, 5, 7), (5, 7, 3)),
        "bytes": (torch.zeros(5, 7, dtype=torch.uint8), (5, 7, 1)),
        "half": (torch.rand(1, 5, 7).bfloat16(), (5, 7, 1)),
        "array": (np.random.default_rng(0).normal(size=(5, 7, 3)), (5, 7, 3)),
        "mask": (np.ones((5, 7), bool), (5, 7, 1)),
        "pil": (Image.new("L", (7, 5)), (5, 7, 3)),
        "alpha": (Image.new("LA", (7, 5)), (5, 7, 4)),
        "lab": (Image.new("LAB", (7, 5)), (5, 7, 3)),
        "figure": (figure, (120, 240, 3)),
        "huge": (torch.zeros(5000, 10), (1667, 4, 1)),
    }


@pytest.mark.parametrize("name", list(images()))
def test_every_kind_of_image_becomes_bytes(name: str) -> None:
    image, shape = images()[name]
    found = images_of({"it": image})["it"]
    assert found.shape == shape and found.dtype == np.uint8


@pytest.mark.parametrize("kind", ["float32", "uint16", "int32"])
def test_numbers_of_a_pil_image_are_scaled_as_those_of_an_array(kind: str) -> None:
    from PIL import Image

    array = (np.linspace(0, 1, 64) * (1 if kind == "float32" else 60000)).reshape(8, 8).astype(kind)
    expected = images_of({"it": array})["it"]
    assert (images_of({"it": Image.fromarray(array)})["it"] == expected).all()


@pytest.mark.parametrize(
    "image, expected, notes",
    [
        (np.array([[0, 7, 255]]), [0, 7, 255], 0),
        (np.array([[0, 1, 1]]), [0, 255, 255], 0),
        (np.array([[0.0, 0.2, 1.0]]), [0, 51, 255], 0),
        (np.array([[0, 255, 510]]), [0, 128, 255], 1),
        (np.array([[-1.0, 0.0, 1.0]]), [0, 128, 255], 1),
        (np.array([[0.0, 127.5, 255.0]]), [0, 128, 255], 1),
    ],
)
def test_only_values_out_of_range_are_scaled(image: Any, expected: list[int], notes: int) -> None:
    told: list[str] = []
    found = images_of({"it": image}, lambda about, text: told.append(about))["it"]
    assert found.ravel().tolist() == expected and told == ["scaled image"] * notes


@pytest.mark.parametrize(
    "image, expected",
    [
        ([[np.nan, 0.2, 1.0, np.inf]], [0, 51, 255, 0]),
        ([[np.nan, 5.0, 6.0, -np.inf]], [0, 0, 255, 0]),
        ([[np.nan, -5.0, -4.0, np.nan]], [0, 0, 255, 0]),
        ([[np.nan, np.nan]], [0, 0]),
    ],
)
def test_values_that_are_not_finite_are_black_with_a_note(image: Any, expected: list[int]) -> None:
    told: list[str] = []
    found = images_of({"it": np.array(image)}, lambda _, text: told.append(text))["it"]
    assert found.ravel().tolist() == expected
    assert told[0] == "the image 'it' has values that are not finite: they are shown black"


def test_huge_image_is_thinned_before_it_is_copied() -> None:
    huge = np.broadcast_to(np.float32(0.5), (1_000_000, 1_000_000))
    found = images_of({"it": huge})["it"]
    assert max(found.shape) <= MAX_PIXELS and (found == 128).all()


@pytest.mark.parametrize(
    "odd", ["a path", None, torch.zeros(2, 2, 2, 2), np.zeros((5, 5, 2)), np.array([["a"]])]
)
def test_other_types_and_shapes_are_refused(odd: Any) -> None:
    with pytest.raises(ValueError, match=r"is no tensor|shape|numbers"):
        images_of({"it": odd})
