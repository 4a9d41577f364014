"""Several optimizers of one model as one, such as Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.strategies import parameter_names
from rankzero.training_position import takes_progress


class JointOptimizer(Optimizer):
    """Optimizers by name that step together. Its groups are theirs, in the mapping's order.

    Its state has the form of one optimizer with these groups.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        # Not the base's __init__: groups and states belong to the parts, which may replace them.
        self.parts = dict(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Every part's groups."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Every part's states, by parameter."""
        return {key: state for part in self.parts.values() for key, state in part.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Let every part step."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every part's parameters."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the parts' states, with parameters numbered as those of one optimizer.

        ``parts`` has by name what else a part stores, such as a count of its own.
        """
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        rests: dict[str, Any] = {}
        for name, part in self.parts.items():
            saved, first = part.state_dict(), sum(len(group["params"]) for group in groups)
            mine = sum(len(group["params"]) for group in saved["param_groups"])
            states: dict[Any, Any] = saved["state"]
            # A state may belong to no parameter.
            rest = {key: states.pop(key) for key in list(states) if isinstance(key, str)}
            moved = parameter_names.rekeyed(saved, dict(enumerate(range(first, first + mine))))
            state |= moved["state"]
            groups += moved["param_groups"]
            if rest or len(saved) > len(moved):
                rests[name] = {**saved, "state": rest}
                del rests[name]["param_groups"]
        return {"state": state, "param_groups": groups, **({"parts": rests} if rests else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Divide what `state_dict` returned among the parts. Raises ValueError if it differs."""
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"it has {len(groups)} groups of parameters, the optimizers have "
                f"{len(self.param_groups)}"
            )
        for name, part in self.parts.items():
            mine, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            keys = [key for group in mine for key in group["params"]]
            state = {key: state_dict["state"][key] for key in keys if key in state_dict["state"]}
            numbers = {key: number for number, key in enumerate(keys)}
            saved = parameter_names.rekeyed({"state": state, "param_groups": mine}, numbers)
            rest = state_dict.get("parts", {}).get(name, {"state": {}})
            part.load_state_dict({**rest, **saved, "state": {**rest["state"], **saved["state"]}})


def parts_of(optimizer: Optimizer) -> Iterable[Optimizer]:
    """Return the optimizers that `optimizer` consists of: itself if it is no JointOptimizer."""
    return optimizer.parts.values() if isinstance(optimizer, JointOptimizer) else (optimizer,)


def check(parts: Mapping[str, Any], model: nn.Module) -> None:
    """Raise UserError unless each trainable parameter of the model has exactly one optimizer."""
    owner: dict[Any, str] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, part in parts.items():
        if not isinstance(part, Optimizer):
            raise UserError(
                f"optimizer() must return an optimizer or {{name: optimizer}}, got "
                f"{type(part).__name__} for {name!r}"
            )
        for parameter in (one for group in part.param_groups for one in group["params"]):
            if parameter in owner:
                raise UserError(
                    f"optimizer() gives {names.get(parameter)!r} to {owner[parameter]!r} and to "
                    f"{name!r}: give each parameter to one optimizer"
                )
            owner[parameter] = name
    for parameter, found in names.items():
        if parameter.requires_grad and parameter not in owner:
            raise UserError(
                f"optimizer() gives {found!r} to no optimizer, so it would never be trained: give "
                "it to one, or set its requires_grad to False in model()"
            )


def check_turns(experiment: Experiment, made: Any) -> None:
    """Raise UserError unless each optimizer that `optimizer()` made has a turn."""
    names = list(made) if isinstance(made, Mapping) else []
    if set(experiment.turns) != set(names):
        raise UserError(
            f"turns names {', '.join(dict.fromkeys(experiment.turns))}, but optimizer() returns "
            f"{', '.join(names) or 'one optimizer'}: name each optimizer of the mapping"
        )
    if not takes_progress(experiment.measure):
        raise UserError(
            "an experiment with turns needs measure(self, model, batch, at): at.turn is the "
            "optimizer that steps"
        )
