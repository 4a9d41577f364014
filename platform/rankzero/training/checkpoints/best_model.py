"""Logs a finished run's best model to MLflow, so that `mlflow.pytorch.load_model` loads it."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankzero import experiment_file
from rankzero.catalog import command_lines, lookup
from rankzero.config import ConfigError
from rankzero.errors import UserError
from rankzero.events import RunStarted
from rankzero.experiment import Experiment, Goal, is_outdated
from rankzero.launch.process_name import set_process_name
from rankzero.launch.request import with_saved
from rankzero.mlflow_store.uris import RunGone
from rankzero.permanent_errors import lacks_memory_or_space, refusal
from rankzero.redaction.text import line_without_secrets, text_without_secrets
from rankzero.run_store import checkpoint_files, lock_files
from rankzero.run_store.folder import RunFolder, write_atomically
from rankzero.run_store.journal import milestones
from rankzero.run_store.location import may_be_foreign
from rankzero.tracking import delivery_status, open_run
from rankzero.training import rng
from rankzero.training.checkpoints import restore
from rankzero.training.data import sets
from rankzero.training.data.stream import make_loader
from rankzero.training.optimization import frozen
from rankzero.training.strategies.base import with_versions
from rankzero.training_position import Progress, measure_at

_POLL_SECONDS, _END_SECONDS = 0.1, 2.0


class LoggingProcess:
    """A process that logs a run's best model. Its ``with`` block starts and ends it.

    It traces the model at once, and logs it once `wait` is called. Until it has, the folder has a
    mark for `rankzero sync`. It is a process of its own, because the user's code and torch.export
    may hang, crash or fill the memory.
    """

    def __init__(self, folder: RunFolder, *, entry: Callable[..., None] | None = None) -> None:
        """`entry`: what the process runs, in the place of `_run_child`."""
        self._folder, context = folder, multiprocessing.get_context("forkserver")
        self._problems = context.SimpleQueue()
        # If this process dies, the other one reads that nobody may send any more.
        self._theirs, self._delivered = context.Pipe(duplex=False)
        given = (str(folder.path), self._problems, self._theirs)
        self._process = context.Process(target=entry or _run_child, args=given)

    def __enter__(self) -> LoggingProcess:
        mark_unlogged(self._folder, True)
        with contextlib.suppress(OSError, EOFError):  # `wait` notes that it has not started
            self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._delivered.close()
        # The user's code may ignore SIGTERM, and a process that waits for a dead disk ignores
        # SIGKILL.
        for end in (self._process.terminate, self._process.kill) if self._process.pid else ():
            end()
            self._process.join(_END_SECONDS)

    def wait(
        self,
        notice: Callable[[str], None],
        hurried: Callable[[], bool] = lambda: False,
        seconds: float = math.inf,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have the delivered run's model logged. A failure becomes a notice, never an exception.

        It gives up as soon as `hurried()` is true, or after `seconds`.
        """
        folder, until = self._folder, clock() + seconds
        with contextlib.suppress(OSError):  # it has ended
            self._delivered.send(None)
        while (unfinished := self._process.is_alive()) and not hurried() and clock() < until:
            self._process.join(_POLL_SECONDS)
        if not unfinished and self._process.exitcode == 0:
            mark_unlogged(folder, False)
            if not self._problems.empty():
                notice(f"the best model was not logged to MLflow: {self._problems.get()}")
            return
        if hurried():
            why = "the command is stopping"
        elif unfinished:
            why = "it took too long"
        elif not self._problems.empty():
            why = self._problems.get()
        else:
            why = f"its process ended with {self._process.exitcode}"
        again = command_lines.line(folder.root, "sync", folder.path.name)
        notice(f"the best model was not logged to MLflow: {why}; {again} does it")


