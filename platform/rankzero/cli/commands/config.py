"""``rankzero config EXP [key=value…]``: the settings as YAML, and every legal key with its type."""

from __future__ import annotations

import argparse

from rankzero import config, experiment_file
from rankzero.cli import options
from rankzero.config import values
from rankzero.launch.request import with_changes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_experiment(parser)


def run(arguments: argparse.Namespace) -> int:
    changes = config.parse_assignments(arguments.settings)
    experiment = with_changes(experiment_file.load(arguments.experiment)(), changes)
    print(config.to_yaml(experiment), end="")
    rows = [
        (leaf.key, values.describe_type(leaf.annotation), values.render(leaf.value))
        for leaf in config.leaves(experiment)
    ]
    width = max(len(key) for key, _, _ in rows)
    # As comments, so that the output is a settings file for --from.
    print("\n# every legal key: type (value)")
    for key, kind, value in rows:
        print(f"# {key:{width}}  {kind} ({value})")
    return 0
