"""What a setting is: the docstring below its field, and what `rankzero config` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankzero import config
from rankzero.cli.main import main
from rankzero.config.descriptions import descriptions
from rankzero.experiment import Experiment

OWN = '''
from rankzero import Experiment

class Own(Experiment):
    width: int = 8
    """Channels of the first layer. A wider network is slower, and it also needs more memory."""
    depth: int = 2
    prompt: str = "Translate.\\nlr: 0.5"
'''


def test_every_setting_of_ours_has_a_description() -> None:
    assert set(descriptions(Experiment())) == set(config.flatten(Experiment()))


def test_a_class_without_source_has_its_base_class_s_descriptions() -> None:
    made: type = type("Made", (Experiment,), {})
    assert descriptions(made()) == descriptions(Experiment())


def test_the_command_shows_what_each_key_is_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    assert main(["config", str(tmp_path / "own.py")]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    texts = " ".join(line.removeprefix("#     ") for line in printed.splitlines())
    assert "slower, and it also needs more memory." in texts
    assert "Samples per optimizer step, over all ranks." in texts
    assert "# depth: int (2)\n" in printed
    read = config.read_yaml(printed)
    assert (read["width"], read["prompt"]) == (8, "Translate.\nlr: 0.5"), "it is a settings file"