def log_best(
    folder: RunFolder,
    notice: Callable[[str], None],
    hurried: Callable[[], bool] = lambda: False,
    seconds: float = math.inf,
) -> None:
    """Log a delivered run's best model; see `LoggingProcess.wait`."""
    with LoggingProcess(folder) as process:
        process.wait(notice, hurried, seconds)


def mark_unlogged(folder: RunFolder, unlogged: bool) -> None:
    """Write, or remove, the file by which `rankzero sync` knows that it must log the best model."""
    # On a full or read-only disk, the user must pass the run's name to sync.
    with contextlib.suppress(OSError):
        if unlogged:
            folder.late_model.touch()
        else:
            folder.late_model.unlink(missing_ok=True)


def experiment_of(folder: RunFolder, *, is_own: bool = False) -> Experiment:
    """Return the experiment of a run's file with the run's settings. Raises UserError.

    `is_own`: this program began the run, with the code that it has in memory.
    """
    reference = folder.identity.experiment_file
    if reference is None:
        raise UserError(
            f"{folder.path.name} was not started by `rankzero train`: load the model in its own "
            "program"
        )
    # A file among the runs may have been downloaded with a run.
    if may_be_foreign(reference, folder.root):
        raise UserError(f"{reference} lies among the runs: what came with a run is not executed")
    cls = experiment_file.load(reference)
    if not is_own and is_outdated(cls):
        raise UserError(
            f"{reference} was edited since this program imported it: restart the program or "
            f"kernel, or importlib.reload(sys.modules[{cls.__module__!r}])"
        )
    return with_saved(cls(), folder)


def load_best(folder: RunFolder, *, is_own: bool = False) -> nn.Module:
    """Return the experiment's model with the best checkpoint's weights, in evaluation mode.

    `is_own`: as for `experiment_of`. Raises UserError.
    """
    experiment = experiment_of(folder, is_own=is_own)
    path = _best_checkpoint(folder, experiment.goal)
    callers = rng.state(torch.device("cpu"))
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        return _load_model(experiment, path)
    except (RuntimeError, ValueError, KeyError, checkpoint_files.BrokenCheckpoint) as error:
        raise UserError(
            f"{path} does not fit the experiment's model as its file is now: {error}"
        ) from error
    finally:
        rng.restore(callers, torch.device("cpu"))
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
        else:
            # They are seeded once something uses them, with the newest seed.
            torch.cuda.manual_seed_all(torch.initial_seed())


def load_state(folder: RunFolder, goal: Goal, step: int | None = None) -> dict[str, Any]:
    """Return the state in the best checkpoint, or in that of `step`. Raises UserError."""
    try:
        if step is None:
            return restore.load(_best_checkpoint(folder, goal))
        return restore.load(checkpoint_files.folder_of(folder.checkpoints, step))
    except checkpoint_files.BrokenCheckpoint as error:
        raise UserError(str(error)) from error


def _run_child(folder: str, problems: Any, delivered: Connection) -> None:
    set_process_name("best-model")
    # MLflow creates half a million objects that stay, and the collector would walk them often.
    gc.freeze()
    gc.set_threshold(100_000)
    # An exception, unlike the default action, removes temporary folders on its way out. The command
    # sends it. Other signals, which reach a whole terminal or job, stay blocked.
    for stop in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(stop, lambda *_: sys.exit(1))
    sys.unraisablehook = _stop_again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        _trace_and_log(RunFolder(Path(folder)), delivered)
    except EOFError:
        sys.exit(1)  # the command has ended, and `rankzero sync` logs the model
    except Exception as error:  # the user's model and data, torch.export, MLflow: all is a notice
        text = text_without_secrets(traceback.format_exc())
        with contextlib.suppress(OSError):  # a full disk
            (Path(folder) / "export.log").write_text(text, "utf-8", "backslashreplace")
        # One line fits into the pipe's buffer even if nobody reads it.
        is_answer = isinstance(error, _NotNow)  # whose text names the error
        kind = "" if is_answer else f"{type(error).__name__}: "
        problems.put(line_without_secrets(f"{kind}{error}"))
        if is_answer or lacks_memory_or_space(error):
            sys.exit(1)


