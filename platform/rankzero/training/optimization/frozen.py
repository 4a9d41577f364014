"""Modules that are not trained: the experiment's helpers, and the frozen parts of the model."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from rankzero.errors import UserError
from rankzero.experiment import Experiment
from rankzero.training.optimization.optimizers import place_states
from rankzero.training.strategies.base import Strategy


def helpers(experiment: Experiment, device: torch.device) -> Mapping[str, nn.Module]:
    """Return the experiment's helpers on `device`, in evaluation mode and without gradients."""
    found = dict(experiment.helpers())
    for name, module in found.items():
        if not isinstance(module, nn.Module):
            raise UserError(
                f"helpers() must return {{name: torch.nn.Module}}, but {name!r} is a "
                f"{type(module).__name__}"
            )
        module.to(device).requires_grad_(False)
        # A program of torch.export, as MLflow loads a logged model, has one mode and refuses this.
        with contextlib.suppress(NotImplementedError):
            module.eval()
    return MappingProxyType(found)


class FrozenParts:
    """Which parameters of a model are trained in an epoch, by `Experiment.frozen`."""

    def __init__(self, experiment: Experiment, model: nn.Module) -> None:
        self.is_used = type(experiment).frozen is not Experiment.frozen
        self._frozen = experiment.frozen
        self._modules = [name for name, _ in model.named_modules() if name]
        # A tied weight has several names, and is frozen by each of them.
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                names.setdefault(parameter, []).append(name)
        self._names = list(names.values())
        self.now = self._trained(())
        """The names of the parameters that are trained now."""

    def begin(self, epoch: int, strategy: Strategy) -> bool:
        """Train the parameters of `epoch`. Return whether they were others before. Collective.

        Raises UserError for an unknown module, and if no parameter is left.
        """
        trained = self._trained(self.modules(epoch))
        if trained == self.now:
            return False
        if not trained:
            raise UserError(f"frozen({epoch}) leaves no parameter to train: return fewer modules")
        strategy.train_only(trained)
        place_states(strategy.optimizer)
        self.now = trained
        return True

    def change(self, epoch: int) -> str:
        """Return how `epoch` differs from the one before, or nothing. Pure."""
        now, before = self.modules(epoch), self.modules(epoch - 1) if epoch else []
        frozen = ", ".join(name for name in now if name not in before)
        trained = ", ".join(name for name in before if name not in now)
        changes = [f"does not train {frozen}"] * bool(frozen)
        changes += [f"begins to train {trained}"] * bool(trained)
        return f"epoch {epoch} {' and '.join(changes)}" if changes else ""

    def modules(self, epoch: int) -> list[str]:
        """Return the modules that are frozen in `epoch`. Raises UserError for an unknown one."""
        names = self._frozen(epoch)
        names = [names] if isinstance(names, str) else list(names)
        for name in names:
            if name not in self._modules:
                near = difflib.get_close_matches(str(name), self._modules, 1, 0)
                raise UserError(
                    f"frozen({epoch}) names {name!r}, which is no module of the model: "
                    f"{f'did you mean {near[0]!r}?' if near else 'it has none'}"
                )
        return names

    def _trained(self, modules: Sequence[str]) -> frozenset[str]:
        inside = tuple(f"{module}." for module in modules)
        return frozenset(
            names[0] for names in self._names if not any(name.startswith(inside) for name in names)
        )

    def wrongly_set(self, model: nn.Module) -> list[str]:
        """Return the parameters of a whole model of which `requires_grad` was set elsewhere."""
        return [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad != (name in self.now)
        ]
