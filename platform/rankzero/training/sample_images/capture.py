"""Pictures of a run: what the model gets wrong, what it is trained on, and what the experiment wants to show.

    train     the first batch's images are kept                        rank 0
    evaluate  a hook on the model catches the outputs that are made    rank 0; no further forward, no host sync
    due?      the first evaluation, the last, a new best now and then  the same on all ranks
    take      one copy to the host, one small file, one event          rank 0; the courier draws

Nothing here may end a run: what fails is told once, and there are no more pictures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from rankzero.events import PicturesTaken
from rankzero.run_store import picture_files
from rankzero.training.sample_images import user_images
from rankzero.training.sample_images.mistakes import (
    MOST_SHOWN,
    Mistakes,
    classified,
    is_labelled_images,
    pixels,
    small,
)
from rankzero.training.sample_images.user_images import as_bytes

LEAST_SECONDS = 10.0  # of training between pictures of a new best
LEAST_SHARE = 0.1  # of the training so far: a day's run has about a hundred pictures
MOST_OF_OWN = 16
LONGEST_CLASS = 60  # characters of a class's name
MOST_OUTPUTS = 2  # of a batch: where a model is called more than once, which output is the answer?

See = Callable[[Any, int], None]
Own = Callable[[Any, Any], Mapping[str, Any]]
"""The experiment's ``pictures(model, batch)``."""


class ImageCapture:
    """Takes pictures into `folder`, on rank 0; elsewhere (None) it only calls the experiment's own method.

    `total`: how many validation samples all ranks have; `classes`: their names, where the data set knows them.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        total: int = 0,
        classes: Sequence[str] = (),
        own: Own | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.own = own
        self.first_batch: Any = None
        """The evaluation's, where the experiment has pictures of its own."""
        self._folder, self._total, self._classes, self._notice = (
            folder,
            total,
            list(classes),
            notice,
        )
        self._seen: Mistakes | None = None
        self._trained: tuple[Tensor, Tensor] | None = None
        self._taken_at: float | None = None
        self._complained = False

    def training(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the same batches; the first one's images are kept as the model gets them."""
        return batches if self._folder is None else self._kept(batches)

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[See]:
        """Catch what `model` makes of a batch during the block; to be told each batch and its samples after it."""
        self._seen, self.first_batch = None, None
        if self._folder is None:
            yield self._remember
            return
        outputs: list[Any] = []
        mistakes = Mistakes()

        def see(batch: Any, samples: int) -> None:
            self._remember(batch, samples)
            with self._harmless():
                found = (
                    classified(batch, outputs[0], len(self._classes))
                    if samples and len(outputs) == 1
                    else None
                )
                if found is not None:
                    mistakes.add(found)
                    self._seen = mistakes
            outputs.clear()

        with contextlib.ExitStack() as watch:
            with self._harmless():  # a scripted model takes no hooks
                watch.enter_context(caught(model, outputs))
            yield see

    def due(self, better: bool, last: bool, seconds: float) -> bool:
        """Tell whether to take pictures; `seconds` of training so far. The same on every rank, if what is given is."""
        since = None if self._taken_at is None else seconds - self._taken_at
        often_enough = since is not None and since < max(LEAST_SECONDS, LEAST_SHARE * seconds)
        if not last and (often_enough or not (better or since is None)):
            return False
        self._taken_at = seconds
        return True

    def forget(self) -> None:
        """Let go of what was kept of an evaluation."""
        self._seen, self.first_batch = None, None

    def complain(self, text: str) -> None:
        """Say once that pictures failed."""
        if not self._complained:
            self._complained = True
            self._notice(text)

    def take(self, step: int, own: Mapping[str, Any]) -> PicturesTaken | None:
        """Write down what was seen, and the experiment's own images; None where there is nothing."""
        now, taken = time.time(), None
        with self._harmless():
            found = self._developed(own)
            if self._folder is not None and found:
                path = self._folder / f"step_{step:08d}_{int(now * 1000)}.npz"
                picture_files.write(path, found)
                taken = PicturesTaken(now, step, f"{self._folder.name}/{path.name}")
        self.forget()
        return taken

    def _developed(self, own: Mapping[str, Any]) -> dict[str, Any]:
        found = {} if self._seen is None else self._seen.read() or {}
        if self._trained is not None:
            images, labels = self._trained
            self._trained = None
            found |= {"batch": pixels(images), "batch_labels": labels.cpu().numpy()}
        found |= {f"own_{number}": image for number, image in enumerate(own.values())}
        if not found:
            return {}
        classes = [name[:LONGEST_CLASS] for name in self._classes]
        names = {"classes": np.array(classes, "U"), "own_names": np.array(list(own), "U")}
        return {**found, **names, "total": np.int64(self._total)}

    def _remember(self, batch: Any, samples: int) -> None:
        if self.own is not None and self.first_batch is None and samples:
            self.first_batch = batch

    def _kept(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            with self._harmless():
                if is_labelled_images(batch):
                    images, labels = (one[:MOST_SHOWN].detach() for one in batch)
                    self._trained = small(images).clone(), labels.clone()
            yield batch
            break
        yield from batches

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Whatever is wrong with an odd batch or a full disk is told, and this rank takes no more pictures."""
        try:
            yield
        except Exception as error:
            self._folder = None
            self.complain(f"no more pictures: {type(error).__name__}: {error}")


@contextlib.contextmanager
def caught(model: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Have the model's outputs appended to a list during the block, until there are `MOST_OUTPUTS`.

    A compiled model's call is wrapped, since its hooks are part of what is compiled.
    """
    compiled = getattr(model, "_compiled_call_impl", None)

    def keep(output: Any) -> None:
        if len(outputs) < MOST_OUTPUTS:
            outputs.append(output)

    if compiled is None:
        handle = model.register_forward_hook(lambda module, given, output: keep(output))
        try:
            yield
        finally:
            handle.remove()
        return

    def call(*given: Any, **named: Any) -> Any:
        output = compiled(*given, **named)
        keep(output)
        return output

    model._compiled_call_impl = call
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


def images_of(returned: Any) -> dict[str, Any]:
    """Return what an experiment's `pictures` returned as bytes by name. Raises ValueError, which says what is odd."""
    if not isinstance(returned, Mapping):
        raise ValueError(
            f"it must return a mapping of names to images, not {type(returned).__name__}"
        )
    if len(returned) > MOST_OF_OWN:
        raise ValueError(f"it returned {len(returned)} images; at most {MOST_OF_OWN} are kept")
    found = {}
    for name, image in zip(user_images.apart(returned), returned.values(), strict=True):
        try:
            found[name] = as_bytes(image)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
    return found
