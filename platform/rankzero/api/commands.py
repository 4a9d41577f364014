"""``rankzero.train(Digits(lr=0.01))`` and ``rankzero.search(Digits())``: commands from Python.

They run the command in a process of its own: the launch and the results are the same, and nothing
stays in the notebook's process. The training processes import the experiment, so it must be in a
file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankzero import config, experiment_file
from rankzero.api import notebook, results
from rankzero.config.values import render
from rankzero.errors import FAILED, FINISHED, NOT_DELIVERED, RESUMABLE, USAGE, RunFailed, UserError
from rankzero.experiment import Experiment, Goal, Train, is_outdated
from rankzero.launch import machines
from rankzero.launch.request import with_secrets
from rankzero.launch.signals import handled_signals
from rankzero.mlflow_store.server import has_screen
from rankzero.redaction.text import blotted
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.location import root_of
from rankzero.run_store.spoken_names import new_name

if TYPE_CHECKING:
    from pandas import DataFrame

# -P: a file of the current folder must not hide a module of ours.
_COMMAND = (sys.executable, "-P", "-m", "rankzero")
# False is the same as to leave these out.
_OFF = (
    *("debug", "new", "no_probe", "no_progress", "notify", "ray", "resume_if_there", "slurm"),
    *("tracking_uri", "wait_delivery"),
)
# The servers of `open_ui` by the folder of their runs, with their addresses.
_servers: dict[Path, tuple[subprocess.Popen[bytes], str]] = {}


def train(
    experiment: Experiment,
    *,
    nproc: int | None = None,
    run_name: str | None = None,
    dir: str | Path | None = None,
    **options: Any,
) -> results.Run:
    """Train as ``rankzero train`` does, on `nproc` processes; return the run.

    A run that was stopped and has a checkpoint is returned, too. `options` are the command's other
    options, such as ``tracking_uri="http://…"`` or ``offline=True``. Raises RunFailed with the
    reason, and UserError.
    """
    return _run("train", experiment, run_name, nproc=nproc, dir=dir, **options)


def search(
    experiment: Experiment,
    *,
    minutes: float | None = None,
    trials: int | None = None,
    nproc: int | str | Sequence[int] | None = None,
    dir: str | Path | None = None,
    **options: Any,
) -> SearchHandle:
    """Search as ``rankzero search`` does, around this configuration; return the study.

    The same call again continues the study. `nproc`: also several, such as ``[1, 2, 4]``.
    `options`: the command's others, such as ``parallel=2, no_probe=True``. Raises RunFailed and
    UserError.
    """
    words = _words("search", experiment)
    if isinstance(nproc, Iterable) and not isinstance(nproc, str):
        nproc = ",".join(map(str, nproc))
    words += _options(minutes=minutes, trials=trials, nproc=nproc, dir=dir, **options)
    with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
        # Only the command knows the study's name: it depends on all that must stay equal.
        result = Path(folder) / "study.json"
        _call([*words, f"--result-file={result}"], showing=False, stopped_fails=True)
        study = json.loads(result.read_text(encoding="utf-8"))["study"]
    return SearchHandle(results.run(study, dir=dir), experiment)


def repeat(
    experiment: Experiment,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] | None = None,
    nproc: int | None = None,
    run_name: str | None = None,
    dir: str | Path | None = None,
    **options: Any,
) -> results.Run:
    """Repeat as ``rankzero repeat`` does; return the repeat's run, with its means as metrics.

    `over`: {setting: values}. `options` are the command's other options. Raises RunFailed, also
    where some of the runs failed, and UserError.
    """
    chosen = "".join(f"{n}," for n in seeds) if isinstance(seeds, Iterable) else seeds
    options |= {"seeds": chosen, "nproc": nproc, "dir": dir, "over": _varied(over or {})}
    return _run("repeat", experiment, run_name, **options)


def open_ui(*, port: int | None = None, dir: str | Path | None = None) -> str:
    """Start ``rankzero ui``, and return the address of the newest experiment's runs.

    On a desktop, a browser opens it. The server ends when this program exits. A second call returns
    the same address. `port`: by default a free one. Raises UserError and RunFailed.
    """
    root = root_of(dir).absolute()
    server, address = _servers.get(root, (None, ""))
    if server is not None and server.poll() is None:
        return address
    browser = "--open" if has_screen() else "--no-open"
    with tempfile.TemporaryDirectory(prefix="rankzero-") as folder:
        result, errors = Path(folder) / "ui.json", Path(folder) / "errors.txt"
        words = ["ui", browser, f"--port={port or 0}", f"--dir={root}", f"--result-file={result}"]
        with errors.open("w") as file:
            # In a session of its own, so that Ctrl-C in a cell does not end it. It ends with the
            # pipe, which lives as long as this program, however that ends.
            server = subprocess.Popen(
                [*_COMMAND, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )
        with _ends_with(server):
            while not result.exists():
                if server.poll() is not None:
                    _check(server.returncode or FAILED, errors.read_text(errors="replace"))
                time.sleep(0.05)
        address = str(json.loads(result.read_text(encoding="utf-8"))["address"])
    _servers[root] = (server, address)
    return address


class SearchHandle:
    """A study and what it found."""

    def __init__(self, run: results.Run, experiment: Experiment) -> None:
        self.run, self._experiment = run, experiment

    @property
    def name(self) -> str:
        """The study's name, which is its run's."""
        return self.run.name

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        return self.run.reason

    @property
    def trials(self) -> DataFrame:
        """The trials, one row each, by number."""
        import pandas

        table = json.loads(self._artifact("trials.json").read_text(encoding="utf-8"))
        return pandas.DataFrame(table["data"], columns=table["columns"])

    @property
    def sweet_spot(self) -> Experiment:
        """The experiment with the best configuration. Raises UserError if none was found yet."""
        path = self._artifact("sweet_spot.yaml")
        if not path.exists():
            raise UserError(f"study {self.name} has found no sweet spot yet: search again")
        # The file has no secrets. They come from the experiment that the search was called with.
        found = with_secrets(config.read_file(path), config.rendered(self._experiment))
        return config.override(type(self._experiment)(), found)

    def _artifact(self, name: str) -> Path:
        return self.run.folder / "artifacts" / name

    def __repr__(self) -> str:
        return f"<study {self.name}: {self.sentence}>"

    def _repr_html_(self) -> str:
        return self.run._repr_html_()


def _run(verb: str, experiment: Experiment, run_name: str | None, **options: Any) -> results.Run:
    """Run a command that makes one run; return the run."""
    words, is_own = _words(verb, experiment), not is_outdated(type(experiment))
    # The name is chosen here, so that the run can be found after the command has ended.
    runs = root_of(options["dir"]) / "runs"
    # `name` is the command's other spelling of the same option.
    other = options.pop("name", None)
    if run_name and other and run_name != other:
        raise UserError(
            f"run_name={run_name!r} and name={other!r} are one option: give one of them"
        )
    name = run_name or other or _drawn_name(verb, runs, options)
    words += ["--run-name", name, *_options(**options)]
    if verb == "train" and notebook.is_running():
        with notebook.progress(RunFolder(runs / name), experiment.goal):
            _call([*words, "--no-progress"], showing=False)
    else:
        # The command draws on the real terminal, and not on what a program put in its place.
        shown = sys.stdout is not None and sys.stdout is sys.__stdout__
        _call(words, showing=shown and sys.stdout.isatty())
    # Somebody may have given another run this name in MLflow meanwhile.
    return results.Run(RunFolder(runs / name), is_own=is_own)


def _drawn_name(verb: str, runs: Path, options: Mapping[str, Any]) -> str:
    """Return a new name for a run. Raises UserError where other machines would draw another."""
    count = options.get("nnodes") or os.environ.get(f"{machines.OF_TORCHRUN}NNODES")
    # A repeat has one machine. With these, the command starts the other machines itself.
    if verb == "train" and not (options.get("slurm") or options.get("ray")):
        step = None if count else machines.of_slurm(os.environ, typed=machines.is_typed())
        if step or str(count or 1) not in ("1", "1:1"):
            raise UserError(
                "several machines need one name for the run: give run_name='NAME' on each"
            )
    return new_name(runs, "" if verb == "train" else verb)


def _varied(over: Mapping[str, Iterable[Any]]) -> list[str]:
    """Return the values of ``--over``. Raises UserError if some are no lists of values."""
    values = over.values() if isinstance(over, Mapping) else [None]
    if any(isinstance(one, str) or not isinstance(one, Iterable) for one in values):
        raise UserError(f"over must be {{setting: values}}, such as {{'lr': [0.1]}}, got {over!r}")
    # As JSON, because a value may have a comma.
    return [f"{key}={json.dumps([*map(render, values)])}" for key, values in over.items()]


def _reference_of(experiment: Experiment) -> str:
    """Return the file and class of an experiment, as the command line takes them.

    Raises UserError where no other process can import the class, and where its file calls us
    while it is being imported.
    """
    cls = type(experiment)
    # Without this check, each training process would start a training of its own, without end.
    if experiment_file.is_loading():
        raise UserError(
            "the experiment's file trains when it is imported, which every training process does: "
            'put the call below if __name__ == "__main__":'
        )
    # A class of a notebook or of a function cannot be imported by its name.
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not file.endswith(".py") or "." in cls.__qualname__:
        raise UserError(
            f"{cls.__name__} is not defined at the top level of a file, so training processes "
            "cannot import it: put it into a file and import it from there (in a notebook, begin "
            f"its cell with %%writefile {cls.__name__.lower()}.py)"
        )
    return f"{Path(file).absolute()}:{cls.__name__}"


def _words(verb: str, experiment: object) -> list[str]:
    """Return a command line with the settings that differ from the defaults in the class's file.

    Raises UserError if it is no experiment.
    """
    if not isinstance(experiment, Experiment):
        name = getattr(experiment, "__name__", "Digits")
        raise UserError(
            f"rankzero.{verb} takes an object of an experiment's class, such as {name}(), got "
            f"{experiment!r}"
        )
    _refuse_other_groups(experiment, type(experiment)())
    defaults = config.rendered(type(experiment)())
    # The command imports the file as it is now, which may have other defaults. A secret stays in
    # the file: anyone can read a command line.
    if is_outdated(type(experiment)):
        defaults = {key: defaults[key] for key in blotted(type(experiment)())}
    settings = config.rendered(experiment)
    changed = {key: text for key, text in settings.items() if text != defaults.get(key)}
    # One that `__post_init__` computes may have its usual value nevertheless.
    while (key := config.stale(type(experiment)(), changed)) and key not in blotted(experiment):
        changed[key] = settings[key]
    assignments = (f"{key}={text}" for key, text in changed.items())
    return [verb, _reference_of(experiment), *assignments]


def _refuse_other_groups(given: Any, default: Any) -> None:
    """Raise UserError if a group of the user's has another class than its default."""
    for name in (field.name for field in dataclasses.fields(given)):
        group = getattr(given, name)
        # An object of a class that was reloaded since may have a field that is gone.
        usual = getattr(default, name, group)
        if dataclasses.is_dataclass(group) and not isinstance(group, (Train, Goal)):
            kinds = type(group).__qualname__, type(usual).__qualname__
            if kinds[0] != kinds[1]:
                raise UserError(
                    f"{name} is {kinds[0]}(…), but the command would train with {kinds[1]}(…), its "
                    f"default: give {kinds[1]} the values, or add a setting that chooses between "
                    "the two, such as a Literal"
                )
            _refuse_other_groups(group, usual)