def _stop_again(lost: Any) -> None:
    """Stop a little later if Python has dropped the stop, as in a weak reference's callback."""
    if lost.exc_type is SystemExit:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(lost)


def _trace_and_log(folder: RunFolder, delivered: Connection) -> None:
    """Log the best checkpoint's model. It replaces one logged before; the same one is skipped.

    Raises EOFError if the command ends before it sends that the run is `delivered`.
    """
    from rankzero.training.checkpoints import mlflow_model

    with _put_off(Exception):  # the user edits the file
        experiment = experiment_of(folder)
    path = _best_checkpoint(folder, experiment.goal)
    manifest, ended = checkpoint_files.read_manifest(path), lookup.last_end(folder)
    step = manifest.step
    note = {"step": step, "files": manifest.files, "ended": ended and ended.time}
    if _is_logged(folder, note):
        return
    with _put_off(ConfigError):
        _refuse_edited(folder, step)
    with _put_off(OSError):  # model() may need a server
        model = _load_model(experiment, path)
    source, _ = experiment_file.split(folder.identity.experiment_file or "")
    inputs = _example_inputs(experiment, model, step)
    with mlflow_model.saved(_served(model), inputs, [source]) as (saved, kind):
        delivered.recv()
        tags = {"rankzero.step": str(step), "rankzero.model": "best"}
        tags |= {"rankzero.format": kind, "rankzero.saved_at": repr(path.stat().st_mtime)}
        try:
            _log(folder, saved, note, tags)
        except Exception as error:
            # A run that somebody erased does not come back.
            if refusal(error) is None and not isinstance(error, RunGone):
                raise _NotNow(f"{type(error).__name__}: {error}") from error
            raise


def _refuse_edited(folder: RunFolder, step: int) -> None:
    """Raise ConfigError unless the imported code is the one that trained the step."""
    trained: dict[str, str] = {}
    for event in milestones(folder.events):
        if isinstance(event, RunStarted) and event.step < step:
            trained |= event.environment
    now = experiment_file.code_tags(folder.identity.experiment_file or "")
    if changed := [key for key, text in now.items() if trained.get(key, text) != text]:
        names = ", ".join(key.removeprefix(experiment_file.CODE) for key in changed)
        raise ConfigError(f"{names} was edited since it trained step {step}: put it back")


class _NotNow(Exception):
    """The model was not logged, but may be later."""


@contextlib.contextmanager
def _put_off(kind: type[Exception]) -> Iterator[None]:
    """Raise _NotNow for an error of this kind that may be mended: each but a UserError."""
    try:
        yield
    except UserError:
        raise
    except kind as error:
        name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        # Data may be gone for good.
        never = "train.mlflow.log_model=false in config.yaml: none is logged"
        raise _NotNow(f"{name}{error} ({never})") from error


def _log(folder: RunFolder, saved: Path, note: Mapping[str, Any], tags: Mapping[str, str]) -> None:
    """Upload a saved model unless another process has, and delete those logged before."""
    from rankzero.mlflow_store.client import MlflowRuns

    # The user's `rankzero sync` may log it at the same time.
    with lock_files.lock(folder.path / "best_model.lock", seconds=math.inf):
        if _is_logged(folder, note):
            return
        run_id, before = delivery_status.status(folder).run_id, _logged(folder)
        if run_id is None:
            raise RuntimeError("the run has not reached MLflow")
        tracker = MlflowRuns(folder.identity.tracking_uri)
        tracker.require_run(run_id)
        run, step = tracker.find_run(run_id), note["step"]
        open_run.refuse_older(folder, open_run.other_attempt(folder, run))
        there = tracker.models.best_models(run)
        known = checkpoint_files.known(folder.checkpoints).values()
        newest = max([step, *(manifest.step for manifest in known)])
        model_id = next(reversed(there), "")
        # Another machine, which continued the run, may have logged a better one.
        if there.get(model_id, -1) <= newest:
            model_id = tracker.models.log_model(run, saved, "best_model", step, tags)
        write_atomically(folder.logged_model, json.dumps({**note, "model_id": model_id}))
        # Only now, so that MLflow always has one of them.
        mine = {} if before is None else {before["model_id"]: step}
        for former, at in {**mine, **there}.items():
            if former != model_id and at <= newest:
                tracker.models.retire(former)


