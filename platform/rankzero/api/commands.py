"""``rankzero.train(Digits(lr=0.01))`` and ``rankzero.search(Digits(), minutes=10)``: the commands, from Python.

They run the very command, in a process of its own: the same launch, the same results, and nothing of it stays behind in
the notebook's process. So the experiment must be in a file, which the training processes import.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rankzero import config, experiment_file
from rankzero.api.results import Run
from rankzero.api.results import run as run_of
from rankzero.errors import FINISHED, RESUMABLE, USAGE, RunFailed, UserError
from rankzero.launch.request import with_secrets
from rankzero.run_store.folder import new_name
from rankzero.run_store.location import root_of

if TYPE_CHECKING:
    from pandas import DataFrame

    from rankzero.experiment import Experiment

_STUDY = re.compile(r"study  (\S+)  ")


def train(
    experiment: Experiment,
    *,
    nproc: int | None = None,
    run_name: str | None = None,
    dir: str | Path | None = None,
    **options: Any,
) -> Run:
    """Train as ``rankzero train`` does, on `nproc` processes; return the run, one that stopped with a checkpoint, too.

    `options`: the command's others, ``tracking_uri="http://…"``. Raises RunFailed with the reason, UserError.
    """
    reference = reference_of(experiment)
    name = run_name or new_name(Path(reference.rpartition(":")[0]).stem)
    words = [
        "train",
        reference,
        *changed(experiment),
        "--run-name",
        name,
        *_options(nproc=nproc, dir=dir, **options),
    ]
    _call(words, showing=sys.stdout.isatty())
    return run_of(name, dir=dir)


def search(
    experiment: Experiment,
    *,
    minutes: float | None = None,
    trials: int | None = None,
    nproc: int | None = None,
    dir: str | Path | None = None,
    **options: Any,
) -> SearchHandle:
    """Search as ``rankzero search`` does, around this configuration; return what was found. Again: goes on with it.

    `options`: the command's others, ``parallel=2, no_probe=True``. Raises RunFailed with the reason, UserError.
    """
    wanted = _options(minutes=minutes, trials=trials, nproc=nproc, dir=dir, **options)
    printed = _call(
        ["search", reference_of(experiment), *changed(experiment), *wanted], showing=False
    )
    named = _STUDY.search(printed)
    if named is None:
        raise RunFailed("the search did not say what its study is called")
    return SearchHandle(run_of(named[1], dir=dir), experiment)


class SearchHandle:
    """What a search found."""

    def __init__(self, run: Run, experiment: Experiment) -> None:
        self.run, self._experiment = run, experiment

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return self.run.reason

    @property
    def trials(self) -> DataFrame:
        """The trials, a row each, by number."""
        import pandas

        table = json.loads(
            (self.run.folder / "artifacts" / "trials.json").read_text(encoding="utf-8")
        )
        return pandas.DataFrame(table["data"], columns=table["columns"])

    @property
    def sweet_spot(self) -> Experiment:
        """The experiment with the configuration that was found: what to train with. Raises UserError without one."""
        path = self.run.folder / "artifacts" / "sweet_spot.yaml"
        if not path.exists():
            raise UserError(f"study {self.name} has found no sweet spot yet: search on")
        told = with_secrets(config.read_file(path), config.rendered(self._experiment))
        return config.override(type(self._experiment)(), told)

    def __repr__(self) -> str:
        return f"<study {self.name}: {self.sentence}>"

    def _repr_markdown_(self) -> str:
        return self.run.report


def reference_of(experiment: Experiment) -> str:
    """Return the file and the class of an experiment, as the command line takes them.

    Raises UserError where no other process could import the class, or where the file itself is being imported.
    """
    cls = type(experiment)
    if experiment_file.is_loading():
        raise UserError(
            "the experiment's file trains when it is imported, which every training process does: put the call below "
            'if __name__ == "__main__":'
        )
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not file.endswith(".py") or "." in cls.__qualname__:
        raise UserError(
            f"{cls.__name__} is not at the top of a file, so that training processes cannot import it: put it into one "
            f"(in a notebook, begin its cell with %%writefile {cls.__name__.lower()}.py), and import it from there"
        )
    return f"{Path(file).absolute()}:{cls.__name__}"


def changed(experiment: Experiment) -> list[str]:
    """Return the settings that differ from the class's own, as the command line takes them."""
    own = config.rendered(type(experiment)())
    return [
        f"{key}={text}" for key, text in config.rendered(experiment).items() if text != own[key]
    ]


def _options(**wanted: Any) -> Iterator[str]:
    """Yield Python's keywords as the command's options: none where None or False, the bare option where True."""
    for name, value in wanted.items():
        if name == "dir" and value is not None:
            value = root_of(value)
        option = f"--{name.replace('_', '-')}"
        if value is True:
            yield option
        elif value is not None and value is not False:
            yield f"{option}={value}"


def _call(words: Sequence[str], *, showing: bool) -> str:
    """Run the command to its end; return what it printed, unless it shows that on the terminal by itself.

    Ctrl-C, or a notebook's interrupt, reaches it once, so that it stops with a checkpoint; then it is raised here.
    """
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as errors:
        command = [sys.executable, "-P", "-m", "rankzero", *words]
        pipe = None if showing else subprocess.PIPE
        process = subprocess.Popen(
            command,
            text=True,
            errors="backslashreplace",
            stdout=pipe,
            stderr=errors,
            start_new_session=True,
        )
        printed = _to_its_end(process)
        errors.seek(0)
        _judge(process.returncode, errors)
    return printed


def _to_its_end(process: subprocess.Popen[str]) -> str:
    lines: list[str] = []
    interrupted = False
    while True:
        try:
            for line in process.stdout or ():
                lines.append(line)
                print(line, end="", flush=True)
            process.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    return "".join(lines)


def _judge(code: int, errors: IO[str]) -> None:
    said, _, message = errors.read().rpartition("error: ")
    if code not in (FINISHED, RESUMABLE):
        print(said, end="", file=sys.stderr)
        raise (UserError if code == USAGE else RunFailed)(
            message.strip() or f"it ended with exit code {code}"
        )
    print(said + message, end="", file=sys.stderr)
