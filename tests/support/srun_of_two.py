"""A stand-in on this machine for ``srun --nodes=2 --kill-on-bad-exit=1``: a program.

Both nodes get the input, and whole lines of their output mix. tests/tuning/places/test_slurm.py has
the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

NODE = (sys.executable, "-m", "rankzero.tuning.places.node", "--machines=2", "--first=127.0.0.1")


def main() -> int:
    nodes = [
        subprocess.Popen(
            [*NODE, f"--job={os.getpid()}", f"--number={number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(2)
    ]
    threads = [threading.Thread(target=_pass_back, args=(node,)) for node in nodes]
    for thread in (*threads, threading.Thread(target=_pass_on, args=(nodes,), daemon=True)):
        thread.start()
    for thread in threads:
        thread.join()
    return max(abs(node.wait()) for node in nodes)


def _pass_on(nodes: list[subprocess.Popen[bytes]]) -> None:
    content = b"a first part"
    while content:
        content = os.read(0, 1 << 16)
        for node in nodes:
            assert node.stdin is not None
            node.stdin.write(content)
            node.stdin.flush()
    for node in nodes:
        assert node.stdin is not None
        node.stdin.close()


def _pass_back(node: subprocess.Popen[bytes]) -> None:
    assert node.stdout is not None
    for line in node.stdout:
        os.write(1, line)
    if node.wait() != 0:
        os._exit(1)


if __name__ == "__main__":
    os._exit(main())
