"""Thin adapters for other training frameworks. Each file imports its framework itself.

`pip install rankzero[FRAMEWORK]` installs a framework. All adapters are safe on every rank. They
use `rankzero.track`, so their runs have a journal, a recorder, GPU usage, checkpoints and the true
status.
"""