def _options(**wanted: Any) -> Iterator[str]:
    """Yield keywords as options: nothing for None, the bare option for True, --no-NAME for False.

    A list gives an option several times, and so do a tuple and a mapping: ``tag={"a": "b"}``.
    """
    for name, value in wanted.items():
        # An empty folder means the default one, as in `results.run`.
        if name == "dir" and value is not None:
            value = root_of(value)
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            value = [f"{key}={one}" for key, one in value.items()]
        if value is True:
            yield option
        elif value is False and name not in _OFF:
            yield option.replace("--", "--no-", 1)  # The command refuses one that it lacks.
        elif isinstance(value, (list, tuple)):
            yield from (f"{option}={one}" for one in value)
        elif value is not None and value is not False:
            yield f"{option}={value}"


def _call(words: Sequence[str], *, showing: bool, stopped_fails: bool = False) -> None:
    """Run the command to its end; `showing`: it draws on the terminal itself.

    `stopped_fails`: a stopped one has no result for the caller.

    Ctrl-C and a notebook's interrupt reach the command once, so that it stops with a checkpoint.
    KeyboardInterrupt is raised after that. Another exception stops it, too. SIGTERM and SIGHUP
    reach it, too, and this program once the command has ended. Raises RunFailed and UserError as
    the command fails.
    """
    # The command has a session of its own, so it cannot see that the user typed in a Slurm step.
    hidden = {"SLURM_STEP_ID"} if machines.is_typed() else set[str]()
    # A file and not a pipe: nobody reads a pipe while the output is printed.
    with tempfile.TemporaryFile("w+", errors="backslashreplace") as errors:
        process = subprocess.Popen(
            [*_COMMAND, *words],
            text=True,
            errors="backslashreplace",
            stdout=None if showing else subprocess.PIPE,
            stderr=errors,
            env={name: value for name, value in os.environ.items() if name not in hidden},
            start_new_session=True,  # so that the terminal's Ctrl-C reaches it through us only
        )
        interrupted = False
        with _ends_with(process):
            # An interrupt leaves the loop over the output, which then continues: the command
            # prints how it stopped.
            while process.returncode is None:
                try:
                    for line in process.stdout or ():
                        print(line, end="", flush=True)
                    process.wait()
                except KeyboardInterrupt:
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        if interrupted:
            raise KeyboardInterrupt
        errors.seek(0)
        _check(process.returncode, errors.read(), stopped_fails=stopped_fails)


