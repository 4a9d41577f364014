"""Compare steps/s of fully tracked runs with a bare hand-written DDP loop that logs nothing.

    python benchmarks/tracking_overhead.py [--blocks 3] [--quick] [--longer 3 --only http]

Takes about 20 minutes. The stores are SQLite, and an HTTP server on the same two cores.

Two gloo processes have one thread each, and the same model, data, order and optimizer. The tracked
run puts one `train/loss` point per step into MLflow (checked after each run) and samples the
machine. One pair of processes runs both, interleaved. A block is bare, tracked, tracked, bare, and
its ratio is that of the two means. Rank 0's clock measures. Evaluation and checkpoint come after
the last step.

A run takes about twenty seconds and gives two figures. `whole` covers all steps, and with them the
import of MLflow on the same cores. `steady` covers all but the first fifth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import HERE, environment, is_whole, known, line, ratios, run, save, torchrun

from rankzero.mlflow_store import server as mlflow_server
from rankzero.mlflow_store.uris import default_tracking_uri

STEPS = {"Mlp": 11_000, "Convnet": 1600}
WANTED = {"Mlp": 0.95, "Convnet": 0.99}
BLOCK = 4
PORT = 5917
PATIENT = {"RANKZERO_DELIVERY_GRACE_SECONDS": "300"}  # a server that misbehaves is slow


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run an MLflow server on the same two cores. Yields its address."""
    folder.mkdir()
    with subprocess.Popen(
        mlflow_server.command(folder, mlflow_server.Access(PORT)),
        env=mlflow_server.environment(os.environ),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        uri = f"http://127.0.0.1:{PORT}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=1):
                break
            time.sleep(0.1)
        try:
            yield uri
        finally:
            process.terminate()


def side_by_side(
    name: str,
    steps: int,
    blocks: int,
    uris: dict[str, str | None],
    folder: Path,
    tolerance: float = 1e-3,
) -> list[dict[str, Any]]:
    """Return every turn of the candidates, in the order in which they ran.

    `tolerance`: by how much their last losses may differ.
    """
    out = folder / "turns.json"
    run(
        torchrun(HERE / "side_by_side.py", name, steps, blocks, json.dumps(uris), out),
        environment(**PATIENT),
        folder,
    )
    turns: list[dict[str, Any]] = json.loads(out.read_text())
    losses = [turn["loss"] for turn in turns]
    assert max(losses) - min(losses) < tolerance, f"not the same work: {losses}"
    return turns


def mean_rates(turns: list[dict[str, Any]], who: str, span: str, block: int = BLOCK) -> list[float]:
    """Return the mean steps per second of one candidate in each block of `block` turns."""
    blocks = [turns[start : start + block] for start in range(0, len(turns), block)]
    chosen = [[turn[span] for turn in block if turn["who"] == who] for block in blocks]
    return [sum(rates) / len(rates) for rates in chosen]


def compare(
    name: str, store: str, steps: int, blocks: int, uri: str, folder: Path
) -> dict[str, Any]:
    """Return one workload's ratios with one store, and every reading."""
    turns = side_by_side(name, steps, blocks, {"bare": None, "tracked": uri}, folder)
    found = {
        span: ratios(mean_rates(turns, "tracked", span), mean_rates(turns, "bare", span))
        for span in ("whole", "steady")
    }
    for span, ratio in found.items():
        print(line(f"{name}, {store}, {span}", ratio, f">= {WANTED[name]}"), flush=True)
    return {"steps": steps, "wanted": WANTED[name], "ratio": found, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one short block, to check that it works"
    )
    parser.add_argument("--longer", type=int, default=1, help="factor for the length of each run")
    parser.add_argument("--only", choices=("sqlite", "http"), help="one store only")
    parser.add_argument("--workload", choices=tuple(STEPS), help="one workload only")
    options = parser.parse_args()
    blocks, shorten = (1, 10) if options.quick else (options.blocks, 1 / options.longer)
    file = "tracking_overhead"
    if options.longer > 1:
        file += f"_{options.longer}_times_longer"
    # What is measured alone replaces only itself.
    found: dict[str, dict[str, Any]] = known(file).get("workloads", {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in [options.workload] if options.workload else STEPS:
            whole = STEPS[name]
            steps = int(whole / shorten)
            found.setdefault(name, {})
            if options.only != "http":
                found[name]["sqlite"] = compare(
                    name, "sqlite", steps, blocks, default_tracking_uri(folder), folder
                )
            if options.only != "sqlite":
                # Started here: no server uses the cores while SQLite is measured.
                with server(folder / f"server-{name}") as uri:
                    found[name]["http"] = compare(name, "http", steps, blocks, uri, folder)
    if is_whole(parser, options, "longer", "only", "workload"):
        save(file, workloads=found)


if __name__ == "__main__":
    main()