def _is_logged(folder: RunFolder, note: Mapping[str, Any]) -> bool:
    """Return whether the note's checkpoint is logged. If so, note the attempt's end, too."""
    before = _logged(folder)
    # After a return to an older checkpoint, a step has other weights. Older notes lack "files".
    if before is None or any(before.get(k, note.get(k)) != note.get(k) for k in ("step", "files")):
        return False
    # `rankzero sync` then knows that the newest attempt has no better one.
    write_atomically(folder.logged_model, json.dumps({**before, **note}))
    return True


def _logged(folder: RunFolder) -> dict[str, Any] | None:
    """Return which model was logged."""
    try:
        found: dict[str, Any] = json.loads(folder.logged_model.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _best_checkpoint(folder: RunFolder, goal: Goal) -> Path:
    path = checkpoint_files.best(folder.checkpoints, goal)
    if path is None:
        raise UserError(f"{folder.path.name} has no checkpoint on this disk")
    return path


def _load_model(experiment: Experiment, path: Path) -> nn.Module:
    saved = restore.load(path)
    # The model may hold what model() draws and no state dict has, such as a random permutation.
    rng.seed_all(experiment.train.seed)
    # A LightningModule's data come before its model, and draw.
    getattr(experiment, "_lightning_data", None)
    # An older checkpoint lacks them. They also differ from the seed's if data() draws.
    if saved.get("model_randoms") is not None:
        rng.restore(saved["model_randoms"], torch.device("cpu"))
    model: nn.Module = experiment.model()
    model.load_state_dict(with_versions(saved.get("ema", saved["model"]), model))
    return model.eval()


def _served(model: nn.Module) -> nn.Module:
    """Return the part of a model that is called for inference: `served` if it has that, or all."""
    part = getattr(model, "served", model)
    assert isinstance(part, nn.Module)
    return part


def _example_inputs(experiment: Experiment, model: nn.Module, step: int) -> tuple[Tensor, ...]:
    """Return the inputs that `measure` gives the served part for a small batch.

    Raises ValueError if these are not tensors, passed by position.
    """
    cpu = torch.device("cpu")
    with _put_off(Exception):  # this machine may lack the data
        train_set, val_sets = sets.load(experiment)
        first = next(iter(val_sets.values()), train_set)
        loader = make_loader(first, cpu, seed=0, workers=0, collate=experiment.collate)
        # Two samples, because torch.export takes a size of 1 for a constant.
        batch, _ = next(iter(loader.eval_batches(2, 0, 1)))
    seen: list[tuple[Any, Any]] = []
    handle = _served(model).register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    with handle, torch.no_grad():
        helpers = frozen.helpers(experiment, cpu)
        at = Progress(step, step, 0, training=False, helpers=helpers)
        measure_at(experiment.measure, at)(model, batch)
    if not seen:
        raise ValueError(
            "its steps never call the module itself, self(x); only what they call can be logged"
        )
    args, kwargs = seen[0]
    if kwargs or not args or not all(isinstance(arg, Tensor) for arg in args):
        kinds = ", ".join([*(type(arg).__name__ for arg in args), *kwargs]) or "nothing"
        raise ValueError(
            f"measure() calls the model with {kinds}; only models that take tensors, by position, "
            "are logged (train.mlflow.log_model=false: none is)"
        )
    return tuple(args)