@contextlib.contextmanager
def _ends_with(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Forward what ends this program to the command, and have it act here after the command's end.

    Else the training would run on without an owner. Only the main thread gets signals. An exception
    may end this program, too: a BrokenPipeError, or what the user's signal handler raises.
    """
    received, before = list[int](), dict[signal.Signals, Any]()

    def forward(number: int, _frame: object) -> None:
        received.append(number)
        process.send_signal(number)

    if threading.current_thread() is threading.main_thread():
        for number in handled_signals([signal.SIGTERM, signal.SIGHUP]):
            before[number] = signal.signal(number, forward)
    try:
        yield
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for first in received[:1]:
            signal.raise_signal(first)


def _check(code: int, errors: str, *, stopped_fails: bool = False) -> None:
    """Print what the command noted. Raise its error with the text that the command printed."""
    # The error comes last. Its text may quote another error, but not at the start of a line.
    notes, _, message = f"\n{errors}".rpartition("\nerror: ")
    if code < 0:  # by a signal, such as the kernel's when the memory is full
        notes, message = f"\n{errors}", ""
    # A stopped run has a checkpoint, which the caller wants. A stopped search has no verdict.
    fails = code not in (FINISHED, NOT_DELIVERED) and (stopped_fails or code != RESUMABLE)
    print(notes[1:] if fails else errors, end="", file=sys.stderr)
    if fails:
        kind = UserError if code == USAGE else RunFailed
        raise kind(message.strip() or f"the command ended with exit code {code}")
