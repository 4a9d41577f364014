"""Confusion counts and the hardest mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from rankzero.training.sample_images import mistakes as module
from rankzero.training.sample_images.mistakes import (
    ClassifiedBatch,
    Mistakes,
    classified,
    small,
)


def a_batch(samples: int, classes: int, seed: int) -> ClassifiedBatch:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(samples, 1, 4, 4, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return ClassifiedBatch(images, labels, torch.randn(samples, classes, generator=generator))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    classes=st.integers(2, 7),
    seed=st.integers(0, 999),
)
def test_confusions_and_hardest_mistakes_equal_a_direct_computation(
    sizes: list[int], classes: int, seed: int
) -> None:
    batches = [a_batch(size, classes, seed + number) for number, size in enumerate(sizes)]
    seen = Mistakes()
    for batch in batches:
        seen.add(batch)
    found = seen.read()
    assert found is not None
    labels = torch.cat([batch.labels for batch in batches])
    output = torch.cat([batch.output for batch in batches])
    predicted = output.argmax(1)
    pairs = (labels * classes + predicted).numpy()
    assert (found["confusion"].flatten() == np.bincount(pairs, minlength=classes**2)).all()
    losses = cross_entropy(output, labels, reduction="none")
    wrong = (predicted != labels).nonzero().flatten()
    hardest = wrong[losses[wrong].argsort(descending=True)][: module.MAX_SHOWN]
    assert found["mistakes_true"].tolist() == labels[hardest].tolist()
    assert found["mistakes_predicted"].tolist() == predicted[hardest].tolist()
    assert (
        len(found["mistakes"]) == len(hardest)
        and found["wrong"] == len(wrong)
        and found["samples"] == sum(sizes)
    )


def test_few_samples_wait_and_only_the_first_are_used() -> None:
    seen = Mistakes(max_samples=100, fold_rows=16)
    for seed in range(30):
        seen.add(a_batch(10, 3, seed))
        assert seen._waiting_rows < 16
    found = seen.read()
    assert (
        found is not None and found["confusion"].sum() == found["samples"] == 100 and found["cut"]
    )


def sized(seed: int, channels: int, height: int, width: int) -> ClassifiedBatch:
    batch = a_batch(5, 3, seed)
    return batch._replace(images=torch.rand(5, channels, height, width) + 1)


def test_images_of_different_sizes_get_frames() -> None:
    seen = Mistakes()
    sizes = [(1, 4, 4), (1, 4, 4), (1, 9, 4), (3, 2, 12), (3, 300, 100), (1, 4, 4)]
    for seed, size in enumerate(sizes):
        seen.add(sized(seed, *size))
    found = seen.read()
    assert found is not None and found["confusion"].sum() == found["samples"] == 30
    assert found["mistakes"].shape == (module.MAX_SHOWN, 128, 43, 3)
    whole = found["mistakes"].reshape(module.MAX_SHOWN, -1)
    assert (whole.min(1) == 0).all() and (whole.max(1) == 255).all(), (
        "a frame is no brighter or darker than its image"
    )


def test_outputs_of_different_widths_are_refused() -> None:
    seen = Mistakes()
    seen.add(a_batch(5, 3, 0))
    with pytest.raises(ValueError, match="3 columns and 4"):
        seen.add(a_batch(5, 4, 0))


def test_outputs_are_copied_before_the_next_call_overwrites_them() -> None:
    # A model compiled with CUDA graphs writes every output into the same memory.
    place = torch.tensor([[2.0, 1.0]] * 4)
    kept = classified((X, Y), place)
    place.copy_(torch.tensor([[0.0, 9.0]] * 4))
    assert kept is not None and (kept.output.argmax(1) == 0).all()


@pytest.mark.parametrize("label", [-100, 3])
def test_labels_outside_the_classes_give_no_pictures(label: int) -> None:
    batch = a_batch(8, 3, 0)
    batch.labels[2] = label
    seen = Mistakes()
    seen.add(batch)
    assert seen.read() is None


def test_outputs_that_are_not_finite_do_no_harm() -> None:
    batch = a_batch(8, 3, 0)
    batch.output[1:4] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    batch.images[:] = float("nan")
    seen = Mistakes()
    seen.add(batch)
    found = seen.read()
    assert found is not None and found["confusion"].sum() == 8 and found["mistakes"].max() == 0


def test_many_classes_have_mistakes_and_no_matrix() -> None:
    seen = Mistakes()
    seen.add(a_batch(20, module.MAX_CLASSES + 1, 0))
    found = seen.read()
    assert (
        found is not None
        and "confusion" not in found
        and len(found["mistakes"]) == module.MAX_SHOWN
    )


def test_large_images_are_made_small() -> None:
    assert small(torch.rand(2, 3, 512, 256)).shape == (
        2,
        3,
        module.MAX_PIXELS,
        module.MAX_PIXELS // 2,
    )
    assert small(torch.rand(2, 1, 8, 8)).shape == (2, 1, 8, 8)


X, Y, OUT = torch.rand(4, 3, 5, 5), torch.tensor([0, 1, 0, 1]), torch.rand(4, 2)


@pytest.mark.parametrize(
    ("batch", "output"),
    [
        ((X, Y), OUT[:, :1]),
        ((X, Y), OUT.flatten()),
        ((X, Y), OUT[:2]),
        ((X, Y), OUT.long()),
        ((X, Y), {"logits": OUT}),
        ((X, Y.float()), OUT),
        ((X, Y > 0), OUT),
        ((X, Y.view(2, 2)), OUT),
        ((X, Y[:3]), OUT),
        ((X.flatten(1), Y), OUT),
        ((X[:, :2], Y), OUT),
        ((X.byte(), Y), OUT),
        ((X[:0], Y[:0]), OUT[:0]),
        ((X, Y, Y), OUT),
        ({"x": X, "y": Y}, OUT),
        (X, OUT),
        (None, None),
    ],
)
def test_other_batches_and_outputs_are_ignored(batch: Any, output: Any) -> None:
    assert classified((X, Y), OUT) is not None
    assert classified(batch, output) is None
