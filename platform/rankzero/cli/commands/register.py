"""``rankzero register RUN NAME``: the run's best model as a version in MLflow's model registry."""

from __future__ import annotations

import argparse
import shlex

from rankzero.catalog import command_lines, lookup
from rankzero.cli import options
from rankzero.errors import RunFailed, UserError
from rankzero.redaction.text import url_without_secrets
from rankzero.reporting.run_facts import facts_of
from rankzero.run_store.folder import RunFolder
from rankzero.run_store.names import printable
from rankzero.tracking import delivery_status

_NONE = "it ended without one; your own program logs one by run.log_model, to register in MLflow"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run(parser, elsewhere=True)
    parser.add_argument("model_name", metavar="NAME", help="the registered model's name")


def run(arguments: argparse.Namespace) -> int:
    from rankzero.mlflow_store.client import MlflowRuns

    folder = lookup.find(arguments.dir / "runs", arguments.run_name, strict=True)
    problems: list[str] = []
    if folder is None:
        uri = options.store_of_absent_run(arguments)
    else:
        from rankzero.training.checkpoints import best_model

        name, uri = folder.path.name, folder.identity.tracking_uri
        if delivery_status.status(folder).run_id is None:
            command = command_lines.line(arguments.dir, "sync", name)
            raise UserError(f"{name} is not in MLflow yet: {command}")
        if folder.identity.experiment_file is not None:
            best_model.log_best(folder, problems.append)  # unless MLflow has the model already
    tracker = MlflowRuns(uri)
    found = tracker.find_run(
        arguments.run_name if folder is None else lookup.mlflow_id(folder) or folder.path.name
    )
    model_id = tracker.models.best_model(found)
    if model_id is None and folder is not None and folder.logged_model.exists():
        # Somebody deleted it in MLflow, or MLflow has another database now.
        folder.logged_model.unlink()
        best_model.log_best(folder, problems.append)
        model_id = tracker.models.best_model(found)
    if model_id is None:
        raise RunFailed(
            f"{printable(found.name)} has no model in MLflow: {'; '.join(problems) or _NONE}"
        )
    for problem in problems:
        print(f"note: {problem}")
    version = tracker.models.register(found, model_id, arguments.model_name)
    model = f"models:/{arguments.model_name}/{version}"
    print(
        f"{model} is the {_kind(folder)} model of {printable(found.name)}",
        f'load:  mlflow.pytorch.load_model("{model}")',
        sep="\n",
    )
    # Without the password: it would stay in the shell's history.
    where = shlex.quote(url_without_secrets(uri))
    print(f"serve: MLFLOW_TRACKING_URI={where} mlflow models serve -m {model} --env-manager local")
    return 0


def _kind(folder: RunFolder | None) -> str:
    """Return which of a run's models is logged: the newest if its goal never was a number."""
    return "best" if folder is None or facts_of(folder).best is not None else "newest"
