"""Data as the scripts expect them, and tiny."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(0)


def digits(folder: Path) -> None:
    """Write what torchvision's MNIST reads: 64 images, and 32 of them again for the test."""
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = RANDOM.integers(0, 256, (64, 28, 28), np.uint8)
    labels = RANDOM.integers(0, 10, 64, np.uint8)
    for part, count in (("train", 64), ("t10k", 32)):
        write_idx(raw / f"{part}-images-idx3-ubyte", images[:count])
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels[:count])


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in MNIST's format: their type, their dimensions, and they themselves."""
    header = np.array([0x800 + values.ndim, *values.shape], ">u4")
    path.write_bytes(header.tobytes() + values.tobytes())


def photos(folder: Path) -> None:
    """Write what torchvision's ImageFolder reads: 20 images of five classes, and 10 others."""
    for part, count in (("train", 4), ("val", 2)):
        for number in range(5):
            kind = folder / "data" / part / str(number)
            kind.mkdir(parents=True)
            for index in range(count):
                pixels = RANDOM.integers(0, 256, (48, 48, 3), np.uint8)
                Image.fromarray(pixels).save(kind / f"{index}.png")


def letters(folder: Path) -> None:
    """Write what nanoGPT reads: tokens of an alphabet of 32."""
    data = folder / "data" / "tiny"
    data.mkdir(parents=True)
    for part in ("train", "val"):
        RANDOM.integers(0, 32, 1000, np.uint16).tofile(data / f"{part}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 32}))


ACCURACY = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        value = datasets.Value("int32")
        features = datasets.Features({"predictions": value, "references": value})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        same = [one == other for one, other in zip(predictions, references)]
        return {"accuracy": sum(same) / len(same)}
"""


def words(folder: Path) -> None:
    """Write texts, a tokenizer of 32 words, and the metric that evaluate would fetch."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(32)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16).save_pretrained(
        folder / "tokenizer"
    )
    for part, count in (("train", 256), ("val", 64)):
        text = " ".join(f"w{number}" for number in RANDOM.integers(0, 32, count))
        (folder / f"{part}.txt").write_text(text)
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(ACCURACY)


def none(folder: Path) -> None:
    """Write nothing: the script makes its data itself."""
