"""A training loop of the user's own, tracked by rankzero.track: two parameters, ten steps."""

import torch

import rankzero
from rankzero import Goal

weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.25)
with rankzero.track("old-own-loop", {"lr": 0.25}, name="own-loop", goal=Goal("val/loss")) as run:
    for step in range(1, 11):
        loss = ((weight - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"train/loss": loss}, step=step)
    run.checkpoint(
        {"weight": weight.detach()},
        step=10,
        metrics={"val/loss": ((weight - 1) ** 2).mean().detach()},
    )
