"""What a person sees of a run: a reader of its journal, in the launching process, so that training pays nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rankzero.cli.display.progress import ProgressModel, progress_line, progress_panel
from rankzero.cli.display.terminal import is_interactive, text_console
from rankzero.events import Evaluated, Event, RunEnded, RunStarted
from rankzero.experiment import Goal
from rankzero.launch.agent import log_files
from rankzero.redaction.text import url_without_secrets
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.journal import read

LIVE_SECONDS, POLL_SECONDS = (
    0.25,
    1.0,
)  # each look at the files takes a core from a rank for a moment
PLAIN_SECONDS = 5.0  # between progress lines where there is no terminal


class Console:
    """Follows a run's journals from a thread, for the duration of a with block.

    On a terminal it keeps one live block of progress; into a pipe it writes plain lines.
    What rank 0 prints appears above, or another rank. It begins with what comes from now on.
    """

    def __init__(
        self,
        folder: RunFolder,
        goal: Goal,
        root: Path,
        rank: int = 0,
        advise: Callable[[Event], str | None] = lambda event: None,
    ) -> None:
        self._folder, self._root = folder, root
        self._terminal = text_console(
            soft_wrap=True
        )  # metrics, reasons and paths may hold brackets
        self._view, self._rank, self._advise = ProgressModel(goal), rank, advise
        self._logs_before = {path: path.stat().st_size for path in self._logs()}
        self._offsets = {
            path: path.stat().st_size for path in (folder.events, folder.system(0)) if path.exists()
        }
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._live: Live | None = None
        self._next_plain = 0.0
        self.ended: RunEnded | None = None

    def __enter__(self) -> Console:
        identity = self._folder.identity
        name = (identity.name, "bold")
        self._terminal.print(
            Text.assemble("run    ", name, f"  (MLflow experiment {identity.experiment})")
        )
        self._terminal.print(
            f"store  {url_without_secrets(identity.tracking_uri)}   look: {self._ui_command()}"
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def catch_up(self) -> None:
        """Take in, before the with block, what the journals hold already; say the newest evaluation."""
        newest: Evaluated | None = None
        for path in (self._folder.system(0), self._folder.events):
            self._offsets[path] = 0
            while events := self._news(path):
                for event in events:
                    self._view(event)
                    self._take_end(event)
                    newest = event if isinstance(event, Evaluated) else newest
        if newest is not None:
            self._terminal.print(self._view.evaluation_line(newest))

    def notice(self, text: str) -> None:
        """Say something once."""
        self._terminal.print(Text.assemble(("note:", "yellow"), " ", text))

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show that something goes on for the duration of the block."""
        if is_interactive():
            with self._terminal.status(Text(text)):
                yield
        else:
            yield

    def result(self, ended: RunEnded) -> None:
        """Print how the run ended and what to do next."""
        name = self._folder.identity.name
        table = Table(
            title=f"{name}: {ended.status}", title_justify="left", show_header=False, min_width=48
        )
        for label, value in self._view.results(ended):
            table.add_row(label, value)
        self._terminal.print(table)
        self._terminal.print(f"look:   {self._ui_command()}")
        if ended.status != "FINISHED" and any(self._folder.checkpoints.glob("step_*")):
            self._terminal.print(f"resume: {program()} resume {name}{self._dir_option()}")

    def _follow(self) -> None:
        with self._display():
            while not self._stopping.wait(POLL_SECONDS if self._live is None else LIVE_SECONDS):
                self._update()
            self._update()

    @contextlib.contextmanager
    def _display(self) -> Iterator[None]:
        if not is_interactive():
            yield
            return
        with Live(console=self._terminal, refresh_per_second=4, transient=True) as self._live:
            yield

    def _update(self) -> None:
        self._pass_output_on()
        for path in (self._folder.system(0), self._folder.events):
            for event in self._news(path):
                self._view(event)
                self._take_end(event)
                self._show(event)
                advice = self._advise(event)
                if advice is not None:
                    self.notice(advice)
        if self._live is not None:
            self._live.update(progress_panel(self._view))
        elif self._view.step and time.monotonic() >= self._next_plain:
            self._next_plain = time.monotonic() + PLAIN_SECONDS
            self._terminal.print(progress_line(self._view))

    def _news(self, path: Path) -> list[Event]:
        events, self._offsets[path] = read(path, self._offsets.get(path, 0))
        return events

    def _show(self, event: Event) -> None:
        match event:
            case RunStarted(attempt=attempt, step=step) if attempt > 1:
                self._terminal.print(f"attempt {attempt}, from step {step}")
            case Evaluated():
                self._terminal.print(self._view.evaluation_line(event))
            case _:
                pass

    def _take_end(self, event: Event) -> None:
        if isinstance(event, (RunStarted, RunEnded)):
            self.ended = event if isinstance(event, RunEnded) else None

    def _pass_output_on(self) -> None:
        for path in self._logs():
            start = self._logs_before.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                text = file.read(1 << 16)
            whole = text[: text.rfind(b"\n") + 1]
            self._logs_before[path] = start + len(whole)
            if whole:
                self._terminal.print(whole.decode(errors="replace"), end="")

    def _logs(self) -> list[Path]:
        return log_files(self._folder.path / "logs", self._rank)

    def _ui_command(self) -> str:
        return f"{program()} ui{self._dir_option()}"

    def _dir_option(self) -> str:
        return "" if self._root.absolute() == Path("mlruns").absolute() else f" --dir {self._root}"


def program() -> str:
    """Return what to type for this command: its name where the shell finds it, else its path from here."""
    if shutil.which("rankzero"):
        return "rankzero"
    beside = Path(sys.executable).with_name("rankzero")
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
