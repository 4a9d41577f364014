"""Optimizers: fused if that changes nothing else, and step counts on the right device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from rankzero import Experiment, UserError
from rankzero.training.optimization import optimizers
from rankzero.training.optimization.optimizers import fused, learning_rates, place_states, set_lr
from support.training import Trainer, tiny, weights


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def test_pytorchs_optimizers_are_fused_unless_the_user_chose() -> None:
    model = linear()
    made = fused(optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    assert made.param_groups[0]["fused"] is True and made.param_groups[0]["weight_decay"] == 0.5
    chosen = optim.AdamW(model.parameters(), foreach=True)
    assert fused(chosen, model) is chosen


def test_an_optimizer_of_sparse_gradients_is_not_fused() -> None:
    model = nn.Sequential(nn.Embedding(8, 2, sparse=True), nn.Linear(2, 1))
    optimizer = fused(optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize(
    "unfit",
    [torch.ones(2, dtype=torch.complex64), torch.ones(4, 3)[:, :1]],
    ids=["complex", "gaps"],
)
def test_parameters_that_kernels_misread_are_not_fused(kind: Any, unfit: Tensor) -> None:
    model = nn.Module()
    model.fit, model.unfit = nn.Parameter(torch.ones(2)), nn.Parameter(unfit)
    optimizer = kind(model.parameters(), lr=0.1)
    assert fused(optimizer, model) is optimizer


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused(several: bool) -> None:
    class LineSearch(Experiment):
        def optimizer(self, model: nn.Module) -> Any:
            made = optim.LBFGS(model.parameters())
            return {"all": made} if several else made

    with pytest.raises(UserError, match=r"returned LBFGS, .* needs a closure"):
        optimizers.of(LineSearch(), linear())


class OwnRate(optim.SGD):
    """Computes its learning rate itself, as Transformers' Adafactor does by default."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["lr"] = None


@pytest.mark.parametrize("several", [False, True])
def test_an_optimizer_with_a_learning_rate_of_its_own_is_refused(several: bool) -> None:
    class Relative(Experiment):
        def optimizer(self, model: nn.Module) -> Any:
            made = OwnRate(model.parameters())
            return {"all": made} if several else made

    with pytest.raises(UserError, match=r"returned OwnRate without a learning rate, .* pass lr="):
        optimizers.of(Relative(), linear())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "returned NoneType: return a"),
        (([], []), "returned tuple: return a"),
        (optim.SGD, "returned the class SGD: return a"),
        ({"all": None}, "returned NoneType: return a"),
    ],
)
def test_what_is_no_optimizer_is_refused(made: Any, says: str) -> None:
    class Mistaken(Experiment):
        def optimizer(self, model: nn.Module) -> Any:
            return made

    with pytest.raises(UserError, match=says):
        optimizers.of(Mistaken(), linear())


def test_a_schedule_that_returns_no_number_is_refused() -> None:
    factors: Any = None
    with pytest.raises(UserError, match=r"schedule\(\) returned NoneType: return one float"):
        set_lr(optim.SGD(linear().parameters(), lr=0.1), [0.1], factors)


def test_an_optimizer_of_another_model_is_refused() -> None:
    class Mistaken(Experiment):
        def optimizer(self, model: nn.Module) -> optim.Optimizer:
            return optim.SGD(linear().parameters(), lr=0.1)

    with pytest.raises(UserError, match="without a parameter of the model"):
        optimizers.of(Mistaken(), linear())


@pytest.mark.parametrize("several", [False, True])
def test_a_parameter_that_is_not_in_the_model_is_refused(several: bool) -> None:
    class Mistaken(Experiment):
        def optimizer(self, model: nn.Module) -> Any:
            criterion = nn.Bilinear(2, 3, 4, bias=False)
            if several:
                parts = {"net": model.parameters(), "loss": criterion.parameters()}
                return {name: optim.SGD(one, lr=0.1) for name, one in parts.items()}
            return optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)

    says = r"a parameter of shape \[4, 2, 3\] that is not in the model: make its module a part of"
    with pytest.raises(UserError, match=says):
        optimizers.of(Mistaken(), linear())


