"""The images of an experiment's `pictures`, as bytes, and the class names of a data set."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

MAX_PIXELS = 2048
"""Longest side of an image. Larger images lose rows and columns."""
MAX_CLASSES = 4096
MAX_NAME_BYTES = 60
"""The name of a picture becomes the name of a file."""
_MAX_IMAGES = 16
_CHANNELS = (1, 3, 4)


def images_of(
    images: Any, tell: Callable[[str, str], object] = lambda *_: None, max_pixels: int = MAX_PIXELS
) -> dict[str, Any]:
    """Return what `pictures` returned, as bytes by unique name. Raises ValueError.

    `tell` gets how an image was changed, if it was, with a key for that. `max_pixels`: the longest
    side of an image.
    """
    if not isinstance(images, Mapping):
        raise ValueError(
            f"it must return a mapping of names to images, not {type(images).__name__}"
        )
    if len(images) > _MAX_IMAGES:
        raise ValueError(f"it returned {len(images)} images; at most {_MAX_IMAGES} are kept")
    found: dict[str, Any] = {}
    for key, image in images.items():
        name, number = _cut(str(key)), 1
        while name in found:
            number += 1
            name = _cut(str(key), f" ({number})")
        try:
            found[name] = _as_bytes(name, image, tell, max_pixels)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
    return found


def _as_bytes(name: str, image: Any, tell: Callable[[str, str], object], max_pixels: int) -> Any:
    """Return an image as bytes [h, w, 1, 3 or 4]. Raises ValueError.

    It may be a tensor or array [c, h, w], [h, w] or [h, w, c], a PIL image or a matplotlib figure.
    Numbers from 0 to 1 and integers to 255 keep their scale. Others are scaled from their smallest
    to their largest value. NaN and infinite numbers are black.
    """
    image = _as_array(image)
    if image.ndim == 2:
        image = image[:, :, None]
    elif image.ndim == 3 and image.shape[0] in _CHANNELS and not {*image.shape[1:]} <= {*_CHANNELS}:
        image = image.transpose(1, 2, 0)  # from PyTorch's order
    if image.ndim != 3 or image.shape[2] not in _CHANNELS or not image.size:
        raise ValueError(
            "an image has the shape [h, w] or [c, h, w] with c = 1, 3 or 4, not "
            f"{list(image.shape)}"
        )
    # Before anything is copied, because the image may be larger than the memory.
    factor = -(-max(image.shape[:2]) // max_pixels)
    if factor > 1:
        kept = f"of the image {name!r}, 1 in {factor} rows and columns is kept"
        tell("large image", f"{kept}: a side is longer than {max_pixels:,} pixels")
    image = np.ascontiguousarray(image[::factor, ::factor])
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind not in "biuf":
        raise ValueError(f"an image is made of numbers, not of {image.dtype}")
    if image.dtype.kind in "iu" and image.min() >= 0 and 1 < image.max() <= 255:
        return image.astype(np.uint8)
    return _scaled(name, image, tell)


def _scaled(name: str, image: Any, tell: Callable[[str, str], object]) -> Any:
    real = image.astype(np.float64)
    finite = np.isfinite(real)
    if not finite.all():
        odd = f"the image {name!r} has values that are not finite"
        tell("image not finite", f"{odd}: they are shown black")
    numbers = real[finite]
    low, high = (numbers.min(), numbers.max()) if numbers.size else (0.0, 0.0)
    if low < 0 or high > 1:
        values = f"the image {name!r} has values from {low:.4g} to {high:.4g}"
        tell("scaled image", f"{values}: the smallest is shown black, the largest white")
        real = (real - low) / max(high - low, 1e-12)
    real = np.where(finite, real, 0.0)
    return (real * 255).round().astype(np.uint8)


def _as_array(image: Any) -> Any:
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        # numpy has no bfloat16.
        return (image.float() if image.is_floating_point() else image).numpy()
    if hasattr(image, "savefig"):
        from PIL import Image

        content = io.BytesIO()
        image.savefig(content, format="png", dpi=120)
        return np.asarray(Image.open(content).convert("RGB"))
    if hasattr(image, "convert"):  # PIL's
        # Its modes F, I and I;16 have numbers that RGB would clip. LAB has an "A" that is a colour.
        is_numeric, has_alpha = image.mode[0] in "FI", image.getbands()[-1] == "A"
        return np.asarray(image if is_numeric else image.convert("RGBA" if has_alpha else "RGB"))
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f"{type(image).__name__} is no tensor, array, PIL image or matplotlib figure"
        )
    return image


def close_figures(returned: Any) -> None:
    """Close the figures that `pictures` made with pyplot, which keeps each until then."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    images = list(returned.values()) if pyplot is not None and isinstance(returned, Mapping) else []
    for figure in (image for image in images if hasattr(image, "savefig")):
        with contextlib.suppress(Exception):  # another library's figure
            pyplot.close(figure)  # type: ignore[union-attr]


def class_names(dataset: Any) -> list[str]:
    """Return the class names of a data set, or of the one that it is a subset of, or []."""
    with contextlib.suppress(Exception):  # attributes of a user's class may raise anything
        for _ in range(16):  # subsets of subsets; a data set may even contain itself
            names = _stored(dataset, "classes")
            if isinstance(names, (list, tuple)) and names:
                if len(names) > MAX_CLASSES:
                    return []
                # torchvision's ImageNet has tuples of synonyms.
                return [
                    str(name[0] if isinstance(name, (list, tuple)) and name else name)
                    for name in names
                ]
            dataset = _stored(dataset, "dataset")
    return []


def _stored(thing: Any, name: str) -> Any:
    """Return a stored attribute, or None if a property computes it or it is missing."""
    # A property may read the whole data set.
    value = inspect.getattr_static(thing, name, None)
    return None if hasattr(type(value), "__get__") else value


def _cut(name: str, end: str = "") -> str:
    head = name.encode(errors="replace")[: MAX_NAME_BYTES - len(end)]
    return head.decode(errors="ignore") + end
