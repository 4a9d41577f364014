"""The process beside rank 0, one a node: samples the node, sees how rank 0 ends, keeps a courier to MLflow going.

    rank 0   start() ── pipe ──▶ python -m rankzero.tracking.recorder ── starts ──▶ courier
             appends events.jsonl        appends system-node_<i>.jsonl              reads both, tells MLflow
             close() or death            sees the pipe close, says FAILED           delivers the rest, ends
                                         where rank 0 could not

It costs the training process one spawn, outlives Ctrl-C, and keeps at it while MLflow is down.
What cannot be delivered in the end, `rankzero sync` does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankzero import ranks
from rankzero.run_store import claims, symlinks
from rankzero.run_store.folder import RunFolder

if TYPE_CHECKING:
    from rankzero.run_store.attempt import LiveAttempt
    from rankzero.tracking.courier_supervisor import CourierSupervisor

SOURCE_ROOT = str(Path(__file__).parents[2])
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

_open_pipes: set[int] = set()
_children: set[int] = set()


class RecorderHandle:
    """Rank 0's end of the pipe. The recorder ends some time after it is closed, or after this process's death."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe = pid, pipe
        _open_pipes.add(pipe)

    def close(self) -> None:
        """Tell the recorder that no more events come; may be called twice."""
        if self._pipe in _open_pipes:
            _open_pipes.discard(self._pipe)
            os.close(self._pipe)


def start(
    folder: RunFolder,
    gpu_uuids: Sequence[str] | None,
    node: int,
    node_count: int = 1,
    *,
    offline: bool = False,
) -> RecorderHandle:
    """Start the recorder of this node; call it before the attempt's first event. Takes milliseconds and never waits.

    `gpu_uuids`: of the GPUs to watch; None: all that CUDA_VISIBLE_DEVICES leaves.
    `offline`: the recorder starts no courier; `rankzero sync` delivers the run later.
    """
    claim = claims.claim(folder, node)
    reader, writer = os.pipe()
    command = [
        *(sys.executable, "-P", "-m", "rankzero.tracking.recorder", str(folder.path)),
        *("--token", claim.token, "--node", str(node), "--nodes", str(node_count)),
        *(
            "--job",
            str(_job_root(os.environ)),
            *(() if gpu_uuids is None else ("--gpus", *gpu_uuids)),
        ),
        *(("--offline",) if offline else ()),
    ]
    with open(
        folder.path / _suffixed("recorder.log", node), "ab", opener=symlinks.no_follow
    ) as output:
        process = subprocess.Popen(
            command,
            stdin=reader,
            stdout=output,
            stderr=output,
            env=_environment(os.environ),
            start_new_session=True,
        )  # so that a Ctrl-C at the terminal passes it by
    os.close(reader)
    _reap()
    _children.add(process.pid)
    process.returncode = 0  # nobody waits for it: it ends after us
    return RecorderHandle(process.pid, writer)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record one attempt on one node."""
    from rankzero.redaction.log_format import log_without_secrets
    from rankzero.run_store.attempt import LiveAttempt
    from rankzero.run_store.provenance import write_packages
    from rankzero.telemetry.sampling_thread import SamplingThread
    from rankzero.tracking.courier_supervisor import CourierSupervisor
    from rankzero.tracking.retry import guarded

    options = _parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # meant for the training, whose end is what we are here for
    log_without_secrets()
    folder = RunFolder(options.folder)
    attempt = LiveAttempt(folder, options.node, options.token)
    sampling = SamplingThread(folder, options.gpus, options.node, options.nodes, options.job)
    if options.offline and options.node == 0:  # else the courier writes it
        guarded(lambda: write_packages(folder.artifacts))
    alone = options.offline or _delivered_by_parent(folder)
    courier = None if alone else CourierSupervisor(attempt)
    _follow(attempt, courier)
    guarded(
        sampling.stop
    )  # on a full disk it cannot be done, and the courier is still to be tended
    _finish(attempt, courier)


def _follow(attempt: LiveAttempt, courier: CourierSupervisor | None) -> None:
    """Tend the courier until rank 0 has ended, or a newer attempt begins. A turn that fails is made again."""
    from rankzero.tracking.courier import TICK_SECONDS
    from rankzero.tracking.retry import guarded

    standing = None
    while attempt.is_latest and not attempt.over:
        if standing is None:
            standing = claims.announce_recorder(attempt.folder, attempt.node, attempt.token)
        if courier is not None:
            courier.tend()
        guarded(lambda: attempt.wait(TICK_SECONDS))


def _finish(attempt: LiveAttempt, courier: CourierSupervisor | None) -> None:
    """Say the end that rank 0 could not, and tend the courier to its end; the former is tried for `grace_seconds`."""
    from rankzero.tracking.retry import grace_seconds, succeeds

    until = time.monotonic() + grace_seconds()
    said = succeeds(attempt.ensure_run_ended)
    if courier is not None:
        courier.finish()
    while (courier is not None and courier.tend()) or (not said and time.monotonic() < until):
        said = said or succeeds(attempt.ensure_run_ended)
        time.sleep(0.1)


def _delivered_by_parent(folder: RunFolder) -> bool:
    parent = folder.identity.parent
    return parent is not None and (folder.path.parent / parent / "run.json").exists()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what would make a helper greedy, or fail on others' warnings."""
    kept = {name: value for name, value in environ.items() if name != "PYTHONWARNINGS"}
    path = [entry for entry in (environ.get("PYTHONPATH"), SOURCE_ROOT) if entry]
    return {**kept, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path)}


def _job_root(environ: Mapping[str, str]) -> int:
    """Return the process above all of this node's ranks."""
    return os.getppid() if ranks.detect(environ).local_world_size > 1 else os.getpid()


def _reap() -> None:
    """Clear away recorders that have ended while this process lives on (a notebook that starts many runs)."""
    for pid in tuple(_children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _children.discard(pid)


def _close_inherited() -> None:
    """Close the pipes in a forked child: a data-loading process that lives on must not look like rank 0."""
    for pipe in tuple(_open_pipes):
        with contextlib.suppress(OSError):
            os.close(pipe)
    _open_pipes.clear()


os.register_at_fork(after_in_child=_close_inherited)


def _suffixed(name: str, node: int) -> str:
    stem, _, suffix = name.partition(".")
    return name if node == 0 else f"{stem}-node_{node}.{suffix}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rankzero.tracking.recorder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--token", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--gpus", nargs="*")
    parser.add_argument("--offline", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
