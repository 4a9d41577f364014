"""Drawing captured pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rankzero.reporting import image_grids
from support.pictures import arrays


@pytest.mark.parametrize(
    ("classes", "mistakes"), [(2, 0), (10, 1), (2, 16), *((n, 4) for n in (2, 10, 30, 31, 400))]
)
def test_every_number_of_classes_and_mistakes_can_be_drawn(
    tmp_path: Path, classes: int, mistakes: int
) -> None:
    drawn = image_grids.draw(arrays(classes, mistakes), 7, tmp_path)
    assert list(drawn) == ["hardest_mistakes", "confusion_matrix", "training_batch"]
    for path in drawn.values():
        with Image.open(path) as image:
            assert image.format == "PNG" and 300 < image.width < 1600 and 200 < image.height < 1600


@pytest.mark.parametrize("picture", [image_grids._mistakes, image_grids._confusion])
def test_predictions_without_class_names_are_labelled_as_a_guess(picture: Any) -> None:
    found = arrays(
        samples=np.int64(65_536),
        wrong=np.int64(65_000),
        total=np.int64(120_000),
        cut=np.bool_(True),
    )
    for classes, says in ((["a", "b", "c"], False), ([], True)):
        figure = picture(found, classes, 1_200_000)
        texts = [
            text.get_text() for text in (*figure.texts, *(axes.xaxis.label for axes in figure.axes))
        ]
        assert any(image_grids.GUESSED in text for text in texts) == says
        if picture is image_grids._mistakes:
            assert figure.texts[1].get_window_extent().x1 < figure.bbox.width


def test_own_images_keep_their_pixels_and_have_unique_names(tmp_path: Path) -> None:
    own = {"own_names": np.array(["a/b:c", "a/b_c", "confusion_matrix", "../../up"], "U")}
    own |= {f"own_{number}": np.full((300, 200, 3), number, np.uint8) for number in range(4)}
    drawn = image_grids.draw(arrays(**own), 7, tmp_path)
    assert len(drawn) == 7 and all(".." not in key and not key.startswith("/") for key in drawn)
    with Image.open(next(path for key, path in drawn.items() if key.endswith("up"))) as image:
        assert image.size == (200, 300) and image.getpixel((0, 0)) == (3, 3, 3)
