"""The manifest of a Kubernetes job: an indexed Job, and the Service through which its pods meet."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import yaml

from rankzero.errors import RESUMABLE, UserError
from rankzero.mlflow_store.patience import A_DAY, WAIT

# A pod's host name is the job's name with its index, and has at most 63 characters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
_RUNS = "/rankzero"
# Kubernetes starts pods one by one, and pulls the image first.
_MEETING = "join_timeout=1800,read_timeout=1800"
_GRACE_SECONDS = 120
_LOST_MACHINES = 3
_HEAD = "# Written by `rankzero submit`. A pod that stops with a checkpoint is started again.\n"


@dataclasses.dataclass(frozen=True)
class Pods:
    """The pods of a job, and what each of them gets."""

    image: str
    count: int = 1
    gpus: int | None = None
    cpus: str | None = None
    memory: str | None = None
    claim: str | None = None
    """The PersistentVolumeClaim that has the runs' folder."""
    secret: str | None = None
    """The Secret whose keys become variables, such as MLFLOW_TRACKING_PASSWORD."""


def manifest(name: str, words: Sequence[str], pods: Pods) -> str:
    """Return the job's manifest as YAML. `words`: of `rankzero train`.

    Raises UserError for a name that Kubernetes does not take.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name} is no name for a job of Kubernetes: --name takes lower-case letters, digits "
            "and '-', begins with a letter, and has at most 52 characters"
        )
    parts = [_job(name, words, pods)]
    if pods.count > 1:
        parts.insert(0, _service(name))
    return _HEAD + yaml.dump_all(parts, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes all text that any version of YAML may take for a number or a truth value."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = len(text) > 1 and text[0].isalpha() and text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def _service(name: str) -> dict[str, Any]:
    """Return the headless Service, which gives each pod a name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": name},
            # A pod needs the first one's name before either of them is ready.
            "publishNotReadyAddresses": True,
        },
    }


def _job(name: str, words: Sequence[str], pods: Pods) -> dict[str, Any]:
    ignored = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [RESUMABLE]}},
        # A drained, preempted or lost machine.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            # Each pod keeps its name when it is started again, so that a claim of the pod before
            # counts as one of a dead process of this machine.
            "completionMode": "Indexed",
            "completions": pods.count,
            "parallelism": pods.count,
            # A lost machine fails all other pods. A run that fails by itself fails every pod.
            "backoffLimit": _LOST_MACHINES * (pods.count - 1),
            "podFailurePolicy": {"rules": ignored},
            "template": {"spec": _pod(name, words, pods)},
        },
    }


def _pod(name: str, words: Sequence[str], pods: Pods) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if pods.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}})
    paths = {"shm": "/dev/shm", "runs": _RUNS}  # noqa: S108 - the pod's own
    limits = {"nvidia.com/gpu": pods.gpus, "cpu": pods.cpus, "memory": pods.memory}
    container = {
        "name": "train",
        "image": pods.image,
        # Kubernetes replaces $(NAME) by a variable, and $$ by $.
        "command": ["rankzero", "train", *(word.replace("$", "$$") for word in words)],
        "env": _environment(name, pods),
        "envFrom": [{"secretRef": {"name": pods.secret}}] if pods.secret else None,
        "resources": {"limits": {key: str(one) for key, one in limits.items() if one}},
        "volumeMounts": [{"name": one["name"], "mountPath": paths[one["name"]]} for one in volumes],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        **({"subdomain": name} if pods.count > 1 else {}),
        # Else the claim belongs to root, and the image may have another user.
        "securityContext": {"fsGroup": 1000},
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }


def _environment(name: str, pods: Pods) -> list[dict[str, Any]]:
    """Return the variables of each pod. Those of torchrun say where the pods meet."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    # Without a claim, only MLflow keeps the run.
    kept = ("RANKZERO_DIR", _RUNS) if pods.claim else (WAIT, str(A_DAY))
    keeps = {"name": kept[0], "value": kept[1]}
    if pods.count == 1:
        return [keeps]
    return [
        keeps,
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-0.{name}"},
        {"name": "PET_RDZV_CONF", "value": _MEETING},
    ]
