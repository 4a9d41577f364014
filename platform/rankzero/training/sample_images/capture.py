"""Pictures of a run: the model's mistakes, the first training batch, the experiment's own images.

    train     keep the first batch's images                            rank 0
    evaluate  a hook keeps the model's outputs; no further forward     rank 0
    due?      the first evaluation, the last, a new best now and then  the same on all ranks
    take      one copy to the host, one small file, one event          rank 0; the courier draws

No failure here ends a run. The first one is reported, and this rank takes no more pictures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankzero.events import PicturesTaken
from rankzero.run_store import picture_files
from rankzero.training import rng
from rankzero.training.sample_images.mistakes import (
    MAX_SHOWN,
    Mistakes,
    classified,
    is_labelled_images,
    pixels,
    small,
)
from rankzero.training.sample_images.user_images import close_figures, images_of
from rankzero.training.strategies.compiled_call import COMPILED_CALL

MIN_SECONDS = 10.0
"""Seconds of training between pictures of a new best."""
_MIN_SHARE = 0.1
"""The same as a share of the training so far, so that a day has about a hundred pictures."""
_MAX_CLASS_NAME = 60


class ImageCapture:
    """Writes pictures to `folder` on rank 0. On other ranks (None) it only keeps a batch.

    `total`: validation samples of all ranks. `classes`: their names, or () if unknown. `own`: the
    experiment's ``pictures(model, batch)``, or None.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        total: int = 0,
        classes: Sequence[str] = (),
        own: Callable[[Any, Any], Mapping[str, Any]] | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._own = own
        # The evaluation's first batch, if the experiment has pictures of its own.
        self._first_batch: Any = None
        self._folder, self._total, self._notice = folder, total, notice
        self._classes = list(classes)
        self._mistakes: Mistakes | None = None
        self._wants_training_batch = folder is not None
        self._training_batch: tuple[Tensor, Tensor] | None = None
        self._taken_at: float | None = None
        self._complained = False

    def see_training_batch(self, batch: Any) -> None:
        """Keep the images of the first training batch. The loop calls this with every batch."""
        if not self._wants_training_batch:
            return
        self._wants_training_batch = False
        with self._harmless():
            if is_labelled_images(batch):
                images, labels = (tensor[:MAX_SHOWN].detach() for tensor in batch)
                # Cloned, because `measure` may change the batch.
                self._training_batch = small(images).clone(), labels.clone()

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[Callable[[Any, int], None]]:
        """Keep the model's outputs inside the block.

        Yield a function to call after each batch, with the batch and its number of samples.
        """
        self.forget()
        outputs: list[Any] = []
        mistakes = self._mistakes = Mistakes()

        def see(batch: Any, samples: int) -> None:
            if self._own is not None and self._first_batch is None and samples:
                self._first_batch = batch
            with self._harmless():
                # If a model was called twice, either output may be the prediction.
                if samples and len(outputs) == 1:
                    found = classified(batch, outputs[0], len(self._classes))
                    if found is not None:
                        mistakes.add(found)
            outputs.clear()

        with contextlib.ExitStack() as hook:
            if self._folder is not None:
                with self._harmless():  # a scripted model takes no hooks
                    hook.enter_context(caught(model, outputs))
            yield see

    def due(self, better: bool, last: bool, seconds: float) -> bool:
        """Return whether to take pictures, after `seconds` of training.

        The same on every rank if the arguments are.
        """
        since = None if self._taken_at is None else seconds - self._taken_at
        too_soon = since is not None and since < max(MIN_SECONDS, _MIN_SHARE * seconds)
        if not last and (too_soon or not (better or since is None)):
            return False
        self._taken_at = seconds
        return True

    def forget(self) -> None:
        """Release what was kept of an evaluation."""
        self._mistakes, self._first_batch = None, None

    def take(
        self,
        step: int,
        model: nn.Module,
        device: torch.device,
        autocast: contextlib.AbstractContextManager[Any],
    ) -> PicturesTaken | None:
        """Write the images of the last evaluation. Return rank 0's event, or None without images.

        Collective if the experiment overrides `pictures`: the model's forward may be one.
        """
        own = self._own_images(model, device, autocast)
        now, taken = time.time(), None
        with self._harmless():
            arrays = self._arrays(own)
            if self._folder is not None and arrays:
                path = self._folder / f"step_{step:08d}_{int(now * 1000)}.npz"
                picture_files.write(path, arrays)
                taken = PicturesTaken(now, step, f"{self._folder.name}/{path.name}")
        return taken

    def _own_images(
        self,
        model: nn.Module,
        device: torch.device,
        autocast: contextlib.AbstractContextManager[Any],
    ) -> dict[str, Any]:
        """Return what the experiment's `pictures` returns. On other ranks than 0, call it only."""
        if self._own is None or self._first_batch is None:
            return {}
        random_states, returned = rng.state(device), None
        images: dict[str, Any] = {}
        model.eval()
        try:
            with torch.no_grad(), autocast:
                returned = self._own(model, self._first_batch)
            if self._folder is not None:
                images = images_of(returned)
        except Exception as error:  # the user's code; an image must not end a run
            self._complain(f"pictures() failed: {type(error).__name__}: {error}")
        finally:
            close_figures(returned)
            model.train()
            rng.restore(random_states, device)
        return images

    def _complain(self, text: str) -> None:
        # Only the first failure is reported: the same one would follow at each evaluation.
        if not self._complained:
            self._complained = True
            self._notice(text)

    def _arrays(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays that `reporting.image_grids` draws."""
        arrays = (self._mistakes.read() if self._mistakes is not None else None) or {}
        if self._training_batch is not None:
            images, labels = self._training_batch
            self._training_batch = None
            arrays |= {"batch": pixels(images), "batch_labels": labels.cpu().numpy()}
        arrays |= {f"own_{number}": image for number, image in enumerate(own.values())}
        if not arrays:
            return {}
        classes = np.array([name[:_MAX_CLASS_NAME] for name in self._classes], "U")
        names = np.array(list(own), "U")
        return {**arrays, "classes": classes, "own_names": names, "total": np.int64(self._total)}

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Report an exception inside the block, and stop taking pictures on this rank."""
        try:
            yield
        except Exception as error:  # an odd batch, a full disk: a picture must never end a run
            self._folder = None
            self._complain(f"no more pictures: {type(error).__name__}: {error}")


@contextlib.contextmanager
def caught(model: nn.Module, outputs: list[Any]) -> Iterator[None]:
    """Append the model's outputs to a list inside the block, two at most."""
    # Hooks would become part of the compiled code. So the call is replaced instead.
    compiled = getattr(model, COMPILED_CALL, None)

    def keep(output: Any) -> Any:
        # Two show that the model was called more than once. More would only use memory.
        if len(outputs) < 2:
            outputs.append(output)
        return output

    if compiled is None:
        with model.register_forward_hook(lambda _module, _args, output: keep(output)):
            yield
        return

    setattr(model, COMPILED_CALL, lambda *args, **kwargs: keep(compiled(*args, **kwargs)))
    try:
        yield
    finally:
        setattr(model, COMPILED_CALL, compiled)
