"""Weights that several modules share, such as an embedding that is the output layer's, too: they must stay one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from rankzero.errors import UserError


def shared(model: nn.Module) -> list[list[str]]:
    """Return the names of each weight that the model has under several."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [found for found in names.values() if len(found) > 1]


def unshared(parts: Iterable[nn.Module], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that share no weight with what is outside of them."""
    everywhere = _uses(model)
    for part in parts:
        if all(everywhere[parameter] == uses for parameter, uses in _uses(part).items()):
            yield part


def check_together(model: nn.Module, tied: Iterable[Sequence[str]], strategy: str) -> None:
    """Raise UserError where names that were one weight's are not any more."""
    for names in tied:
        first, *others = (model.get_parameter(name) for name in names)
        if any(other is not first for other in others):
            refuse(names, strategy)


def check_stages(stages: Iterable[nn.Module]) -> None:
    """Raise UserError where a weight is in two stages of a pipeline, whose items still have the model's names."""
    seen: dict[nn.Parameter, str] = {}
    for stage in stages:
        mine = {parameter: name for name, parameter in stage.named_parameters()}
        for parameter in mine.keys() & seen.keys():
            refuse([seen[parameter], mine[parameter]], "pp")
        seen |= mine


def refuse(names: Sequence[str], strategy: str) -> None:
    """Raise UserError: these names are one weight, which the strategy would make several of."""
    raise UserError(
        f"train.strategy={strategy} would divide a weight that is used in several places "
        f"({', '.join(map(repr, dict.fromkeys(names)))}), and it would become several: have them all in one stage, or "
        "none in the plan, untie them, or use ddp or fsdp"
    )


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
