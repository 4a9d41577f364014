"""What a user's `pictures` may return, as bytes: tensors, arrays, PIL images, matplotlib figures."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

MOST_PIXELS = 2048  # along a side; larger images are thinned out
DOTS_PER_INCH = 120
CHANNELS = (1, 3, 4)


def as_bytes(image: Any) -> Any:
    """Return an image as bytes [h, w, 1, 3 or 4]. Raises ValueError for what is none.

    Of a tensor [c, h, w] or [h, w], or an array that may also be [h, w, c], floats go from 0 to 1; others are spread
    from their least to their greatest value.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()
    elif hasattr(image, "savefig"):
        image = _drawn(image)
    elif hasattr(image, "convert"):  # PIL's
        image = np.asarray(image.convert("RGBA" if "A" in image.getbands() else "RGB"))
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f"{type(image).__name__} is no tensor, array, PIL image or matplotlib figure"
        )
    return _in_bytes(_thinned(_channels_last(image)))


def close_figures(returned: Any) -> None:
    """Close what `pictures` made with pyplot, which keeps every figure until it is told. Raises nothing."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    images = list(returned.values()) if pyplot is not None and isinstance(returned, Mapping) else []
    for figure in (image for image in images if hasattr(image, "savefig")):
        with contextlib.suppress(Exception):  # another library's figure
            pyplot.close(figure)  # type: ignore[union-attr]


def _drawn(figure: Any) -> Any:
    from PIL import Image

    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DOTS_PER_INCH)
    return np.asarray(Image.open(content).convert("RGB"))


def _channels_last(image: Any) -> Any:
    if image.ndim == 2:
        image = image[:, :, None]
    elif image.ndim == 3 and image.shape[0] in CHANNELS and image.shape[2] not in CHANNELS:
        image = image.transpose(1, 2, 0)
    elif image.ndim == 3 and image.shape[0] in CHANNELS and image.shape[1] not in CHANNELS:
        image = image.transpose(1, 2, 0)  # a narrow image, as PyTorch has it
    if image.ndim != 3 or image.shape[2] not in CHANNELS or not image.size:
        raise ValueError(
            f"an image has the shape [h, w] or [c, h, w] with c = 1, 3 or 4, not {list(image.shape)}"
        )
    return image


def _in_bytes(image: Any) -> Any:
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind not in "biuf":
        raise ValueError(f"an image is made of numbers, not of {image.dtype}")
    real = np.nan_to_num(image.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = real.min(), real.max()
    if low < 0 or high > 1:
        real = (real - low) / max(high - low, 1e-12)
    return (real * 255).round().astype(np.uint8)


def _thinned(image: Any) -> Any:
    factor = -(-max(image.shape[:2]) // MOST_PIXELS)
    return np.ascontiguousarray(image[::factor, ::factor])


LONGEST = 60  # bytes of a picture's name: it becomes a file's
MOST_CLASSES = 4096
DEEPEST = 16  # data sets in data sets


def class_names(dataset: Any) -> list[str]:
    """Return the names of a data set's classes, also of one that it is a part of; empty where it has none.

    Properties are left alone: one may read the whole data set. Of synonyms (torchvision's ImageNet) the first counts.
    """
    with contextlib.suppress(Exception):  # a user's class may do anything when it is asked
        for _ in range(DEEPEST):
            names = _held(dataset, "classes")
            if isinstance(names, (list, tuple)) and names:
                return [_first(name) for name in names] if len(names) <= MOST_CLASSES else []
            dataset = _held(dataset, "dataset")
    return []


def apart(names: Iterable[Any]) -> list[str]:
    """Return names of at most `LONGEST` bytes, each once: the second ``x`` is ``x (2)``."""
    found: list[str] = []
    for name in map(str, names):
        title, number = _cut(name), 1
        while title in found:
            number += 1
            title = _cut(name, f" ({number})")
        found.append(title)
    return found


def _held(thing: Any, name: str) -> Any:
    """Return an attribute that is there without asking for it; None for what a class would compute."""
    value = inspect.getattr_static(thing, name, None)
    return None if hasattr(type(value), "__get__") else value


def _first(name: Any) -> str:
    return str(name[0] if isinstance(name, (list, tuple)) and name else name)


def _cut(name: str, end: str = "") -> str:
    return name.encode(errors="replace")[: LONGEST - len(end)].decode(errors="ignore") + end
