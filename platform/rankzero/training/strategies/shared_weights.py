"""Tied weights, such as an embedding that is also the output layer: they must stay one tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from rankzero.errors import UserError


def shared(model: nn.Module) -> list[list[str]]:
    """Return the names of each weight that has several names in the model."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [found for found in names.values() if len(found) > 1]


def unshared(parts: Iterable[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that share no weight with the rest of it."""
    everywhere = _uses(model)
    for part in parts:
        if all(everywhere[parameter] == uses for parameter, uses in _uses(part).items()):
            yield part


def check_together(model: nn.Module, tied: Iterable[Sequence[str]], strategy: str) -> None:
    """Raise UserError if a group of names that was one weight is not one any more."""
    for names in tied:
        first, *others = (model.get_parameter(name) for name in names)
        if any(other is not first for other in others):
            refuse(names, strategy)


def check_stages(stages: Iterable[nn.Module]) -> None:
    """Raise UserError if two stages of a pipeline contain the same weight."""
    seen: dict[nn.Parameter, str] = {}
    for stage in stages:
        mine = {parameter: name for name, parameter in stage.named_parameters()}
        for parameter in mine.keys() & seen.keys():
            refuse([seen[parameter], mine[parameter]], "pp")
        seen |= mine


def refuse(names: Sequence[str], strategy: str) -> None:
    """Raise UserError: the strategy would make several weights of one that has these names."""
    shown = ", ".join(map(repr, dict.fromkeys(names)))
    raise UserError(
        f"train.strategy={strategy} would divide a weight that is used in several places ({shown}),"
        " and it would become several: have them all in one stage, or none in the plan, untie "
        "them, or use ddp or fsdp"
    )


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
