"""Pictures of what a model gets wrong, and of what it is trained on, as PNGs. Imports matplotlib when it is called.

What it draws from was read from a file: shapes are checked, texts are cut and never taken for formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rankzero.mlflow_store import limits

GREEN, RED, GREY, INK = "#2a7d2e", "#c62828", "#6b7280", "#1f2937"
DOTS_PER_INCH = 120
MOST_NUMBERS = 30  # classes with a name and a number in each cell
COLUMNS = 4
LONGEST_LABEL = 18
HEADINGS = 0.72  # inches
SMALL = 64  # pixels: below, they are shown as squares
GUESSED = "argmax of the output"  # said where nothing tells that these are scores of classes
OURS = ("hardest_mistakes", "confusion_matrix", "training_batch")


def draw(found: Mapping[str, Any], step: int, folder: Path) -> dict[str, Path]:
    """Draw all that the arrays hold into `folder`; return the PNGs by key. Raises whatever odd arrays lead to."""
    classes = [_short(name) for name in found.get("classes", ())]
    drawn: dict[str, Path] = {}
    if "mistakes" in found:
        drawn["hardest_mistakes"] = _picture(folder, len(drawn), _mistakes(found, classes, step))
    if "confusion" in found:
        drawn["confusion_matrix"] = _picture(folder, len(drawn), _confusion(found, classes, step))
    if "batch" in found:
        drawn["training_batch"] = _picture(folder, len(drawn), _batch(found, classes))
    own = [str(name) for name in found.get("own_names", ())]
    names = limits.names([*OURS, *(f"{name} (own)" if name in OURS else name for name in own)])
    for number, name in enumerate(own):
        key = names[f"{name} (own)" if name in OURS else name]
        drawn[key] = _plain(folder, len(drawn), found[f"own_{number}"])
    return drawn


P = ParamSpec("P")
R = TypeVar("R")


def plain_words(draw: Callable[P, R]) -> Callable[P, R]:
    """Have a function that draws take names for what they are: ``train/a$b{c$`` is no formula."""

    @functools.wraps(draw)
    def plainly(*given: P.args, **named: P.kwargs) -> R:
        from matplotlib import rc_context

        with rc_context({"text.parse_math": False}):
            return draw(*given, **named)

    return plainly


Draw = Callable[[Any], None]
"""Draws on a figure."""


def _picture(folder: Path, number: int, sized: tuple[tuple[float, float], Draw]) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inches, on = sized
    path = folder / f"{number}.png"
    with rc_context(
        {"font.size": 9.0, "text.parse_math": False, "text.color": INK, "axes.labelcolor": INK}
    ):
        figure = Figure(
            figsize=inches, layout="constrained", facecolor="white"
        )  # no pyplot: it keeps what it drew
        on(figure)
        figure.savefig(path, dpi=DOTS_PER_INCH)
    return path


def _mistakes(
    found: Mapping[str, Any], classes: Sequence[str], step: int
) -> tuple[tuple[float, float], Draw]:
    images, true, predicted = found["mistakes"], found["mistakes_true"], found["mistakes_predicted"]
    words = [
        [(f"{_name(guess, classes)}  {sure:.0%}", RED), (_name(right, classes), GREEN)]
        for right, guess, sure in zip(true, predicted, found["mistakes_confidence"], strict=True)
    ]
    wrong, samples = int(found["wrong"]), int(found["samples"])
    says = f"step {step:,} · {wrong:,} of {samples:,} wrong{_share(found)}{'' if classes else f' · {GUESSED}'}"
    key = [("predicted", RED), ("true", GREEN)]
    return _grid(images, words, "Hardest mistakes", says, key)


def _batch(found: Mapping[str, Any], classes: Sequence[str]) -> tuple[tuple[float, float], Draw]:
    images, labels = found["batch"], found["batch_labels"]
    words = [[(_name(label, classes), INK)] for label in labels]
    return _grid(
        images,
        words,
        "Training batch",
        "as the model gets it, after augmentation · rank 0's first",
        (),
    )


def _grid(
    images: Any,
    words: Sequence[Sequence[tuple[str, str]]],
    title: str,
    says: str,
    key: Sequence[tuple[str, str]],
) -> tuple[tuple[float, float], Draw]:
    """Return how to draw images in rows of four, words below each, and a key to the words' colours."""
    rows = max(1, -(-len(images) // COLUMNS))
    lines = max([1, *map(len, words)])
    height = 1.65 + 0.19 * lines
    whole = (7.2, 0.98 + rows * height) if len(images) else (7.2, 2.2)

    def on(figure: Any) -> None:
        headings(figure, whole[1], title, says, key)
        if not len(images):
            figure.text(0.5, 0.38, "No mistakes", ha="center", fontsize=15, color=GREEN)
            return
        figure.get_layout_engine().set(w_pad=0.05, h_pad=0.06)
        frames = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        for frame, image, below in zip(frames, images, words, strict=False):
            _tile(frame, image, below)
        for frame in frames[len(images) :]:
            frame.set_visible(False)

    return whole, on


def headings(
    figure: Any, height: float, title: str, says: str, key: Sequence[tuple[str, str]] = ()
) -> None:
    """Write a title and a line below it at the top of a figure of so many inches; leave them their place."""
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - HEADINGS / height))
    figure.text(0.02, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", in_layout=False)
    figure.text(0.02, 1 - 0.54 / height, says, fontsize=9, color=GREY, in_layout=False)
    for number, (word, colour) in enumerate(reversed(key)):
        figure.text(
            0.98 - 0.1 * number, 1 - 0.3 / height, word, color=colour, ha="right", in_layout=False
        )


def _tile(frame: Any, image: Any, words: Sequence[tuple[str, str]]) -> None:
    grey = image.shape[2] == 1
    smooth = "nearest" if max(image.shape[:2]) < SMALL else "antialiased"
    frame.imshow(
        image[:, :, 0] if grey else image,
        cmap="gray" if grey else None,
        vmin=0,
        vmax=255,
        interpolation=smooth,
    )
    frame.set_xticks([])
    frame.set_yticks([])
    for side in frame.spines.values():
        side.set(color="#d1d5db", linewidth=0.6)
    for number, (word, colour) in enumerate(words):
        frame.annotate(
            word,
            (0.5, 0),
            (0, -4 - 13 * number),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="top",
            color=colour,
        )


def _confusion(
    found: Mapping[str, Any], classes: Sequence[str], step: int
) -> tuple[tuple[float, float], Draw]:
    counts = found["confusion"].astype(float)
    size = len(counts)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(min=1)
    side = min(11.0, max(4.2, 2.4 + 0.42 * size)) if size <= MOST_NUMBERS else 8.0
    whole = side + 1.1, side + 0.75
    right = counts.trace() / max(1.0, counts.sum())
    says = f"step {step:,} · {right:.1%} of {int(counts.sum()):,} right{_share(found)}"

    def on(figure: Any) -> None:
        headings(figure, whole[1], "Confusion matrix", says)
        axes = figure.subplots()
        drawn = axes.imshow(
            shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest" if size < 200 else "auto"
        )
        axes.set(xlabel="predicted" if classes else f"predicted: {GUESSED}", ylabel="true")
        if size <= MOST_NUMBERS:
            _number(axes, counts, shares, classes)
        bar = figure.colorbar(
            drawn, ax=axes, fraction=0.045, pad=0.02, format=lambda share, _: f"{share:.0%}"
        )
        bar.set_label("share of the true class")
        bar.outline.set_visible(False)
        for spine in axes.spines.values():
            spine.set(color="#d1d5db", linewidth=0.6)

    return whole, on


def _number(axes: Any, counts: Any, shares: Any, classes: Sequence[str]) -> None:
    size = len(counts)
    names = [_name(number, classes) for number in range(size)]
    slanted = max(map(len, names)) > 3
    axes.set_xticks(
        range(size), names, rotation=45 if slanted else 0, ha="right" if slanted else "center"
    )
    axes.set_yticks(range(size), names)
    axes.tick_params(length=0)
    small = 9 if size <= 12 else 7.5 if size <= 20 else 6
    for row, column in zip(*counts.nonzero(), strict=True):
        colour = "white" if shares[row, column] > 0.55 else INK
        axes.text(
            column,
            row,
            f"{int(counts[row, column])}",
            ha="center",
            va="center",
            color=colour,
            fontsize=small,
        )


def _plain(folder: Path, number: int, image: Any) -> Path:
    """Write an image as it is; a tiny one in squares, large enough to see."""
    from PIL import Image

    path = folder / f"{number}.png"
    shown = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    factor = 256 // max(shown.size)
    if factor > 1:
        shown = shown.resize(
            (shown.width * factor, shown.height * factor), Image.Resampling.NEAREST
        )
    shown.save(path)
    return path


def _share(found: Mapping[str, Any]) -> str:
    if int(found["samples"]) >= int(found["total"]):
        return ""
    return f" · {'the first of ' if found['cut'] else ''}rank 0's share of {int(found['total']):,}"


def _name(label: Any, classes: Sequence[str]) -> str:
    return classes[int(label)] if 0 <= int(label) < len(classes) else str(int(label))


def _short(name: Any) -> str:
    text = " ".join(str(name).split())
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"
