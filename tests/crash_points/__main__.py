"""Check every crash point of a recorded training, and an error at every call.

    make torture, or: PYTHONPATH=tests python -m crash_points [--real] [--cuts N] [--report FILE]

A failure is reproduced by its number: ``--recording FOLDER --number N`` with the folder that the
report names.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from crash_points import campaign, record


def main() -> int:
    """Return 1 if a promise was broken, else 0."""
    options, began = parse(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rankzero-crash-points-", dir=record.memory_folder()))
    library = record.compile_library(folder)
    reports = []
    for root in record_all(library, folder, options):
        recording = campaign.read_recording(root)
        report = campaign.check(
            recording, folder, options.cuts, options.points, options.number
        ).report
        print(f"{root}: {len(recording.calls)} calls\n{report.text()}", flush=True)
        reports.append(report)
    broken = any(report.failures for report in reports)
    if not broken and not options.recording:
        broken = not errors_pass(library, folder / "errors", options.errors)
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.1f} minutes; " + (f"BROKEN, see {folder}" if broken else "all promises hold"))
    if options.report:
        content = {"minutes": round(minutes, 1), "reports": [vars(report) for report in reports]}
        options.report.write_text(json.dumps(content, indent=1) + "\n")
    if not broken:
        shutil.rmtree(folder)
    return int(broken)


def parse() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=6, help="places to tear each file at")
    parser.add_argument("--points", type=int, help="check only about so many crash points of each")
    parser.add_argument("--errors", default="1.0", help="share of the errors to try")
    parser.add_argument("--real", action="store_true", help="also record the real command")
    parser.add_argument("--recording", type=Path, help="a recording that a report names")
    parser.add_argument("--number", type=int, help="check only this crash point")
    parser.add_argument("--report", type=Path, help="write the results to this file")
    return parser.parse_args()


def record_all(library: Path, folder: Path, options: argparse.Namespace) -> list[Path]:
    """Record what the options ask for, and return where."""
    if options.recording:
        return [options.recording]
    found = [folder / "session"]
    record.record_session(library, found[0])
    if options.real:
        found.append(folder / "command")
        record.record_command(library, found[1])
    return found


def errors_pass(library: Path, root: Path, share: str) -> bool:
    """Let calls fail, and return whether all promises held."""
    root.mkdir()
    command = [sys.executable, "-m", "crash_points.errors", str(root), share]
    environ = record.environment(library, root)
    return subprocess.run(command, check=False, env=environ).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
