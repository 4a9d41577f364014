"""An image classifier's mistakes: confusion counts and the hardest ones, on the device.

It uses the outputs that an evaluation computes anyway. Nothing waits for the device until `read`,
and nothing draws a random number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

MAX_CLASSES = 1000
"""More classes have no confusion matrix, which would need more than 8 MB."""
MAX_SHOWN = 16
MAX_PIXELS = 128
"""Longest side of an image that is kept."""
_FOLD_BYTES = 64 << 20
_NO_MISTAKE = -1.0
"""In place of a loss: smaller than the loss of any mistake."""


class ClassifiedBatch(NamedTuple):
    """A batch of images [n, 1 or 3, h, w], its labels [n], and the scores [n, classes]."""

    images: Tensor
    labels: Tensor
    output: Tensor


def classified(batch: Any, output: Any, classes: int = 0) -> ClassifiedBatch | None:
    """Return the batch with its scores, or None if it is not a classification of images.

    `classes`: the number of classes, or 0 if it is unknown.
    """
    if not is_labelled_images(batch):
        return None
    images, labels = batch
    if type(output) is not Tensor or output.dim() != 2 or len(output) != len(images):
        return None
    # With another number of columns, the outputs are not scores but, for example, embeddings.
    if output.shape[1] < 2 or (classes and output.shape[1] != classes):
        return None
    if not output.is_floating_point() or output.device != labels.device:
        return None
    # A model compiled with CUDA graphs writes its next output into the same memory, hence clone.
    return ClassifiedBatch(images.detach(), labels.detach(), output.detach().clone())


def is_labelled_images(batch: Any) -> bool:
    """Return whether a batch is a pair of float images [n, 1 or 3, h, w] and integers [n]."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return False
    images, labels = batch
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        return False
    if images.dim() != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
        return False
    if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
        return False
    same_size = len(images) == len(labels) > 0
    return same_size and labels.dtype != torch.bool and images.device == labels.device


