"""Files that a program logs: written into the run's folder at once, uploaded by the courier."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from rankzero.config import yaml_text
from rankzero.events import ArtifactLogged, PicturesTaken
from rankzero.integrations.own_loop.values import Tell, plain_value, to_float
from rankzero.run_store import picture_files
from rankzero.run_store.folder import RunFolder, is_hidden_artifact

# RankZero's own folders among a run's artifacts.
_RESERVED = ("provenance", "failures")
# The longest side of a JPEG.
_MOST_PIXELS = 65_500
# From linux/fs.h: let a file share the blocks of another one.
_FICLONE = 0x40049409


def path_of(text: str | Path) -> Path:
    """Return the path of what is logged. Raises ValueError if it is empty."""
    if text == "":  # As a path it is the working folder.
        raise ValueError("its path is empty")
    return Path(text)


def copy(
    folder: RunFolder, source: Path, place: str | None, notice: Callable[[str], None]
) -> ArtifactLogged:
    """Copy a file or a folder to the artifacts, below the folder `place` there.

    A hard link would show what the program writes later. `notice` gets how many files of a folder
    cannot be copied. The folder of the runs is left out. Raises ValueError, OSError.
    """
    source = source.absolute()  # "." has no name
    files, lost = {source.name: source}, list[str]()
    if source.is_dir():
        runs, root = folder.path.parents[:2]
        own = runs if root == source else root  # A program may lie next to its runs.
        files = {
            f"{source.name}/{path.relative_to(source)}": path
            for path in source.rglob("*")
            # A link to a folder may lead back. It counts as a file that cannot be copied.
            if (path.is_symlink() or not path.is_dir())
            and (source.is_relative_to(own) or not path.is_relative_to(own))
        }
    if not files:
        raise ValueError("it contains no file")
    size, free = sum(map(_size, files.values())), shutil.disk_usage(folder.path).free
    if size > free:
        raise ValueError(f"it has {size:,} bytes, and the disk of the runs has {free:,} free")
    for name, path in files.items():
        save = functools.partial(_copy_file, path)
        try:
            write(folder, f"{place}/{name}" if place else name, save)
        except (OSError, ValueError) as error:
            if path == source:
                raise
            lost.append(str(error))
    if lost:
        notice(f"{len(lost)} of {len(files)} files of {source} are not logged, such as: {lost[0]}")
    return ArtifactLogged(time.time(), f"{folder.artifacts.name}/{place or source.name}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # it vanished
        return 0


def _copy_file(source: Path, target: Path) -> None:
    if source.exists() and not source.is_file():
        raise ValueError(f"{source} is not a regular file")
    with source.open("rb") as before, target.open("wb") as copied:
        try:
            # On XFS and Btrfs both files have the same blocks until one changes. It only waits for
            # what the disk does not have yet.
            fcntl.ioctl(copied, _FICLONE, before.fileno())
        except OSError:
            shutil.copyfile(source, target)


def write(folder: RunFolder, name: str, save: Callable[[Path], object]) -> ArtifactLogged:
    """Let `save` write the artifact `name`. Readers see the old file or the new one.

    Raises ValueError for a name that leads elsewhere, and whatever `save` raises.
    """
    name.encode()  # A server gets no other names, and would be asked for ever.
    parts = PurePosixPath(name).parts
    if (
        not parts
        or parts[0] in ("/", *_RESERVED)
        or ".." in parts
        or is_hidden_artifact(Path(name))
    ):
        raise ValueError(
            f"{name!r} cannot be the name of an artifact: it must be relative, without '..', must "
            f"not begin with a dot, and {' and '.join(_RESERVED)} are RankZero's own"
        )
    target = folder.artifacts.joinpath(*parts)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(folder.artifacts.resolve()):
        raise ValueError(f"{name!r} leads out of the run's folder")
    # The end of the name decides a figure's format. The whole name may fill the 255 bytes.
    end = target.name[-50:]
    temporary = target.with_name(f".{os.getpid()}-{threading.get_native_id()}-{end}")
    try:
        save(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return ArtifactLogged(time.time(), str(target.relative_to(folder.path)))


def text_name(tag: str, step: Any) -> str:
    """Return the name of the artifact that has a text, logged by its tag and step."""
    return f"text/{tag}.md" if step is None else f"text/{tag}/step_{to_float(step):.0f}.md"


def save_dict(values: Mapping[str, Any], path: Path) -> None:
    """Write the values as YAML if the file is called so, else as JSON."""
    # Twice through JSON: YAML gets plain values only.
    text = json.dumps(values, indent=2, default=plain_value)
    if path.suffix in (".yaml", ".yml"):
        text = yaml_text.dump(json.loads(text))
    path.write_text(text, encoding="utf-8")


def save_figure(figure: Any, path: Path) -> None:
    """Draw a figure of matplotlib or plotly. Raises ValueError for anything else."""
    if not path.suffix:  # matplotlib would write another file
        raise ValueError("the name of a figure needs an ending, such as .png")
    if hasattr(figure, "savefig"):
        figure.savefig(path)
    elif hasattr(figure, "write_html"):
        (figure.write_html if path.suffix == ".html" else figure.write_image)(path)
    else:
        raise ValueError(f"{type(figure).__name__} is no figure of matplotlib or plotly")


def save_image(image: Any, name: str, tell: Tell, path: Path) -> None:
    """Write an image: a tensor, an array, a PIL image or a figure. Raises ValueError.

    `tell` gets how the image `name` was changed, if it was.
    """
    from PIL import Image

    from rankzero.training.sample_images.user_images import images_of

    (pixels,) = images_of({name: image}, tell, _MOST_PIXELS).values()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(path)


def keep_picture(folder: RunFolder, key: str, image: Any, step: int, tell: Tell) -> PicturesTaken:
    """Keep an image for MLflow's grid of images by step. Raises ValueError.

    `tell` gets how the image was changed, if it was.
    """
    import numpy as np

    from rankzero.training.sample_images.user_images import MAX_NAME_BYTES, images_of

    if len(key.encode(errors="replace")) > MAX_NAME_BYTES:
        # Different keys stay different.
        digest = f"-{zlib.crc32(key.encode('utf-8', 'surrogatepass')):08x}"
        head = key.encode(errors="replace")[: MAX_NAME_BYTES - len(digest)]
        short = head.decode(errors="ignore") + digest
        tell(f"image {short}", f"the images of the key {key:.100} are called {short} in MLflow")
        key = short
    ((name, pixels),) = images_of({key: image}, tell).items()
    path = folder.pictures / f"step_{max(step, 0):08d}_{time.time_ns()}.npz"
    picture_files.write(path, {"own_names": np.array([name]), "own_0": pixels})
    return PicturesTaken(time.time(), step, f"{folder.pictures.name}/{path.name}")
