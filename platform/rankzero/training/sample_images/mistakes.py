"""What a classifier of images gets wrong: confusion counts and the hardest mistakes, kept on the device.

Outputs that an evaluation makes anyway are looked at, a thousand rows at a time. Nothing waits for the device
until `read`, and nothing draws a random number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MOST_SAMPLES = 1 << 16  # of one evaluation, looked at
MOST_CLASSES = 1000  # in a table of confusions: 8 MB
MOST_SHOWN = 16
MOST_PIXELS = 128  # along a side of what is kept of an image
FOLD_ROWS, FOLD_BYTES = 1024, 64 << 20  # what waits to be looked at together
ABSENT = -1.0  # in the place of a loss: no mistake


class ClassifiedBatch(NamedTuple):
    """A batch of images [n, 1 or 3, h, w], its labels [n], and what the model makes of it [n, classes]."""

    images: Tensor
    labels: Tensor
    output: Tensor


def classified(batch: Any, output: Any, classes: int = 0) -> ClassifiedBatch | None:
    """Return a batch as what it is, where it is images with labels and `output` scores of two classes or more.

    `classes`: how many there are, where that is known: other outputs are no scores, but embeddings, say. The output is
    copied: a model compiled with CUDA graphs writes its next one in the same place.
    """
    if not is_labelled_images(batch):
        return None
    images, labels = batch
    fits = (
        type(output) is Tensor
        and output.dim() == 2
        and len(output) == len(images)
        and output.shape[1] >= 2
    )
    if not fits or not output.is_floating_point() or output.device != labels.device:
        return None
    if classes and output.shape[1] != classes:
        return None
    return ClassifiedBatch(images.detach(), labels.detach(), output.detach().clone())


def is_labelled_images(batch: Any) -> bool:
    """Tell whether a batch is a pair of floating-point images [n, 1 or 3, h, w] and whole numbers [n]."""
    if (
        not isinstance(batch, (tuple, list))
        or len(batch) != 2
        or not all(isinstance(one, Tensor) for one in batch)
    ):
        return False
    images, labels = batch
    shaped = (
        images.dim() == 4
        and images.shape[1] in (1, 3)
        and labels.dim() == 1
        and len(images) == len(labels) > 0
    )
    whole = (
        not labels.is_floating_point() and not labels.is_complex() and labels.dtype != torch.bool
    )
    return bool(shaped and whole and images.is_floating_point() and images.device == labels.device)


class Mistakes:
    """What has been seen of one evaluation on this rank. Takes at most `MOST_SAMPLES`, holds bounded memory."""

    def __init__(self) -> None:
        self.samples = 0
        self._waiting: list[ClassifiedBatch] = []
        self._rows = self._bytes = 0
        self._classes: int | None = None
        self._top: HardestMistakes | None = None
        self._confusion: Tensor | None = None
        self._tally: Tensor | None = None
        """How many are wrong, and how many have a label that is no class."""

    def add(self, batch: ClassifiedBatch) -> None:
        """Look at a batch, at once or with the next ones. Raises ValueError where the last had other classes."""
        if self.samples >= MOST_SAMPLES:
            return
        if self._classes not in (None, batch.output.shape[1]):
            raise ValueError(
                f"the model's outputs have {self._classes} columns and {batch.output.shape[1]}"
            )
        self._classes = batch.output.shape[1]
        if self._waiting and self._waiting[0].images.shape[1:] != batch.images.shape[1:]:
            self._fold()
        self.samples += len(batch.labels)
        self._waiting.append(batch)
        self._rows += len(batch.labels)
        self._bytes += sum(tensor.nbytes for tensor in batch)
        if self._rows >= FOLD_ROWS or self._bytes >= FOLD_BYTES:
            self._fold()

    def read(self) -> dict[str, Any] | None:
        """Return what was found as arrays, on the host; None where there is nothing, or labels are no classes."""
        self._fold()
        if self._top is None or self._tally is None:
            return None
        wrong, foreign = self._tally.tolist()
        if foreign:
            return None
        count = int((self._top.losses >= 0).sum())
        found = {
            "mistakes": pixels(self._top.images[:count]),
            "mistakes_true": self._top.labels[:count].cpu().numpy(),
            "mistakes_predicted": self._top.predicted[:count].cpu().numpy(),
            "mistakes_confidence": self._top.confidence[:count].cpu().numpy(),
            "samples": np.int64(self.samples),
            "cut": np.bool_(self.samples >= MOST_SAMPLES),
            "wrong": np.int64(wrong),
        }
        if self._confusion is not None:
            classes = int(len(self._confusion) ** 0.5)
            found["confusion"] = self._confusion[:-1].view(classes, classes).cpu().numpy()
        return found

    def _fold(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._rows, self._bytes = self._waiting, [], 0, 0
        images, labels, output = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*waiting, strict=True)
        )
        classes, scores = output.shape[1], output.float()
        known = (labels >= 0) & (labels < classes)
        labels = labels.clamp(0, classes - 1).long()
        predicted = scores.argmax(1)
        wrong = known & (predicted != labels)
        self._count(classes, known, wrong, labels, predicted)
        losses = functional.cross_entropy(scores, labels, reduction="none").nan_to_num(nan=0.0)
        hardest = torch.where(wrong, losses, ABSENT).topk(min(MOST_SHOWN, len(labels)))
        kept = hardest.indices
        confidence = scores.softmax(1).amax(1)
        top = HardestMistakes(
            hardest.values, small(images[kept]), labels[kept], predicted[kept], confidence[kept]
        )
        self._top = top if self._top is None else _hardest(self._top, top)

    def _count(
        self, classes: int, known: Tensor, wrong: Tensor, labels: Tensor, predicted: Tensor
    ) -> None:
        tally = torch.stack([wrong.sum(), (~known).sum()])
        self._tally = tally if self._tally is None else self._tally + tally
        if classes > MOST_CLASSES:
            return
        if self._confusion is None:
            self._confusion = torch.zeros(
                classes * classes + 1, dtype=torch.int64, device=labels.device
            )
        where = torch.where(known, labels * classes + predicted, classes * classes)
        self._confusion.index_add_(
            0, where, torch.ones_like(where)
        )  # bincount would wait for a GPU


class HardestMistakes(NamedTuple):
    """Mistakes, the hardest first; losses of `ABSENT` where there are fewer."""

    losses: Tensor
    images: Tensor
    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    """How probable the model takes its prediction to be."""


def _hardest(one: HardestMistakes, other: HardestMistakes) -> HardestMistakes:
    images = _framed(one.images, other.images), _framed(other.images, one.images)
    one, other = one._replace(images=images[0]), other._replace(images=images[1])
    both = HardestMistakes(*(torch.cat(pair) for pair in zip(one, other, strict=True)))
    kept = both.losses.topk(min(MOST_SHOWN, len(both.losses))).indices
    return HardestMistakes(*(column[kept] for column in both))


def _framed(images: Tensor, others: Tensor) -> Tensor:
    """Return images with a frame, each in its own darkest shade, that makes them as large as the others at least."""
    if images.shape[1:] == others.shape[1:]:
        return images
    height, width = images.shape[2:]
    shape = [max(pair) for pair in zip(images.shape[1:], others.shape[1:], strict=True)]
    framed = images.amin((1, 2, 3), keepdim=True).expand(-1, *shape).clone()
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    framed[:, :, top : top + height, left : left + width] = images
    return framed


def small(images: Tensor) -> Tensor:
    """Return images of at most `MOST_PIXELS` a side, as float32."""
    height, width = images.shape[-2:]
    scale = MOST_PIXELS / max(height, width)
    if scale >= 1 or not len(images):
        return images.float()
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return functional.interpolate(images.float(), size=size, mode="area")


def pixels(images: Tensor) -> Any:
    """Return images as bytes [n, h, w, 1 or 3] on the host, each from its darkest to its brightest."""
    if not len(images):
        return np.zeros((0, 1, 1, 1), np.uint8)
    flat = images.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low, high = flat.amin((1, 2, 3), keepdim=True), flat.amax((1, 2, 3), keepdim=True)
    shown = (flat - low) / (high - low).clamp(min=1e-12) * 255
    return shown.round().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
