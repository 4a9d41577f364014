"""The runs of a repeat: every combination of some settings' values, on every seed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankzero.errors import UserError
from rankzero.run_store import names
from rankzero.run_store.folder import RunFolder

SEED = "train.seed"
_DEFAULT_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Repetition:
    """One run of a repeat."""

    values: tuple[tuple[str, str], ...]
    """(key, value) of the settings that vary, without the seed."""
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the run changes."""
        return {**dict(self.values), SEED: self.seed}

    @property
    def label(self) -> str:
        """The run in words: ``fold=0, seed=1``."""
        return ", ".join([*(f"{key}={value}" for key, value in self.values), f"seed={self.seed}"])

    def name(self, parent: str) -> str:
        """Return the name of its run: ``<parent>-fold0-seed1``."""
        parts = [key.rpartition(".")[2] + value for key, value in self.values]
        text, most = "-".join([*parts, f"seed{self.seed}"]), names.MAX_STEM_BYTES
        plain = names.made_plain(text)
        if len(names.made_plain(text, most + 4)) > len(plain):
            # The seed would be cut off, or what differs between two values.
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:6]
            end = f"-{digest}-seed{self.seed}"
            plain = names.made_plain(text, most - len(end)) + end
        return f"{parent}-{plain}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings and the seeds that a repeat varies."""

    over: Mapping[str, Sequence[str]]
    """The values of each setting, by its key."""
    seeds: Sequence[int]
    nproc: int | None = None
    """The processes of each run, if the user chose them."""

    def __iter__(self) -> Iterator[Repetition]:
        """Yield the runs. A repeat that is interrupted has trained all folds on the first seed."""
        keys = self.over.keys()
        for seed in self.seeds:
            for values in itertools.product(*self.over.values()):
                yield Repetition(tuple(zip(keys, values, strict=True)), seed)

    def extended(
        self, over: Mapping[str, Sequence[str]], seeds: Sequence[int], nproc: int | None
    ) -> Plan:
        """Return the plan with further values and seeds. Raises UserError for another setting."""
        for key in over.keys() - self.over.keys():
            known = ", ".join(self.over) or "no setting"
            raise UserError(
                f"--over {key}: the runs of this repeat vary {known}: start a new repeat for {key}"
            )
        values = {key: _union(old, over.get(key, ())) for key, old in self.over.items()}
        return _checked(Plan(values, _union(self.seeds, seeds), nproc))

    def params(self) -> dict[str, str]:
        """Return the params of the repeat's own run."""
        found = {f"repeat.over.{key}": ",".join(values) for key, values in self.over.items()}
        return {**found, "repeat.seeds": ",".join(map(str, self.seeds))}


def make_plan(over: Sequence[str], seeds: str | None, own_seed: int, nproc: int | None) -> Plan:
    """Return the plan of ``--over key=a,b`` or ``key=["a", "b"]`` words and of ``--seeds``.

    Without both, three seeds; without seeds, the experiment's own. Raises UserError.
    """
    values: dict[str, tuple[str, ...]] = {}
    for word in over:
        key, equals, text = word.partition("=")
        found = _values(text)
        if not equals or not key or not found:
            raise UserError(f"--over takes key=value,value such as fold=0,1,2: got {word!r}")
        if key == SEED:
            raise UserError(f"--over {SEED} is called --seeds: write --seeds {text}")
        if key in values or len(set(found)) < len(found):
            raise UserError(f"--over {word}: each key and each of its values is given once")
        values[key] = found
    default = (own_seed,) if values else tuple(range(_DEFAULT_SEEDS))
    return _checked(Plan(values, default if seeds is None else _seeds(seeds), nproc))


def _values(text: str) -> tuple[str, ...]:
    """Return the values of a text: ``a,b``, or a JSON list of texts, which may have commas."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, list) and all(isinstance(one, str) for one in found):
            return tuple(found)
    return tuple(filter(None, map(str.strip, text.split(","))))


def _checked(plan: Plan) -> Plan:
    taken: dict[str, str] = {}
    for one in plan:
        if (other := taken.setdefault(one.name("r"), one.label)) != one.label:
            raise UserError(f"the runs of {other} and {one.label} would have the same name")
    return plan


def _union(old: Sequence[Any], new: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values of both, each once, the old ones first."""
    return tuple(dict.fromkeys([*old, *new]))


def _seeds(text: str) -> tuple[int, ...]:
    """Return the seeds: ``3`` means 0, 1, 2; ``5,7`` means these."""
    parts = text.rstrip(",").split(",")
    if not all(part.strip().isdecimal() for part in parts) or text.strip() == "0":
        raise UserError(f"--seeds takes their number or a list, such as 3 or 5,7: got {text!r}")
    return tuple(dict.fromkeys(map(int, parts) if "," in text else range(int(text))))


def file_of(folder: RunFolder) -> Path:
    """Return the file with the plan and the results of a repeat, which MLflow gets, too."""
    return folder.artifacts / "repeat.json"


def run_names(plan: Plan, folder: RunFolder) -> list[str]:
    """Return the names of the runs of a repeat, in order. Runs that it has keep theirs."""
    path, known = file_of(folder), list[dict[str, Any]]()
    # The columns of a row that are no settings have the place of settings with their names.
    if path.exists() and plan.over.keys().isdisjoint(("run", "status", "metrics")):
        known = json.loads(path.read_text(encoding="utf-8")).get("runs", [])
    # An older version cut long names in another way.
    kept = {tuple(row.get(key) for key in [*plan.over, SEED]): row["run"] for row in known}
    keys = [tuple(one.settings.values()) for one in plan]
    new = [one.name(folder.path.name) for one in plan]
    return [kept.get(key, name) for key, name in zip(keys, new, strict=True)]


def refuse_taken_names(plan: Plan, folder: RunFolder) -> None:
    """Raise UserError if a run that is no part of the repeat has the name of one of its runs."""
    is_new, own = stored(folder) is None, {child.path.name for child in folder.children}
    for name in set(run_names(plan, folder)) - own:
        other = RunFolder(folder.path.parent / name)
        # A command that was killed may have created the run, and not yet listed it.
        if (other.path / "run.json").exists() and (
            is_new or other.identity.parent != folder.path.name
        ):
            raise UserError(
                f"there is a run {name!r} already, which is no part of this repeat: choose "
                "another --name for the repeat, or other seeds"
            )


def stored(folder: RunFolder) -> Plan | None:
    """Return the plan of a repeat's run, or None if the run is none. Raises UserError."""
    path = file_of(folder)
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Plan(fields["over"], fields["seeds"], fields["nproc"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): start a new repeat") from error
