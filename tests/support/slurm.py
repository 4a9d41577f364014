"""Debian's real Slurm as a cluster of two machines, in namespaces of its own: `cluster`.

Both machines are this one: each has a `slurmd` with a port of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

IN_CI = "RANKZERO_CI"
"""Set by .ci/run. A cluster's tests are chosen by `make test-cluster` only, which needs Slurm."""
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# Slurm resolves no name, not even an address, where the loopback interface is the only one.
SCRIPT = """
set -e
hostname first
ip link set lo up
ip link add one type veth peer name other
ip link set other up
ip address add 10.77.0.1/24 dev one
ip link set one up
printf '127.0.0.1 localhost\\n10.77.0.1 first second\\n' > hosts
mount --bind hosts /etc/hosts
mount -t tmpfs none /sys/fs/cgroup
head -c 1024 /dev/urandom > munge.key
chmod 400 munge.key
munged --foreground --force --key-file=$PWD/munge.key --socket=$PWD/munge.socket \\
    --pid-file=$PWD/munged.pid --log-file=$PWD/munged.log --seed-file=$PWD/munge.seed &
until [ -S munge.socket ]; do sleep 0.05; done
slurmctld -D -c &
slurmd -D -N first &
slurmd -D -N second &
wait
"""
SETTINGS = """\
ClusterName=tests
SlurmctldHost=first(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=first NodeHostname=first NodeAddr=10.77.0.1 Port=16818 CPUs=2 RealMemory=8000 Gres=gpu:2
NodeName=second NodeHostname=first NodeAddr=10.77.0.1 Port=16819 CPUs=2 RealMemory=8000 Gres=gpu:2
PartitionName=main Nodes=first,second Default=YES
"""
# Slurm wants a file for each GPU, and takes any.
GPUS = "Name=gpu File={folder}/gpu[0-1]\n"
CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
"""


class Cluster:
    """A running Slurm. Call it to run a command on one of its machines."""

    def __init__(self, folder: Path, process: int) -> None:
        self._folder, self._process = folder, process
        self.environ = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        """The variables of its commands."""

    def __call__(
        self,
        words: Sequence[object],
        folder: Path,
        environ: Mapping[str, str],
        *,
        check: bool = True,
    ) -> str:
        """Return a command's output. Raises CalledProcessError if it fails, unless not `check`."""
        return subprocess.run(
            self.words(words, folder),
            env={**environ, **self.environ},
            check=check,
            text=True,
            stdout=subprocess.PIPE,
        ).stdout

    def words(self, words: Sequence[object], folder: Path) -> list[str]:
        """Return the words that run a command in `folder` of one of its machines."""
        enter = ["nsenter", f"--target={self._process}", "--mount", "--net", "--uts", "--pid"]
        return [*enter, f"--wd={folder}", *map(str, words)]

    def restore(self) -> None:
        """Start daemons that have ended, and let machines that are down take jobs."""
        for name in ("first", "second"):
            daemon = f"slurmd -D -N {name}"
            if not self(["pgrep", "--full", "--exact", daemon], self._folder, {}, check=False):
                self(["sh", "-c", f"{daemon} >/dev/null 2>&1 &"], self._folder, {})
            if "DOWN" in self(["scontrol", "show", "node", name], self._folder, {}):
                update = ["scontrol", "update", f"NodeName={name}", "State=resume"]
                self(update, self._folder, {})

    def job(self, number: int) -> dict[str, str]:
        """Return what Slurm knows of a job, such as its JobState."""
        known = self(["scontrol", "--oneliner", "show", "job", number], self._folder, {})
        return dict(one.split("=", 1) for one in known.split() if "=" in one)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of two machines with two processors each, which only root can have."""
    if text := needs():
        (pytest.fail if IN_CI in os.environ else pytest.skip)(text)
    with running() as found:
        yield found


def needs() -> str:
    """Return what Slurm needs and this machine lacks, or nothing."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if not missing and os.geteuid() == 0:
        return ""
    text = f"Slurm: needs root and {', '.join(missing) or 'nothing else'} (apt-get install "
    return text + "slurmctld slurmd slurm-client munge iproute2)"


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """Run the daemons, and end them with all that they have started."""
    folder = Path(tempfile.mkdtemp(prefix="rankzero-slurm-"))
    for name in ("state", "spool-first", "spool-second"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder))
    (folder / "gres.conf").write_text(GPUS.format(folder=folder))
    for name in ("gpu0", "gpu1"):
        (folder / name).touch()
    (folder / "cgroup.conf").write_text(CGROUP)
    apart = ("--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    with (folder / "daemons.log").open("w") as log:
        process = subprocess.Popen(
            ["unshare", *apart, "bash", "-c", SCRIPT],
            cwd=folder,
            env={**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")},
            stdout=log,
            stderr=log,
        )
    try:
        yield _ready(folder, process)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _ready(folder: Path, process: subprocess.Popen[bytes]) -> Cluster:
    """Return the cluster once its machines take jobs."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(IndexError, subprocess.CalledProcessError):
            found = Cluster(folder, psutil.Process(process.pid).children()[0].pid)
            if "2 idle" in found(["sinfo", "--noheader", "--format=%D %T"], folder, {}):
                return found
        time.sleep(0.2)
    pytest.fail(f"Slurm did not start: {(folder / 'daemons.log').read_text()[-2000:]}")
