"""Writes pictures under the file names by which MLflow's page finds them."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from rankzero.permanent_errors import NeverAccepted, lacks_resources

PICTURES = "pictures"
_THUMBNAIL_PIXELS = 800
_MAX_KEY_BYTES = 140
"""Of the 255 that a file's name may have. Step, time and the rest take up to 114."""


def write_images(
    pictures: Mapping[str, Path], folder: Path, run_id: str, step: int, milliseconds: int
) -> None:
    """Write PNGs by key as `write_image` does. Raises NeverAccepted for one that is unreadable."""
    for key, path in pictures.items():
        try:
            write_image(path, folder, run_id, key, step, milliseconds)
        except Exception as error:  # PIL fails in as many ways as there are bytes
            if lacks_resources(error):
                raise
            raise NeverAccepted(f"{key}: {type(error).__name__}: {error}") from error


def write_image(
    path: Path, folder: Path, run_id: str, key: str, step: int, milliseconds: int
) -> None:
    """Write a PNG, and a smaller copy for the page's grid, as `MlflowClient.log_image` names them.

    The same arguments give the same names, so an upload can be repeated.
    """
    from PIL import Image

    # MLflow puts a random number here. An `~` in a name is a `/`: a section of the page.
    number = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {key} {step} {milliseconds}")
    key = _cut(key.replace("/", "~"))
    name = f"{PICTURES}~{key}+step+{step}+timestamp+{milliseconds}+{number}"
    for below in ("images", PICTURES):
        (folder / below).mkdir(exist_ok=True)
    shutil.copyfile(path, folder / "images" / f"{name}.png")
    shutil.copyfile(path, folder / PICTURES / f"{key}.png")
    with Image.open(path) as image:
        smaller = image.convert("RGBA" if "A" in image.getbands() else "RGB")
    # MLflow's copy has 256 pixels, too few to read the text in these pictures.
    smaller.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    smaller.save(folder / "images" / f"{name}+compressed.webp", quality=85)


def _cut(key: str) -> str:
    """Return the key, shortened to a part of a file's name. Different keys stay different."""
    if len(key.encode()) <= _MAX_KEY_BYTES:
        return key
    head = key.encode()[: _MAX_KEY_BYTES - 9].decode(errors="ignore")
    return f"{head}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
