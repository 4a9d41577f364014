"""Draws the captured pictures of a step as PNGs. Imports matplotlib when it is called.

The arrays come from a file, so shapes are checked, and texts are cut and never read as formulas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.mlflow_store import limits

GREY, INK = "#6b7280", "#1f2937"
DOTS_PER_INCH = 120
GUESSED = "argmax of the output"
"""The label of predictions if the data set has no class names: the output may not be scores."""
_GREEN, _RED, _LINE = "#2a7d2e", "#c62828", "#d1d5db"
_MAX_NUMBERED = 30
"""Classes of a confusion matrix that has names and numbers."""
_COLUMNS = 4
_LONGEST_LABEL = 18
_OURS = ("hardest_mistakes", "confusion_matrix", "training_batch")


@contextlib.contextmanager
def plain_words() -> Iterator[None]:
    """Draw ``train/a$b{c$`` as it is, and not as a formula. Also decorates functions that draw."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):
        yield


@plain_words()
def draw(arrays: Mapping[str, Any], step: int, folder: Path) -> dict[str, Path]:
    """Draw all pictures into `folder`, and return the PNGs by key.

    Raises whatever arrays of unexpected shapes or types lead to.
    """
    from matplotlib import rc_context

    names = [" ".join(str(name).split()) for name in arrays.get("classes", ())]
    limit = _LONGEST_LABEL
    classes = [name if len(name) <= limit else f"{name[: limit - 1]}…" for name in names]
    drawn: dict[str, Path] = {}
    for key, needed, make in (
        ("hardest_mistakes", "mistakes", _mistakes),
        ("confusion_matrix", "confusion", _confusion),
        ("training_batch", "batch", _training_batch),
    ):
        if needed in arrays:
            # A number and not the key, which may hold a path.
            drawn[key] = folder / f"{len(drawn)}.png"
            with rc_context({"font.size": 9.0, "text.color": INK, "axes.labelcolor": INK}):
                make(arrays, classes, step).savefig(drawn[key], dpi=DOTS_PER_INCH)
    own = [str(name) for name in arrays.get("own_names", ())]
    titles = [f"{name} (own)" if name in _OURS else name for name in own]
    # MLflow accepts few characters in a name. Two names may become the same, and get numbers.
    keys = limits.names([*_OURS, *titles])
    for number, title in enumerate(titles):
        path = folder / f"{len(drawn)}.png"
        _save_enlarged(arrays[f"own_{number}"], path)
        drawn[keys[title]] = path
    return drawn


def headings(
    figure: Any, height: float, title: str, subtitle: str, key: Sequence[tuple[str, str]] = ()
) -> None:
    """Write a title, a line below it and a colour key, above the axes of a figure.

    `height`: the figure's, in inches. `key`: words and their colours.
    """
    # The layout engine knows nothing of these texts, so it gets the rest of the figure.
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.72 / height))
    figure.text(0.02, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", in_layout=False)
    figure.text(0.02, 1 - 0.54 / height, subtitle, fontsize=9, color=GREY, in_layout=False)
    for number, (word, colour) in enumerate(reversed(key)):
        x, y = 0.98 - 0.1 * number, 1 - 0.3 / height
        figure.text(x, y, word, color=colour, ha="right", in_layout=False)


def _mistakes(arrays: Mapping[str, Any], classes: Sequence[str], step: int) -> Any:
    true, predicted = arrays["mistakes_true"], arrays["mistakes_predicted"]
    words = [
        [(f"{_name(guess, classes)}  {sure:.0%}", _RED), (_name(right, classes), _GREEN)]
        for right, guess, sure in zip(true, predicted, arrays["mistakes_confidence"], strict=True)
    ]
    wrong, samples = int(arrays["wrong"]), int(arrays["samples"])
    subtitle = f"step {step:,} · {wrong:,} of {samples:,} wrong{_share(arrays)}"
    subtitle += "" if classes else f" · {GUESSED}"
    key = [("predicted", _RED), ("true", _GREEN)]
    return _grid(arrays["mistakes"], words, "Hardest mistakes", subtitle, key)


def _training_batch(arrays: Mapping[str, Any], classes: Sequence[str], _step: int) -> Any:
    words = [[(_name(label, classes), INK)] for label in arrays["batch_labels"]]
    subtitle = "as the model gets it, after augmentation · rank 0's first"
    return _grid(arrays["batch"], words, "Training batch", subtitle, ())


def _grid(
    images: Any,
    words: Sequence[Sequence[tuple[str, str]]],
    title: str,
    subtitle: str,
    key: Sequence[tuple[str, str]],
) -> Any:
    """Return a figure of images in rows, each with coloured words below it."""
    rows = max(1, -(-len(images) // _COLUMNS))
    lines = max([1, *map(len, words)])
    height = 0.98 + rows * (1.65 + 0.19 * lines) if len(images) else 2.2
    figure = canvas(7.2, height)
    headings(figure, height, title, subtitle, key)
    if not len(images):
        figure.text(0.5, 0.38, "No mistakes", ha="center", fontsize=15, color=_GREEN)
        return figure
    figure.get_layout_engine().set(w_pad=0.05, h_pad=0.06)
    frames = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axes in frames[len(images) :]:
        axes.set_visible(False)
    for axes, image, below in zip(frames, images, words, strict=False):
        shown = image[:, :, 0] if image.shape[2] == 1 else image
        # Pixels of a tiny image shall look like pixels.
        smooth = "nearest" if max(image.shape[:2]) < 64 else "antialiased"
        axes.imshow(shown, cmap="gray", vmin=0, vmax=255, interpolation=smooth)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=_LINE, linewidth=0.6)
        for line, (word, colour) in enumerate(below):
            place: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
            offset = (0, -4 - 13 * line)
            axes.annotate(word, (0.5, 0), offset, ha="center", va="top", color=colour, **place)
    return figure


def _confusion(arrays: Mapping[str, Any], classes: Sequence[str], step: int) -> Any:
    """Return the counts in cells, coloured by their share of the true class."""
    # scikit-learn's ConfusionMatrixDisplay draws counts or shares, not both: decision 22.
    counts = arrays["confusion"].astype(float)
    size = len(counts)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    side = min(11.0, max(4.2, 2.4 + 0.42 * size)) if size <= _MAX_NUMBERED else 8.0
    right = counts.trace() / max(1.0, counts.sum())
    subtitle = f"step {step:,} · {right:.1%} of {int(counts.sum()):,} right{_share(arrays)}"
    figure = canvas(side + 1.1, side + 0.75)
    headings(figure, side + 0.75, "Confusion matrix", subtitle)
    axes = figure.subplots()
    # With more classes than pixels, "nearest" would leave out some of them.
    smooth = "nearest" if size < 200 else "auto"
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation=smooth)
    axes.set(xlabel="predicted" if classes else f"predicted: {GUESSED}", ylabel="true")
    axes.spines[:].set(color=_LINE, linewidth=0.6)
    if size <= _MAX_NUMBERED:
        names = [_name(number, classes) for number in range(size)]
        slanted = max(map(len, names)) > 3
        how = {"rotation": 45, "ha": "right"} if slanted else {}
        axes.set_xticks(range(size), names, **how)
        axes.set_yticks(range(size), names)
        axes.tick_params(length=0)
        points = 9 if size <= 12 else 7.5 if size <= 20 else 6
        # A zero in each empty cell would hide the others.
        for row, column in zip(*counts.nonzero(), strict=True):
            colour = "white" if shares[row, column] > 0.55 else INK
            text = f"{int(counts[row, column])}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=points)
    bar = figure.colorbar(drawn, ax=axes, fraction=0.045, pad=0.02, format=lambda x, _: f"{x:.0%}")
    bar.set_label("share of the true class")
    bar.outline.set_visible(False)
    return figure


def canvas(width: float, height: float) -> Any:
    """Return an empty figure of so many inches, whose parts make room for each other."""
    # Not by pyplot, which keeps every figure.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _save_enlarged(image: Any, path: Path) -> None:
    """Write an image. Each pixel of a tiny one becomes a square, so that people can see it."""
    from PIL import Image

    shown = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    factor = 256 // max(shown.size)
    if factor > 1:
        size = shown.width * factor, shown.height * factor
        shown = shown.resize(size, Image.Resampling.NEAREST)
    shown.save(path)


def _share(arrays: Mapping[str, Any]) -> str:
    """Return which part of the validation samples was used, or an empty text for all."""
    if int(arrays["samples"]) >= int(arrays["total"]):
        return ""
    return (
        f" · {'the first of ' if arrays['cut'] else ''}rank 0's share of {int(arrays['total']):,}"
    )


def _name(label: Any, classes: Sequence[str]) -> str:
    return classes[int(label)] if 0 <= int(label) < len(classes) else str(int(label))
