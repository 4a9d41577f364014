"""TensorBoard's `SummaryWriter` over a tracked run. It needs no TensorBoard, and writes none.

from rankzero.integrations.tensorboard import SummaryWriter

writer = SummaryWriter("runs/digits")  # or SummaryWriter(run=rankzero.track(…))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rankzero.integrations.own_loop.attempt import guarded
from rankzero.integrations.own_loop.logged_files import text_name
from rankzero.integrations.own_loop.track import track
from rankzero.integrations.own_loop.tracked_run import TrackedRun

# TensorBoard's own arguments, which concern its files.
_OF_FILES = ("purge_step", "max_queue", "flush_secs", "filename_suffix")
_MOST_IMAGES = 16


class SummaryWriter:
    """Sends what a script writes for TensorBoard to a run. Safe on every rank.

    `log_dir`: its last part is the MLflow experiment. `comment`: a tag of a new run. `run`: an
    open run, which `close` does not end. `options`: those of `rankzero.track` for a new run. Times
    of the caller are ignored.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        comment: str = "",
        *_: Any,
        run: TrackedRun | None = None,
        **options: Any,
    ) -> None:
        self._is_own, self._hparams = run is None, 0
        settings = {name: value for name, value in options.items() if name not in _OF_FILES}
        experiment = Path(log_dir).name if log_dir else Path(sys.argv[0]).stem
        if experiment.endswith("kernel_launcher"):  # A notebook does not know its own name.
            experiment = "tensorboard"
        self.run = run or track(settings.pop("experiment", experiment or "tensorboard"), **settings)
        if self._is_own:
            self.run.is_owned = True
            self.run.set_tags({"comment": comment} if comment else {})
        # A script may write files of its own there.
        folder = Path(log_dir) if log_dir else (self.run.folder or Path.cwd()) / "artifacts"
        self.log_dir = str(folder)
        if self.run.folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get_logdir(self) -> str:
        """Return the folder for a script's own files."""
        return self.log_dir

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
    ) -> None:
        """Log a metric. Without a step, the steps count on."""
        self.run.log({tag: scalar_value}, global_step)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: Any = None,
        walltime: Any = None,
    ) -> None:
        """Log metrics called ``main_tag/name``."""
        values = {f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()}
        self.run.log(values, global_step)

    def add_image(
        self,
        tag: str,
        img_tensor: Any,
        global_step: Any = None,
        walltime: Any = None,
        dataformats: str = "CHW",
    ) -> None:
        """Log an image by its tag and step."""

        def log() -> None:
            image = _reordered(img_tensor, dataformats, "CHW")
            self.run.log_image(image, key=tag, step=global_step)

        self._safely(tag, log)

    def add_images(
        self,
        tag: str,
        img_tensor: Any,
        global_step: Any = None,
        walltime: Any = None,
        dataformats: str = "NCHW",
    ) -> None:
        """Log the first 16 images of a batch, as ``tag/0`` and so on."""

        def log() -> None:
            images = _reordered(img_tensor, dataformats, "NCHW")
            for number, image in enumerate(images[:_MOST_IMAGES]):
                self.run.log_image(image, key=f"{tag}/{number}", step=global_step)

        self._safely(tag, log)

    def add_figure(
        self, tag: str, figure: Any, global_step: Any = None, close: bool = True, *_: Any, **__: Any
    ) -> None:
        """Log a figure of matplotlib by its tag and step, or a list of figures."""
        from rankzero.training.sample_images.user_images import close_figures

        figures = {tag: figure}
        if isinstance(figure, (list, tuple)):
            figures = {f"{tag}/{number}": one for number, one in enumerate(figure)}
        for key, one in figures.items():
            self.run.log_image(one, key=key, step=global_step)
        if close:
            close_figures(figures)

    def add_text(
        self, tag: str, text_string: str, global_step: Any = None, walltime: Any = None
    ) -> None:
        """Write a text as the artifact ``text/tag/step_<step>.md``, or ``text/tag.md``."""
        self.run.log_text(str(text_string), text_name(tag, global_step))

    def add_hparams(
        self,
        hparam_dict: Mapping[str, Any],
        metric_dict: Mapping[str, Any],
        hparam_domain_discrete: Any = None,
        run_name: str | None = None,
        global_step: Any = None,
    ) -> None:
        """Log params and their results. After the first call, or with a name: in a child run."""
        self._hparams += 1
        if self._hparams == 1 and run_name is None:
            self.run.log_params(hparam_dict)
            self.run.log(metric_dict, global_step)
            return
        with self.run.child(run_name or f"hparams-{self._hparams}", hparam_dict) as child:
            child.log(metric_dict, global_step)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method that notes, once, that nothing of its kind is kept."""
        if not name.startswith("add_"):
            raise AttributeError(f"SummaryWriter has no {name}")
        return lambda *_, **__: self.run.tell(name, f"{name}: what it writes is not kept")

    def flush(self) -> None:
        """Hand what was logged to the operating system, where readers find it."""
        _ = self.run.step

    def close(self) -> None:
        """End the run, unless it was given. A later value continues it."""
        self._end(None)

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._is_own:
            self.run.finish(error)
        else:
            self.flush()

    def _safely(self, tag: str, action: Callable[[], None]) -> None:
        guarded(f"{tag} is not logged", action, lambda text: self.run.tell(tag, text))


def _reordered(image: Any, axes: str, wanted: str) -> Any:
    """Return an image with its axes in the order wanted, without those that it lacks."""
    order = [axes.upper().index(axis) for axis in wanted if axis in axes.upper()]
    # NumPy has no bfloat16.
    return image.permute(order) if hasattr(image, "permute") else np.transpose(image, order)