class Mistakes:
    """The mistakes of one evaluation on this rank, in bounded memory.

    It uses the first `max_samples` samples. It collects `fold_rows` of them before it processes
    them together, so that small batches do not pay for each call.
    """

    def __init__(self, max_samples: int = 1 << 16, fold_rows: int = 1024) -> None:
        self._max_samples, self._fold_rows = max_samples, fold_rows
        self._samples = 0
        self._classes: int | None = None
        self._waiting: list[ClassifiedBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._hardest: _Hardest | None = None
        self._confusion: Tensor | None = None
        """[classes * classes + 1]: the last one counts the labels that are not classes."""
        self._tally: Tensor | None = None
        """[2]: samples that are wrong, and samples whose label is not a class."""

    def add(self, batch: ClassifiedBatch) -> None:
        """Use a batch. Raises ValueError if its number of classes is not that of the last one."""
        if self._samples >= self._max_samples:
            return
        classes = batch.output.shape[1]
        if self._classes not in (None, classes):
            raise ValueError(f"the model's outputs have {self._classes} columns and {classes}")
        self._classes = classes
        if self._waiting and self._waiting[0].images.shape[1:] != batch.images.shape[1:]:
            self._fold()
        self._samples += len(batch.labels)
        self._waiting.append(batch)
        self._waiting_rows += len(batch.labels)
        self._waiting_bytes += sum(tensor.nbytes for tensor in batch)
        if self._waiting_rows >= self._fold_rows or self._waiting_bytes >= _FOLD_BYTES:
            self._fold()

    def read(self) -> dict[str, Any] | None:
        """Return arrays on the host, or None if there are none or labels are not classes."""
        self._fold()
        if self._hardest is None or self._tally is None:
            return None
        wrong, unknown = self._tally.tolist()
        if unknown:
            return None
        count = int((self._hardest.losses >= 0).sum())
        found = {
            "mistakes": pixels(self._hardest.images[:count]),
            "mistakes_true": self._hardest.labels[:count].cpu().numpy(),
            "mistakes_predicted": self._hardest.predicted[:count].cpu().numpy(),
            "mistakes_confidence": self._hardest.confidence[:count].cpu().numpy(),
            "samples": np.int64(self._samples),
            "cut": np.bool_(self._samples >= self._max_samples),
            "wrong": np.int64(wrong),
        }
        if self._confusion is not None:
            classes = self._classes or 0
            found["confusion"] = self._confusion[:-1].view(classes, classes).cpu().numpy()
        return found

    def _fold(self) -> None:
        """Process the waiting batches. No operation here may wait for the device."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._waiting_rows = self._waiting_bytes = 0
        images, labels, output = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*waiting, strict=True)
        )
        classes, scores = output.shape[1], output.float()
        known = (labels >= 0) & (labels < classes)
        labels = labels.clamp(0, classes - 1).long()
        predicted = scores.argmax(1)
        wrong = known & (predicted != labels)
        tally = torch.stack([wrong.sum(), (~known).sum()])
        self._tally = tally if self._tally is None else self._tally + tally
        if classes <= MAX_CLASSES:
            if self._confusion is None:
                shape = classes * classes + 1
                self._confusion = torch.zeros(shape, dtype=torch.int64, device=labels.device)
            cells = torch.where(known, labels * classes + predicted, classes * classes)
            # Not bincount, which waits for a GPU.
            self._confusion.index_add_(0, cells, torch.ones_like(cells))
        losses = functional.cross_entropy(scores, labels, reduction="none").nan_to_num(nan=0.0)
        losses, kept = torch.where(wrong, losses, _NO_MISTAKE).topk(min(MAX_SHOWN, len(labels)))
        confidence = scores.softmax(1).amax(1)
        hardest = _Hardest(
            losses, small(images[kept]), labels[kept], predicted[kept], confidence[kept]
        )
        self._hardest = hardest if self._hardest is None else _merged(self._hardest, hardest)


class _Hardest(NamedTuple):
    """Mistakes, the hardest first. If there are fewer, the losses are `_NO_MISTAKE`."""

    losses: Tensor
    images: Tensor
    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    """The probability that the model gives its prediction."""


def _merged(one: _Hardest, other: _Hardest) -> _Hardest:
    images = _framed(one.images, other.images), _framed(other.images, one.images)
    one, other = one._replace(images=images[0]), other._replace(images=images[1])
    both = _Hardest(*(torch.cat(pair) for pair in zip(one, other, strict=True)))
    kept = both.losses.topk(min(MAX_SHOWN, len(both.losses))).indices
    return _Hardest(*(column[kept] for column in both))


def _framed(images: Tensor, others: Tensor) -> Tensor:
    """Return images at least as large as the others: each in a frame of its darkest shade."""
    height, width = images.shape[2:]
    shape = [max(pair) for pair in zip(images.shape[1:], others.shape[1:], strict=True)]
    framed = images.amin((1, 2, 3), keepdim=True).expand(-1, *shape).clone()
    top, left = (shape[1] - height) // 2, (shape[2] - width) // 2
    framed[:, :, top : top + height, left : left + width] = images
    return framed


def small(images: Tensor) -> Tensor:
    """Return images of at most `MAX_PIXELS` a side, as float32."""
    height, width = images.shape[-2:]
    scale = MAX_PIXELS / max(height, width)
    if scale >= 1 or not len(images):
        return images.float()
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return functional.interpolate(images.float(), size=size, mode="area")


def pixels(images: Tensor) -> Any:
    """Return images as bytes [n, h, w, 1 or 3] on the host, each from its darkest to brightest."""
    if not len(images):
        return np.zeros((0, 1, 1, 1), np.uint8)
    flat = images.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low, high = flat.amin((1, 2, 3), keepdim=True), flat.amax((1, 2, 3), keepdim=True)
    shown = (flat - low) / (high - low).clamp(min=1e-12) * 255
    return shown.round().byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
