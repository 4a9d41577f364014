"""Pictures under the names by which MLflow's page finds them."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from rankzero.faults import NeverAccepted, is_want

PICTURES = "pictures"
THUMBNAIL_PIXELS = 800
LONGEST_KEY_BYTES = 140  # of the 255 of a file's name; step, time and the rest take up to 114


def write_images(
    pictures: Mapping[str, Path], folder: Path, run_id: str, step: int, milliseconds: int
) -> None:
    """Write PNGs by key as `write_image` does. Raises Impossible for what cannot be made smaller."""
    for key, path in pictures.items():
        try:
            write_image(path, folder, run_id, key, step, milliseconds)
        except Exception as error:
            if is_want(error):
                raise
            raise NeverAccepted(f"{key}: {type(error).__name__}: {error}") from error


def write_image(
    path: Path, folder: Path, run_id: str, key: str, step: int, milliseconds: int
) -> None:
    """Write a PNG as `MlflowClient.log_image` names its files, but for the random part, which is always the same.

    Our smaller copy, which the page's grid shows, is sharper than MLflow's of 256 pixels: there are words to read.
    """
    from PIL import Image

    number = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {key} {step} {milliseconds}")
    key = _cut(key.replace("/", "~"))
    name = f"{PICTURES}~{key}+step+{step}+timestamp+{milliseconds}+{number}"  # ~ stands for /: a section of the page
    for below in ("images", PICTURES):
        (folder / below).mkdir(exist_ok=True)
    shutil.copyfile(path, folder / "images" / f"{name}.png")
    shutil.copyfile(path, folder / PICTURES / f"{key}.png")
    with Image.open(path) as image:
        smaller = image.convert("RGBA" if "A" in image.getbands() else "RGB")
    smaller.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    smaller.save(folder / "images" / f"{name}+compressed.webp", quality=85)


def _cut(key: str) -> str:
    """Return the key as a part of a file's name: no more bytes than one may have; keys that differ stay apart."""
    if len(key.encode()) <= LONGEST_KEY_BYTES:
        return key
    head = key.encode()[: LONGEST_KEY_BYTES - 9].decode(errors="ignore")
    return f"{head}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
