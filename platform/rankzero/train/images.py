"""What a user's `pictures` may return, as bytes: tensors, arrays, PIL images, matplotlib figures."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping
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
        raise ValueError(f"{type(image).__name__} is no tensor, array, PIL image or matplotlib figure")
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
        raise ValueError(f"an image has the shape [h, w] or [c, h, w] with c = 1, 3 or 4, not {list(image.shape)}")
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
