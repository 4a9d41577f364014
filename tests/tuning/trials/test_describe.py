"""The experiment that the search makes of a description."""

from __future__ import annotations

import dataclasses
import multiprocessing
import sys
import sysconfig
from pathlib import Path

import pytest

from rankzero import Choice, ConfigError, Experiment, Goal, Train, config, experiment_file
from rankzero.errors import UserError
from rankzero.tuning.trials import describe
from rankzero.tuning.trials.describe import ExperimentDescription, Question, mirrored
from support.paths import FIXTURES


@dataclasses.dataclass(frozen=True)
class Augmentation:
    flip: bool = True
    crop: int = 4


@dataclasses.dataclass(frozen=True)
class Images:
    size: int = 32
    augmentation: Augmentation = Augmentation()


class Mine(Experiment):
    train: Train = Train(batch_size=64, epochs=3)
    goal: Goal = Goal("val/accuracy", "max", target=0.9)
    data_: Images = Images()
    widths: tuple[int, ...] = (8, 16)
    lr: float = 0.1
    search = {"data.size": Choice(32, 64)}


def description(experiment: Experiment) -> ExperimentDescription:
    return ExperimentDescription(
        name=type(experiment).__name__,
        settings=tuple(config.leaves(experiment)),
        search=dict(type(experiment).search),
        lr_exponent=1.0,
        processes=1,
        samples=1000,
        is_validated=True,
        precisions=("fp32",),
        device="cpu",
        driver="",
    )


def test_the_mirror_has_the_same_settings_and_ranges() -> None:
    own = config.override(Mine(), {"data.augmentation.crop": 2, "train.seed": 7})
    mirror = mirrored(description(own))
    assert config.flatten(mirror) == config.flatten(own)
    assert config.to_yaml(mirror) == config.to_yaml(own)
    assert type(mirror).search == Mine.search and mirror.train == own.train


def test_the_mirror_checks_overrides_as_the_experiment_does() -> None:
    mirror = mirrored(description(Mine()))
    assert config.flatten(config.override(mirror, {"data.size": "64"}))["data.size"] == 64
    for changes, message in (
        ({"data.sise": 1}, "did you mean 'data.size'"),
        ({"widths": "wide"}, "widths: expected"),
        ({"train.batch_size": 0}, "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.override(mirror, changes)


def test_error_of_a_class_of_the_users_file_is_sent_as_one_that_all_processes_know(
    tmp_path: Path,
) -> None:
    file = tmp_path / "with_own_error.py"
    file.write_text(
        "from rankzero import Experiment\n"
        "from rankzero.errors import UserError\n"
        "class NoWeights(UserError):\n"
        "    pass\n"
        "class Mine(Experiment):\n"
        "    def model(self):\n"
        "        raise NoWeights('download the weights first')\n"
    )
    reader, writer = multiprocessing.Pipe(duplex=False)
    describe._child(writer, Question(str(file), {}, 1))
    answer = reader.recv()
    assert type(answer) is UserError and str(answer) == "download the weights first"


def test_a_search_over_what_a_computed_field_follows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "follows.py"
    file.write_text(
        "from rankzero import Choice, Experiment\n"
        "class Mine(Experiment):\n"
        "    width: int = 8\n"
        "    hidden: int | None = None\n"
        "    search = {'width': Choice(8, 16)}\n"
        "    def __post_init__(self):\n"
        "        object.__setattr__(self, 'hidden', self.hidden or 4 * self.width)\n"
    )
    with pytest.raises(ConfigError, match="hidden follows from width"):
        describe._described(Question(str(file), {}, 1, searches=True))
    with pytest.raises(NotImplementedError, match=r"model\(self\)"):
        describe._described(Question(str(file), {}, 1))


def test_the_processor_is_named_where_it_trains() -> None:
    import torch

    found = describe._described(Question(str(FIXTURES / "tiny.py"), {}, 1))
    assert bool(found.processor) is not torch.cuda.is_available()
    assert found.processor.strip() == found.processor


def test_the_code_is_that_of_the_file_and_of_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file, net, other = (tmp_path / f"{name}.py" for name in ("with_net", "net_beside", "unused"))
    tiny = (FIXTURES / "tiny.py").read_text()
    file.write_text(
        tiny.replace("        return nn.Seq", "        import net_beside\n        return nn.Seq")
    )
    net.write_text("")
    other.write_text("")

    def code() -> str:
        return describe._described(Question(f"{file}:Tiny", {}, 1)).code

    first = code()
    other.write_text("changed = 1")
    assert code() == first
    net.write_text("changed = 1")
    second = code()
    file.write_text(f"{file.read_text()}\n")
    assert len({first, second, code()}) == 3


def test_what_data_import_to_prepare_a_file_is_no_change_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file, cache = tmp_path / "with_cache.py", tmp_path / "cache"
    (tmp_path / "prepare_cache.py").write_text("")
    prepares = f"""
        from pathlib import Path
        if not Path({str(cache)!r}).exists():
            import prepare_cache
        train = samples"""
    file.write_text(
        (FIXTURES / "tiny.py").read_text().replace("\n        train = samples", prepares)
    )
    first = describe._described(Question(f"{file}:Tiny", {}, 1)).code
    # Each description has a process of its own.
    monkeypatch.delitem(sys.modules, "prepare_cache")
    cache.touch()
    assert describe._described(Question(f"{file}:Tiny", {}, 1)).code == first


def test_modules_of_python_below_the_folder_are_no_code_of_the_user() -> None:
    assert experiment_file.code(Path(sysconfig.get_path("stdlib"))) == {}
    assert experiment_file.code(Path(experiment_file.__file__).parents[1]) == {}, "ours"


def test_only_the_first_number_of_processes_has_the_users_micro_batch() -> None:
    train = Train(batch_size=64, micro_batch=16)
    describe._check_processes(train, [4, 8], 1, 8, 1)
    with pytest.raises(UserError, match=r"8 processes x train.micro_batch=16"):
        describe._check_processes(train, [8, 4], 1, 8, 1)
