"""Settings with a new name: users get an error, and what RankZero wrote before is still read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rankzero import Experiment, Train, Uniform, flatten, from_yaml, override, to_yaml
from rankzero.catalog import filters, lookup, summary_cache
from rankzero.catalog.summary import Summary
from rankzero.config import ConfigError, read_file, rendered
from rankzero.config.renamed import NEW_NAMES, params_with_new_names, with_new_names
from rankzero.reporting import run_facts
from rankzero.search_ranges import Range
from rankzero.training.checkpoints.best_model import experiment_of
from rankzero.tuning.options import default_storage
from rankzero.tuning.session import EARLIER, FIRST, first_guesses
from rankzero.tuning.space import make_space
from rankzero.tuning.study import open_study
from support.paths import FIXTURES
from support.runs import append, ended, make_folder, settle, started

OLD_CONFIG = """\
train:
  epochs: 3
  batch_size: 32
  micro_batch: null
  oom: fail
  ddp_compression: bf16
  ddp_static_graph: true
  ddp_bucket_mb: 12.5
  pp_schedule: gpipe
  save_every: 7
  keep: 4
  log_model: false
  pictures: false
  max_minutes: 90.0
  hang_minutes: null
  stop_at_target: true
lr: 0.5
"""
NEW_CONFIG: Mapping[str, Any] = {
    "train.epochs": 3,
    "train.batch_size": 32,
    "train.micro_batch": None,
    "train.limits.oom": "fail",
    "train.ddp.compression": "bf16",
    "train.ddp.static_graph": True,
    "train.ddp.bucket_mb": 12.5,
    "train.pp.schedule": "gpipe",
    "train.checkpoints.save_every": 7,
    "train.checkpoints.keep": 4,
    "train.mlflow.log_model": False,
    "train.mlflow.log_pictures": False,
    "train.limits.max_minutes": 90.0,
    "train.limits.hang_minutes": None,
    "train.limits.stop_at_target": True,
    "lr": 0.5,
}
OLD_PARAMS = {"train.micro_batch": "none", "train.keep": "3", "goal.metric": "val/accuracy"}


def test_every_old_name_has_one_new_name_and_is_not_a_setting() -> None:
    known = flatten(Experiment())
    assert set(NEW_NAMES.values()) <= known.keys() and not NEW_NAMES.keys() & known.keys()
    assert len(set(NEW_NAMES.values())) == len(NEW_NAMES)


@pytest.mark.parametrize(("old", "new"), NEW_NAMES.items())
def test_old_name_from_a_user_is_refused_with_the_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"^{old} is now {new}: use the new name$"):
        override(Experiment(), {old: "1"})
    with pytest.raises(ConfigError, match=f"^{old} is now {new}: use the new name$"):
        from_yaml(Experiment, f"train:\n  {old.removeprefix('train.')}: 1\n")
    with pytest.raises(TypeError, match=rf"^{old} is now {new}: write Train\(\w+=Train\.\w+\("):
        Train(**{old.removeprefix("train."): 1})


def test_python_error_shows_the_whole_call() -> None:
    with pytest.raises(TypeError, match=r"write Train\(checkpoints=Train\.Checkpoints\(keep=…\)\)"):
        dataclasses.replace(Train(), keep=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'kep'"):
        Train(kep=3)  # type: ignore[call-arg]


def test_search_space_takes_new_names_only() -> None:
    class Searched(Experiment):
        search: Mapping[str, Range] = {"train.ddp_bucket_mb": Uniform(1, 50)}

    with pytest.raises(ConfigError, match=r"is now train\.ddp\.bucket_mb"):
        make_space(Searched(), 1, 1.0)


def test_config_of_an_old_run_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OLD_CONFIG)
    assert read_file(path) == NEW_CONFIG
    experiment = override(Experiment(), read_file(path))
    assert {key: flatten(experiment)[key] for key in NEW_CONFIG} == NEW_CONFIG
    path.write_text(to_yaml(experiment))
    assert override(Experiment(), read_file(path)) == experiment


def test_experiment_of_an_old_run_is_restored(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, experiment_file=str(FIXTURES / "tiny.py"))
    folder.config.write_text(OLD_CONFIG)
    assert experiment_of(folder).train.checkpoints == Train.Checkpoints(save_every=7, keep=4)


def test_new_name_wins_if_a_file_has_both() -> None:
    both = {"train.checkpoints.keep": 1, "train.keep": 2, "lr": 3}
    assert with_new_names(both) == {"train.checkpoints.keep": 1, "lr": 3}


def test_reports_and_lists_show_new_names_for_old_runs(tmp_path: Path) -> None:
    events = [started(**OLD_PARAMS), ended()]
    assert run_facts.fold(events).params["train.checkpoints.keep"] == "3"
    append(folder := make_folder(tmp_path), *events)
    settle(folder)
    for _ in ("from the journal", "from the cache"):
        (run,) = lookup.listed(tmp_path / "runs")
        assert run.params["train.checkpoints.keep"] == "3" and "train.keep" not in run.params


def test_cached_list_of_an_old_version_shows_new_names(tmp_path: Path) -> None:
    append(folder := make_folder(tmp_path), started(**OLD_PARAMS), ended())
    settle(folder)
    lookup.listed(tmp_path / "runs")
    cache = tmp_path / "runs" / summary_cache.DETAILS
    cache.write_text(cache.read_text().replace("train.checkpoints.keep", "train.keep"))
    (run,) = lookup.listed(tmp_path / "runs")
    assert run.params["train.checkpoints.keep"] == "3"


@pytest.mark.parametrize("key", ["train.keep", "train.checkpoints.keep"])
def test_filter_takes_either_name(tmp_path: Path, key: str) -> None:
    new = {**OLD_PARAMS, "train.checkpoints.keep": "5"}
    del new["train.keep"]
    for params in (OLD_PARAMS, new):
        append(make_folder(tmp_path), started(**params), ended())
    runs = lookup.listed(tmp_path / "runs")

    def kept(word: str) -> list[Summary]:
        return filters.select(runs, [filters.parse(word)])

    assert len(kept(f"{key}>2")) == 2 and len(kept(f"{key}=5")) == 1 and not kept(f"{key}<2")


def test_params_of_a_users_own_loop_keep_their_names(tmp_path: Path) -> None:
    own = {"train.keep": "7"}
    assert params_with_new_names(own) == own
    append(make_folder(tmp_path), started(**own), ended())
    runs = lookup.listed(tmp_path / "runs")
    assert len(filters.select(runs, [filters.parse("train.keep=7")])) == 1


def test_every_run_of_an_experiment_is_recognised() -> None:
    assert "train.micro_batch" in rendered(Experiment())


def test_study_of_an_old_version_gives_parameters_with_new_names(tmp_path: Path) -> None:
    study = open_study(default_storage(tmp_path), "old", sampler="random", pruner="none", seed=0)
    study.draw_from({"train.ddp_bucket_mb": Uniform(1, 50), "lr_factor": Uniform(1, 2)})
    study.note(FIRST, [{"train.ddp_bucket_mb": 25.0, "lr_factor": 1.0}])
    study.ask(study.facts[FIRST][0])
    study.note(EARLIER, [{"train.ddp_bucket_mb": 5.0}])
    new_names = {"train.ddp.bucket_mb": 25.0, "lr_factor": 1.0}
    assert first_guesses(study) == ([new_names], [{"train.ddp.bucket_mb": 5.0}])
    (trial,) = study.trials()
    assert trial.parameters == {"train.ddp.bucket_mb": 25.0, "lr_factor": 1.0}