def test_a_lazy_module_has_an_optimizer_before_its_first_forward() -> None:
    class Lazy(Experiment):
        def optimizer(self, model: nn.Module) -> optim.Optimizer:
            return optim.SGD(model.parameters(), lr=0.1)

    model = nn.Sequential(nn.LazyLinear(1))
    optimizer = optimizers.of(Lazy(), model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_an_optimizer_with_hooks_is_not_replaced() -> None:
    model, called = linear(), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    model(torch.ones(1, 2)).sum().backward()
    fused(optimizer, model).step()
    assert called == ["hook"]
    scheduled = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(scheduled, 1)  # wraps `step`
    assert fused(scheduled, model) is scheduled


@pytest.fixture
def uninitialised() -> Iterator[None]:
    """Fill uninitialised memory with NaN, as PyTorch does in its deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty_like(torch.ones(3)).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def after_an_overflow(optimizer: optim.Optimizer, model: nn.Linear) -> Tensor:
    """Return the weights after a step that overflows, which the scaler skips, and a good one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (float("inf"), 1.0):
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.usefixtures("uninitialised")
def test_sgd_has_no_uninitialised_momentum_after_an_overflow() -> None:
    chosen, made = linear(), linear()
    made.load_state_dict(chosen.state_dict())
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    unsafe = optim.SGD(chosen.parameters(), **settings, fused=True)
    assert after_an_overflow(unsafe, chosen).isnan().any(), "PyTorch has repaired the kernel"
    before = made.weight.detach().clone()
    safe = fused(optim.SGD(made.parameters(), **settings), made)
    place_states(safe)
    weight = after_an_overflow(safe, made)
    assert torch.allclose(weight, before - 0.1)


def test_sgd_takes_a_gradient_that_comes_later(train: Trainer, tmp_path: Path) -> None:
    class Thawed(type(tiny())):  # type: ignore[misc]
        is_fused: bool | None = None

        def frozen(self, epoch: int) -> list[str]:
            return ["0"] if epoch < 1 else []

        def optimizer(self, model: nn.Module) -> optim.Optimizer:
            return optim.SGD(model.parameters(), self.lr, 0.9, fused=self.is_fused)

    experiment = Thawed(**vars(tiny()))
    made = [
        train(dataclasses.replace(experiment, is_fused=choice), tmp_path / str(choice))
        for choice in (None, False)
    ]
    assert [one.state.optimizer.param_groups[0]["fused"] for one in made] == [True, False]
    for one, two in zip(*map(weights, made), strict=True):
        torch.testing.assert_close(one, two)


def test_fused_sgd_of_a_lazy_module_takes_its_first_step() -> None:
    model = nn.Sequential(linear(), nn.LazyLinear(1))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    place_states(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_users_own_sgd_makes_its_own_momentum() -> None:
    class Own(optim.SGD):
        pass

    own = Own([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9, fused=True)
    del own.param_groups[0]["dampening"]
    place_states(own)
    assert not own.state


def test_step_counts_are_on_the_device_that_the_kernels_read() -> None:
    """Fused kernels read them on the parameter's device. "meta" stands for a GPU."""
    for kind, is_fused, place in ((optim.AdamW, True, "meta"), (optim.AdamW, False, "cpu")):
        parameter = nn.Parameter(torch.ones(2, device="meta"))
        optimizer = kind([parameter])
        optimizer.param_groups[0]["fused"] = is_fused
        optimizer.state[parameter] = {"step": torch.tensor(3.0)}
        place_states(optimizer)
        assert optimizer.state[parameter]["step"].device.type == place
    plain = optim.SGD([parameter], lr=0.1)
    place_states(plain)
    assert not plain.state[parameter]
    # ZeroRedundancyOptimizer wraps another optimizer, whose options are older than its own.
    outer, inner = optim.AdamW([parameter]), optim.AdamW([parameter])
    outer.optim = inner  # type: ignore[attr-defined]
    outer.param_groups[0]["fused"], outer.state[parameter] = True, None
    inner.state[parameter] = {"step": torch.tensor(3.0)}
    place_states(outer)
    assert inner.state[parameter]["step"].device.type == "meta"


@pytest.mark.parametrize("was_last", [False, True])
def test_states_have_the_layout_of_their_parameter(was_last: bool) -> None:
    """A fused kernel on the CPU reads them by their place in memory."""
    layouts = (torch.contiguous_format, torch.channels_last)
    value, stepped = torch.arange(24.0).view(2, 3, 2, 2), []
    for layout in layouts:
        parameter = nn.Parameter(torch.ones_like(value).to(memory_format=layout))
        optimizer = optim.AdamW([parameter], fused=True)
        saved = optimizer.state_dict()
        names = ("exp_avg", "exp_avg_sq")
        state = {name: value.clone(memory_format=layouts[was_last]) for name in names}
        saved["state"] = {0: {"step": torch.tensor(3.0), **state}}
        optimizer.load_state_dict(saved)
        place_states(optimizer)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        stepped.append(parameter.detach())
    torch.testing.assert_close(*stepped)


class OnGpu(Tensor):
    """A tensor that stands for one on a GPU, until it is moved."""

    def to(self, device: Any) -> Tensor:  # type: ignore[override]
        assert device == "cpu"
        return self.as_subclass(Tensor)


def test_nadams_product_is_where_its_step_count_is() -> None:
    """On a GPU, NAdam would wait for the device at each parameter."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.NAdam([parameter])
    loaded = {name: torch.ones(()).as_subclass(OnGpu) for name in ("step", "mu_product")}
    optimizer.state[parameter] = loaded
    place_states(optimizer)
    assert {type(value) for value in optimizer.state[parameter].values()} == {Tensor}


class Halves(type(tiny())):  # type: ignore[misc]
    def model(self) -> nn.Module:
        return super().model().bfloat16()  # type: ignore[no-any-return]

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.NAdam(model.parameters(), lr=self.lr)

    def measure(self, model: Any, batch: Any) -> Any:
        return super().measure(model, [batch[0].bfloat16(), batch[1]])


def test_a_state_of_nadam_keeps_its_format_over_a_resume(train: Trainer, tmp_path: Path) -> None:
    experiment = Halves(**vars(tiny(train__steps=20)))
    straight = train(experiment, tmp_path / "straight")
    train(experiment, tmp_path / "parts", stop_at=9)
    again = train(experiment, tmp_path / "parts")
    assert all(map(torch.equal, weights(straight), weights(again)))
    states = [one.state.optimizer.state.values() for one in (straight, again)]
    for before, now in zip(*states, strict=True):
        assert {k: v.dtype for k, v in now.items()} == {k: v.dtype for k, v in before.items()}
        assert all(torch.equal(now[name], before[name]) for name in before)


def two_groups() -> optim.Optimizer:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.5, "name": "head"}], lr=0.1)


def test_a_schedule_may_have_a_factor_for_each_group() -> None:
    optimizer = two_groups()
    set_lr(optimizer, [0.1, 0.5], 0.5)
    assert learning_rates(optimizer) == {"lr": 0.05, "lr/head": 0.25}
    set_lr(optimizer, [0.1, 0.5], (0.5, 1.0))
    assert learning_rates(optimizer) == {"lr": 0.05, "lr/head": 0.5}
    for several in (np.array([0.25, 0.5]), torch.tensor([0.25, 0.5])):
        set_lr(optimizer, [0.1, 0.5], several)
        assert learning_rates(optimizer) == {"lr": 0.025, "lr/head": 0.25}
    set_lr(optimizer, [0.1, 0.5], torch.tensor([0.5]))
    assert learning_rates(optimizer) == {"lr": 0.05, "lr/head": 0.25}
    del optimizer.param_groups[1]["name"]
    assert list(learning_rates(optimizer)) == ["lr", "lr/1"]


@pytest.mark.parametrize("factors", [[], [1.0], (1.0, 1.0, 1.0), np.ones(3)])
def test_a_wrong_number_of_factors_is_refused(factors: Any) -> None:
    wanted = f"returned {len(factors)} factors, but the optimizer has 2 parameter groups"
    with pytest.raises(UserError, match=wanted):
        set_lr(two_groups(), [0.1, 0.5], factors)
