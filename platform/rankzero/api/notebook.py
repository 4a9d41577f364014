"""A notebook's live display of a run: one output below the cell, drawn again and again."""

from __future__ import annotations

import contextlib
import contextvars
import html
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rankzero.experiment import Goal
from rankzero.reporting.progress_bar import ProgressModel
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read
from rankzero.scalars import shown

_SECONDS = 0.5


def is_running() -> bool:
    """Return whether this process is a notebook's kernel."""
    # A kernel has imported it. Other programs need not wait for the import.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


@contextlib.contextmanager
def progress(folder: RunFolder, goal: Goal) -> Iterator[None]:
    """Show a new run's progress during the block. It reads the run's journals, from a thread."""
    from IPython.display import display

    model, over = ProgressModel(goal), threading.Event()
    offsets = {folder.system(0): 0, folder.events: 0}
    output: Any = display(_drawn(model), raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def follow() -> None:
        is_over = False
        while not is_over:
            is_over = over.wait(_SECONDS)
            for path in offsets:
                events, offsets[path] = read(path, offsets[path])
                for event in events:
                    model(event)
            output.update(_drawn(model), raw=True)

    # In a copy of the context, by which the kernel knows the cell of an output.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _drawn(model: ProgressModel) -> dict[str, Any]:
    """Return the progress as a bar with facts, and as text for pages without HTML."""
    run = model.run
    text = "  ".join(model.facts()) if run.steps else "starting…"
    if run.best is not None:
        text += f"  best {model.goal.metric} {shown(run.best)}"
    share = f' value="{run.steps}" max="{run.total_steps}"' if run.total_steps else ""
    bar = f"<progress{share}></progress> {html.escape(text)}"
    return {"text/plain": text, "text/html": bar}
