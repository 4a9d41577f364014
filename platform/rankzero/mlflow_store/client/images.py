"""Writes pictures under the file names by which MLflow's page finds them."""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from rankzero.permanent_errors import NeverAccepted, lacks_resources

_PICTURES = "pictures"
_THUMBNAIL_PIXELS = 800
# A file's name may have 255. Step, time and the rest take up to 114 of them.
_MAX_KEY_BYTES = 140


def write_images(
    pictures: Mapping[str, Path], folder: Path, run_id: str, step: int, milliseconds: int
) -> list[str]:
    """Write PNGs by key, and a smaller copy of each for the page's grid.

    Returns the artifacts that have the newest picture of each key.

    The names are those of `MlflowClient.log_image`. The same arguments give the same names, so an
    upload can be repeated. Raises NeverAccepted for a picture that is unreadable.
    """
    newest = []
    for key, path in pictures.items():
        try:
            newest.append(_write_image(path, folder, run_id, key, step, milliseconds))
        except Exception as error:  # PIL fails in as many ways as there are bytes
            if lacks_resources(error):
                raise
            raise NeverAccepted(f"{key}: {type(error).__name__}: {error}") from error
    return newest


def _write_image(
    path: Path, folder: Path, run_id: str, key: str, step: int, milliseconds: int
) -> str:
    from PIL import Image

    # MLflow puts a random number here. An `~` in a name is a `/`: a section of the page.
    number = uuid.uuid5(uuid.NAMESPACE_OID, f"{run_id} {key} {step} {milliseconds}")
    key = key.replace("/", "~")
    if len(key.encode()) > _MAX_KEY_BYTES:
        # Different keys stay different.
        digest = hashlib.sha256(key.encode()).hexdigest()[:8]
        key = f"{key.encode()[: _MAX_KEY_BYTES - 9].decode(errors='ignore')}-{digest}"
    name = f"{_PICTURES}~{key}+step+{step}+timestamp+{milliseconds}+{number}"
    for below, copy in (("images", name), (_PICTURES, key)):
        (folder / below).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / below / f"{copy}.png")
    with Image.open(path) as image:
        smaller = image.convert("RGBA" if "A" in image.getbands() else "RGB")
    # MLflow's copy has 256 pixels, too few to read the text in these pictures.
    smaller.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    smaller.save(folder / "images" / f"{name}+compressed.webp", quality=85)
    return f"{_PICTURES}/{key}.png"
