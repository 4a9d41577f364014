"""Run the frameworks' own tests of loggers, trackers, handlers and callbacks with our adapters.

    python -m frameworks.contracts [FRAMEWORK …] [--suite FRAMEWORK=FOLDER]

Prints what passed, what does not apply, with the reason, and what failed. Exits with 1 if a test
failed or a suite cannot be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from frameworks.contracts.suites import SUITES, NoSuite, find

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
CACHE = ROOT / ".suites"


class Test(NamedTuple):
    """A test of a suite, and why it failed or does not apply."""

    name: str
    outcome: str
    why: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m frameworks.contracts")
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(SUITES))
    parser.add_argument(
        "--suite",
        action="append",
        default=[],
        metavar="FRAMEWORK=FOLDER",
        help="a clone of the framework's repository, instead of what is fetched",
    )
    arguments = parser.parse_args()
    given = dict(words.partition("=")[::2] for words in arguments.suite)
    unknown = {*arguments.frameworks, *given} - {*SUITES}
    if unknown:
        parser.error(f"no framework {', '.join(unknown)}: choose from {', '.join(SUITES)}")
    lines, failed = [], False
    for framework in arguments.frameworks or SUITES:
        try:
            tests = run(framework, given.get(framework))
        except NoSuite as error:
            tests = [Test("its suite", "failed", str(error))]
        count = Counter(test.outcome for test in tests)
        failed = failed or bool(count["failed"])
        lines.append(
            f"{framework:<13}{count['passed']:>8}{count['not applicable']:>16}{count['failed']:>8}"
        )
        print_tests(framework, tests)
    print(f"\n{'':<13}{'passed':>8}{'not applicable':>16}{'failed':>8}", *lines, sep="\n")
    return int(failed)


def run(framework: str, given: str | None) -> list[Test]:
    """Run a suite in the environment of its framework. Raises NoSuite."""
    suite = SUITES[framework]
    if given and not Path(given).is_dir():
        raise NoSuite(f"{given} is no folder")
    python = ROOT / f".venv-{suite.environment}" / "bin" / "python"
    if not python.exists():
        raise NoSuite(f"{python} is missing: make environment-{suite.environment}")
    folder = Path(given).absolute() if given else find(suite, python, CACHE)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / suite.imports), str(TESTS)]),
            "RANKZERO_CONTRACT": framework,
            "RANKZERO_DIR": str(Path(scratch) / "mlruns"),
            "RANKZERO_OFFLINE": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            *(str(python), "-m", "pytest", "-p", "frameworks.contracts.plugin"),
            *("-p", "no:randomly", "-p", "no:cacheprovider", "--timeout", "900", "-q"),
            *("-c", os.devnull, "--rootdir", str(folder), f"--junitxml={report}"),
            *("-W", "ignore::pytest.PytestUnknownMarkWarning", "--tb", "short"),
        ]
        done = subprocess.run(
            [*command, *(str(folder / file) for file in suite.files)],
            check=False,
            cwd=scratch,
            env=environ,
            text=True,
            capture_output=True,
        )
        if not report.exists():
            raise NoSuite(f"pytest exited with {done.returncode}: {done.stdout}{done.stderr}")
        tree = ElementTree.parse(report)  # noqa: S314 # which our pytest has written
        return [test_of(case) for case in tree.iter("testcase")]


def test_of(case: ElementTree.Element) -> Test:
    """Return a test of pytest's report."""
    name = "::".join(filter(None, [case.get("classname"), case.get("name")]))
    for child in case:
        if child.tag in ("failure", "error"):
            return Test(name, "failed", child.text or child.get("message") or "")
        if child.tag == "skipped":
            return Test(name, "not applicable", child.get("message") or "")
    return Test(name, "passed", "")


def print_tests(framework: str, tests: list[Test]) -> None:
    """Print the tests that failed, and those that do not apply by their reason."""
    print(f"\n{framework}")
    for test in tests:
        if test.outcome == "failed":
            print(f"  FAILED {test.name}\n{test.why}")
    reasons = sorted({test.why for test in tests if test.outcome == "not applicable"})
    for reason in reasons:
        print(f"  not applicable: {reason}")
        for test in tests:
            if test.why == reason and test.outcome == "not applicable":
                print(f"    {test.name}")


if __name__ == "__main__":
    sys.exit(main())
