"""Folders that tests use."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"
SUPPORT = TESTS / "support"
EXPERIMENTS = ROOT / "experiments"
