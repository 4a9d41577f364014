"""The live display of a run. It reads the run's journals, so the training does not pay for it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rankzero.catalog import command_lines
from rankzero.cli.display.terminal import is_interactive, text_console
from rankzero.events import Evaluated, Event, RunEnded, RunStarted
from rankzero.experiment import Goal
from rankzero.launch.agent import log_files
from rankzero.mlflow_store.drivers import is_database
from rankzero.mlflow_store.uris import DATABASE, sqlite_path
from rankzero.redaction.text import url_without_secrets
from rankzero.reporting.progress_bar import ProgressModel, progress_panel
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read

# Each look at the files takes a core from a rank for a moment: rarely, unless somebody watches.
_LIVE_SECONDS, _POLL_SECONDS = 0.25, 1.0
_PIECE = 1 << 16  # bytes of output that are printed at once
_LINE_SECONDS = 5.0  # between progress lines where there is no terminal


class Console:
    """Shows a run from a thread, for the duration of a ``with`` block.

    Output of `rank` appears above the progress. It shows what is written from now on.
    """

    def __init__(
        self,
        folder: RunFolder,
        goal: Goal,
        rank: int = 0,
        advise: Callable[[Event], str | None] = lambda _: None,
        *,
        is_first: bool | None = True,
        shows_progress: bool = True,
    ) -> None:
        """`is_first`: whether this machine shows the run; None until `joined` is called."""
        self._folder, self._rank, self._advise = folder, rank, advise
        self.is_first = is_first
        self._terminal = text_console()  # metrics and paths may contain brackets
        self._progress = ProgressModel(goal)
        self._journals = (folder.system(0), folder.events)
        self._offsets = {
            path: path.stat().st_size for path in (*self._journals, *self._logs()) if path.exists()
        }
        self._stopping = threading.Event()
        # Daemon: a display must never keep a command from ending.
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._live: Live | None = None
        self._next_line = 0.0 if shows_progress else math.inf
        # How the newest attempt ended. None while it runs.
        self.ended: RunEnded | None = None

    def __enter__(self) -> Console:
        if self.is_first:
            self._print_head()
        self._thread.start()
        return self

    def joined(self, number: int) -> None:
        """Show the run if this machine is the first of several, else nothing but errors."""
        if self.is_first is None and number == 0:
            self._print_head()
        self.is_first = number == 0

    def _print_head(self) -> None:
        identity = self._folder.identity
        experiment = f"  (MLflow experiment {identity.experiment})"
        self._terminal.print(Text.assemble("run    ", (identity.name, "bold"), experiment))
        store = url_without_secrets(identity.tracking_uri)
        self._terminal.print(f"store  {store}   look: {look(self._folder)}")

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def catch_up(self) -> None:
        """Read the journals up to now, before the block; print the newest evaluation."""
        newest: Evaluated | None = None
        for path in self._journals:
            self._offsets[path] = 0
            while events := self._new_events(path):
                newest = next((one for one in events[::-1] if isinstance(one, Evaluated)), newest)
        if newest is not None:
            self._terminal.print(self._progress.evaluation_line(newest))

    def notice(self, text: str) -> None:
        """Print a note, but not if another machine shows the run."""
        if self.is_first is False:
            return
        self._terminal.print(Text.assemble(("note:", "yellow"), " ", text))

    def status(self, text: str) -> AbstractContextManager[object]:
        """Show during a block, on a terminal, what is being done."""
        if is_interactive():
            return self._terminal.status(Text(text))
        return contextlib.nullcontext()

    def result(self, ended: RunEnded) -> None:
        """Print how the run ended and what to do next, but not if another machine shows it."""
        if self.is_first is False:
            return
        name = self._folder.identity.name
        title = f"{name}: {ended.status}"
        if is_interactive():
            self._terminal.set_window_title(title)
            self._terminal.bell()
        table = Table(title=title, title_justify="left", show_header=False, min_width=48)
        table.add_column()
        table.add_column(overflow="fold")
        for row in self._progress.results(ended):
            table.add_row(*row)
        self._terminal.print(table)
        self._terminal.print(f"look:   {look(self._folder)}")
        if ended.status != "FINISHED" and any(self._folder.checkpoints.glob("step_*")):
            self._terminal.print(f"resume: {command(self._folder.root, 'resume', name)}")

    def _follow(self) -> None:
        with contextlib.ExitStack() as display:
            # One block of progress that is drawn again. Into a pipe, plain lines.
            if is_interactive():
                live = Live(console=self._terminal, refresh_per_second=4, transient=True)
                self._live = display.enter_context(live)
            while not self._stopping.wait(_POLL_SECONDS if self._live is None else _LIVE_SECONDS):
                self._update()
            self._update(ended=True)

    def _update(self, *, ended: bool = False) -> None:
        if not self.is_first:
            return
        self._print_new_output(ended=ended)
        for path in self._journals:
            for event in self._new_events(path):
                if isinstance(event, RunStarted) and event.attempt > 1:
                    self._terminal.print(f"attempt {event.attempt}, from step {event.step}")
                elif isinstance(event, Evaluated):
                    self._terminal.print(self._progress.evaluation_line(event))
                advice = self._advise(event)
                if advice is not None:
                    self.notice(advice)
        # Into a pipe a line now and then: a log of a day's training must stay readable.
        if self._live is not None:
            self._live.update(progress_panel(self._progress))
            name = self._folder.path.name
            self._terminal.set_window_title(f"{name}: {self._progress.facts()[0]}")
        elif self._progress.run.steps and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            self._terminal.print("  ".join(self._progress.facts()))

    def _new_events(self, path: Path) -> list[Event]:
        """Read what was appended to a journal, and take it into the progress."""
        events, self._offsets[path] = read(path, self._offsets.get(path, 0))
        for event in events:
            self._progress(event)
            if isinstance(event, (RunStarted, RunEnded)):
                self.ended = event if isinstance(event, RunEnded) else None
        return events

    def _print_new_output(self, *, ended: bool = False) -> None:
        """Print a piece of what each rank has written, or all of it once the ranks have ended."""
        for path in self._logs():
            more = True
            while more:
                start = self._offsets.get(path, 0)
                with path.open("rb") as file:
                    file.seek(start)
                    text = file.read(_PIECE)
                # Complete lines only: half a line would tear the live block.
                lines = text[: text.rfind(b"\n") + 1]
                if not lines and (ended or len(text) == _PIECE):
                    # A progress bar writes no line for long, and a killed rank not its last one.
                    lines = text
                self._offsets[path] = start + len(lines)
                more = ended and bool(lines)
                if lines:
                    is_last = ended and len(text) < _PIECE and not lines.endswith(b"\n")
                    printed = lines.decode(errors="replace")
                    self._terminal.print(printed, end="\n" if is_last else "")

    def _logs(self) -> list[Path]:
        return log_files(self._folder.path / "logs", self._rank)


def look(folder: RunFolder) -> str:
    """Return where people see a run: an address, or a command that serves its store."""
    tracking_uri = folder.identity.tracking_uri
    shown, path = url_without_secrets(tracking_uri), sqlite_path(tracking_uri)
    if path is not None and path.name == DATABASE:
        return command(path.parent, "ui")
    if path is not None or is_database(tracking_uri):
        return shlex.join(["mlflow", "server", "--backend-store-uri", shown])
    return shown


def command(root: Path | None, *words: str) -> str:
    """Return a command on the store in `root`, as people may type it here."""
    return command_lines.line(root, *words, program=program())


def program() -> str:
    """Return what to type for ``rankzero``: the name if the shell finds it, else its path."""
    if shutil.which("rankzero"):
        return "rankzero"
    path = Path(sys.executable).with_name("rankzero")
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
