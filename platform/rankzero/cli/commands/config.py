"""``rankzero config EXP [key=value…]``: the settings as YAML, and every key with what it is."""

from __future__ import annotations

import argparse
import json
import textwrap

from rankzero import config, experiment_file
from rankzero.cli import options
from rankzero.config import values
from rankzero.config.descriptions import descriptions
from rankzero.launch.request import with_changes

# A file's, too: it is the same text in a pipe.
_COLUMNS, _INDENT = 80, "#     "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_experiment(parser)


def run(arguments: argparse.Namespace) -> int:
    changes = config.parse_assignments(arguments.settings)
    experiment = with_changes(experiment_file.load(arguments.experiment)(), changes)
    print(config.to_yaml(experiment), end="")
    texts = descriptions(experiment)
    # As comments, so that the output is a settings file for --from.
    print("\n# every legal key: type (value)")
    for leaf in config.leaves(experiment):
        kind, value = values.describe_type(leaf.annotation), values.render(leaf.value)
        text = f"{leaf.key}: {kind} ({value})"
        print(f"# {text if text.isprintable() else json.dumps(text)[1:-1]}")
        for line in textwrap.wrap(texts.get(leaf.key, ""), _COLUMNS - len(_INDENT)):
            print(_INDENT + line)
    return 0
