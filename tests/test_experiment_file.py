"""Loading a user's file by path and class."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankzero import UserError
from rankzero.experiment_file import load, split


@pytest.fixture(autouse=True)
def imports_left_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


EXPERIMENT = "from rankzero import Experiment\nclass {name}(Experiment):\n    width: int = 1\n"


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_only_experiment_of_a_file_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, "exp_one.py", EXPERIMENT.format(name="One"))
    assert load(str(path)).__name__ == "One"
    assert load(f"{path}:One") is load(str(path))


def test_one_of_several_experiments_must_be_named(tmp_path: Path) -> None:
    text = EXPERIMENT.format(name="One") + "class Two(Experiment):\n    pass\n"
    path = written(tmp_path, "exp_two.py", text)
    with pytest.raises(UserError, match=r"exp_two\.py:One or exp_two\.py:Two"):
        load(str(path))
    assert load(f"{path}:Two").__name__ == "Two"
    with pytest.raises(UserError, match="has no experiment 'Three'"):
        load(f"{path}:Three")


def test_base_class_in_the_file_is_not_a_second_experiment(tmp_path: Path) -> None:
    path = written(
        tmp_path, "exp_base.py", EXPERIMENT.format(name="One") + "class Two(One):\n    pass\n"
    )
    assert load(str(path)).__name__ == "Two"


@pytest.mark.parametrize("through", ["exp_own", "exp_between"])
def test_neighbours_of_one_name_are_not_mistaken(tmp_path: Path, through: str) -> None:
    imports = "from exp_between import Net\nimport exp_between\n"
    if through == "exp_own":
        imports = "from exp_nets import Net\n"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, "exp_nets.py", f"class Net:\n    of = {name!r}\n")
    written(tmp_path / "two", "exp_between.py", "from exp_nets import Net\n")
    text = "from exp_nets import Net\n" + EXPERIMENT.format(name="One")
    first = written(tmp_path / "one", "exp_own.py", text)
    second = written(tmp_path / "two", "exp_own.py", imports + EXPERIMENT.format(name="Two"))
    assert load(str(first)).__name__ == "One"
    with pytest.raises(UserError, match=r"two/exp_nets\.py has the name of .*one/exp_nets\.py"):
        load(str(second))
    (tmp_path / "two/exp_nets.py").unlink()  # now it is wanted
    sys.modules.pop("exp_between", None)
    assert load(str(second)).__name__ == "Two"


def test_neighbours_are_found_behind_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "exp_c.py").symlink_to("real/exp_c.py")
    for name in ("net", "late"):
        written(tmp_path / "real", f"exp_{name}.py", "class Net: pass\n")
    for place, neighbour in (("folder/exp_a", "net"), ("real/exp_b", "net"), ("exp_c", "late")):
        text = f"from exp_{neighbour} import Net\n" + EXPERIMENT.format(name="One")
        written(tmp_path / "real", f"{Path(place).name}.py", text)
        assert load(f"{tmp_path / place}.py").__name__ == "One"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit()", "0"),
        ("sys.exit('bye')", "bye"),
        ("argparse.ArgumentParser().parse_args(['--lr=1'])", "2"),
    ],
)
def test_file_that_ends_the_program_is_refused(tmp_path: Path, end: str, code: str) -> None:
    text = f"import argparse, sys\n{end}\n"
    path = written(tmp_path, "exp_ends.py", text)
    with pytest.raises(UserError, match=rf"ended the program while .* \(exit {code}\): put what"):
        load(str(path))
    assert "exp_ends" not in sys.modules and str(tmp_path) not in sys.path


def test_file_with_the_name_of_a_loaded_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rename the file"):
        load(str(written(tmp_path, "json.py", EXPERIMENT.format(name="One"))))


def test_files_of_one_name_in_two_folders_are_two_experiments(tmp_path: Path) -> None:
    paths = []
    for name in ("One", "Two"):
        (tmp_path / f"{name} 1.0%").mkdir()
        paths.append(
            written(tmp_path / f"{name} 1.0%", "exp_same.py", EXPERIMENT.format(name=name))
        )
    one, two = (load(str(path)) for path in paths)
    assert (one.__name__, two.__name__) == ("One", "Two") and load(str(paths[1])) is two
    # A loading process may be started afresh. It gets `sys.path`.
    code = f"import pickle, sys; sys.path[:] = {sys.path}; print(pickle.load(sys.stdin.buffer))"
    for cls in (one, two):
        result = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(cls(width=3)),
            capture_output=True,
            check=True,
        )
        assert result.stdout.startswith(cls.__name__.encode())
        assert b"width=3" in result.stdout


def test_imported_experiment_is_not_the_files_own(tmp_path: Path) -> None:
    written(tmp_path, "exp_base.py", EXPERIMENT.format(name="One"))
    path = written(
        tmp_path, "exp_uses.py", "from exp_base import One\n\nclass Two(One):\n    pass\n"
    )
    assert load(str(path)).__name__ == "Two"


def test_file_is_loaded_once_under_any_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "exp_one.py", EXPERIMENT.format(name="One"))
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (
        load("exp_one.py") is load("./sub/../exp_one.py") is load(str(path)) is load(f"{path}:One")
    )


@pytest.mark.parametrize(
    "reference", ["missing.py", "digits", "digits.yaml", ".", "missing.py:One", ""]
)
def test_missing_or_wrong_file_is_refused(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.yaml").touch()
    with pytest.raises(UserError, match="no such experiment file"):
        load(reference)


def test_reference_is_a_path_with_or_without_a_class(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    path = written(folder, "exp.py", "")
    assert split(str(path)) == (path, None)
    assert split(f"{path}:One") == (path, "One")


def test_file_without_an_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="defines no Experiment"):
        load(str(written(tmp_path, "exp_none.py", "from rankzero import Experiment\n")))


@pytest.mark.parametrize("first", ["sys.path = []", "del sys.modules[__name__]"])
def test_file_that_changes_what_it_was_imported_by_shows_its_own_error(
    first: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "exp_odd.py", f"import sys\n{first}\n1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load(str(path))


def test_failing_file_leaves_no_module_or_path_behind(tmp_path: Path) -> None:
    path, before = written(tmp_path, "exp_broken.py", "1 / 0\n"), list(sys.path)
    with pytest.raises(ZeroDivisionError):
        load(str(path))
    assert sys.path == before
    path.write_text(EXPERIMENT.format(name="Mended"))
    os.utime(path, (0, 0))  # compiled files go by the time
    assert load(str(path)).__name__ == "Mended"
