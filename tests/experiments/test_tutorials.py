"""The rewritten tutorials train, and as their own loops do: the same weights, to six digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional

from rankzero import Experiment, config, experiment_file
from rankzero.ranks import Ranks
from rankzero.training import rng
from rankzero.training.build import build
from rankzero.training.distributed.world import World
from support.paths import EXPERIMENTS
from support.training import Trained, Trainer, weights
from support.two_ranks import Case, launched, seen

FOLDER = EXPERIMENTS / "tutorials"
SMALL: dict[str, dict[str, Any]] = {
    "glue_pairs": {"width": 8, "samples": 80, "train.batch_size": 4},
    "graph_network": {},
    "lightning_gan": {"noise": 4, "train.batch_size": 8},
    "mnist_convnet": {"train.batch_size": 8},
    "siamese": {"train.batch_size": 8},
    "sine_waves": {"length": 20},
    "timm_vit": {"width": 32, "layers": 1, "train.batch_size": 8},
    "translation": {"width": 8, "numbers": 100, "train.batch_size": 8},
    "vae": {"train.batch_size": 8},
    "word_lstm": {"width": 8, "window": 5, "train.batch_size": 4},
}
STEPS = 4
SHORT = {
    "train.steps": STEPS,
    "train.eval_every": STEPS,
    "train.log_every": 1,
    "train.workers": 0,
    "train.checkpoints.save_every": 0,
    "train.eval_batch": 360,
}


def short(name: str, **changes: Any) -> Experiment:
    made = experiment_file.load(str(FOLDER / f"{name}.py"))()
    return config.override(made, {**SMALL[name], **SHORT, **changes})


def batches_of(trained: Trained) -> Iterable[Any]:
    """Return the batches that a training has seen, in its order."""
    job = trained.job
    return job.train_loader.train_batches(job.batch_order, 0, 0, job.total_steps)


# Each of these is a tutorial's own loop. An optimizer is fused where RankZero fuses it.
Loop = Callable[[Any, Any, Iterable[Any]], None]


def mnist_convnet(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    for images, labels in batches:
        optimizer.zero_grad()
        output = functional.log_softmax(model((images - 0.305) / 0.346), dim=1)
        functional.nll_loss(output, labels).backward()
        optimizer.step()


def vae(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    optimizer = optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for images, _ in batches:
        optimizer.zero_grad()
        recon, mu, logvar = model(images)
        pixels = images.view(-1, 784)
        bce = functional.binary_cross_entropy_with_logits(recon, pixels, reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        (bce + kld).backward()
        optimizer.step()


def siamese(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCEWithLogitsLoss()
    for first, second, targets in batches:
        optimizer.zero_grad()
        criterion(model(first, second), targets).backward()
        optimizer.step()


def word_lstm(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    hidden = None
    for text, _, _ in batches:
        model.zero_grad()
        if hidden is not None:
            hidden = tuple(one.detach() for one in hidden)
        output, hidden = model.rnn(model.drop(model.encoder(text[:, :-1])), hidden)
        output = functional.log_softmax(model.decoder(model.drop(output)), dim=-1)
        functional.nll_loss(output.flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-20.0)


def graph_network(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    graph = experiment.helpers()["graph"]
    optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4, fused=True)
    for nodes, _ in batches:
        optimizer.zero_grad()
        output = functional.log_softmax(model(graph.features, graph.adjacency), dim=1)
        functional.nll_loss(output[nodes], graph.labels[nodes]).backward()
        optimizer.step()


def lightning_gan(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    generator, discriminator = model["generator"], model["discriminator"]
    loss = functional.binary_cross_entropy_with_logits
    opt_g, opt_d = (
        optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
        for part in (generator, discriminator)
    )
    for images, z in batches:
        valid, fake = torch.ones(len(z), 1), torch.zeros(len(z), 1)
        g_loss = loss(discriminator(generator(z)), valid)
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        real_loss = loss(discriminator(images), valid)
        fake_loss = loss(discriminator(generator(z).detach()), fake)
        opt_d.zero_grad()
        ((real_loss + fake_loss) / 2).backward()
        opt_d.step()


def translation(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    encoder, decoder = model.encoder, model.decoder
    optimizers = [
        optim.Adam(part.parameters(), lr=0.001, fused=True) for part in (encoder, decoder)
    ]
    for text, answer in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs, state = encoder(text)
        output = functional.log_softmax(decoder(outputs, state, answer), dim=-1)
        functional.nll_loss(output.view(-1, output.size(-1)), answer.view(-1)).backward()
        for optimizer in optimizers:
            optimizer.step()


def glue_pairs(experiment: Any, model: Any, batches: Iterable[Any]) -> None:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "bias" not in n and "norm" not in n]},
        {"params": [p for n, p in named if "bias" in n or "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = optim.AdamW(groups, lr=1e-3, weight_decay=0.01, fused=True)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    for batch in batches:
        logits = model(batch["tokens"], batch["sentences"])
        nn.CrossEntropyLoss()(logits, batch["labels"]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        glue_pairs,
        graph_network,
        lightning_gan,
        mnist_convnet,
        siamese,
        translation,
        vae,
        word_lstm,
    )
}


@pytest.mark.parametrize("name", SMALL)
def test_a_tutorial_trains_as_its_own_loop_does(name: str, train: Trainer) -> None:
    experiment = short(name)
    trained = train(experiment)
    (evaluated,) = [e.metrics for e in trained.events if type(e).__name__ == "Evaluated"]
    assert math.isfinite(evaluated[experiment.goal.metric])
    if name not in LOOPS:
        return
    rng.seed_all(experiment.train.seed)
    model = experiment.model()
    rng.seed_all(experiment.train.seed, 1)  # the seed of rank 0's dropout
    LOOPS[name](experiment, model, batches_of(trained))
    for mine, found in zip(model.parameters(), weights(trained), strict=True):
        torch.testing.assert_close(found, mine, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["mnist_convnet", "siamese"])
def test_schedule_decays_after_each_epoch(name: str) -> None:
    experiment = short(name)
    steps_per_epoch = 1437 // 8
    job, _ = build(experiment, World(Ranks(), torch.device("cpu")))
    factors = [
        experiment.schedule(step, job.total_steps, job.progress(step, training=True))
        for step in (0, 178, 179, 2 * steps_per_epoch)
    ]
    assert factors == [1.0, 1.0, 0.7, pytest.approx(0.49)]


@pytest.mark.parametrize("name", ["vae", "lightning_gan", "sine_waves"])
def test_pictures_of_a_tutorial(name: str) -> None:
    experiment = short(name, **({"future": 3} if name == "sine_waves" else {}))
    _, val = experiment.data()
    with torch.no_grad():
        shown = experiment.pictures(
            experiment.model().eval(), experiment.collate([val[i] for i in range(3)])
        )
    assert shown


def test_language_model_resumes_within_an_epoch(train: Trainer, tmp_path: Path) -> None:
    experiment = short("word_lstm", **{"train.checkpoints.save_every": None})
    straight = train(experiment, tmp_path / "straight")
    assert train(experiment, tmp_path / "again", stop_at=1).state.step < STEPS
    resumed = train(experiment, tmp_path / "again")
    pairs = zip(weights(straight), weights(resumed), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_two_processes_train_like_one(train: Trainer, tmp_path: Path) -> None:
    names = ("graph_network", "word_lstm")
    cases = [
        Case(name, {**SMALL[name], **SHORT, "dropout": 0.0}, file=FOLDER / f"{name}.py")
        for name in names
    ]
    folder = launched(tmp_path, 2, cases)
    for name in names:
        losses = train(short(name, dropout=0.0), tmp_path / f"{name}-one").series("train/loss")
        assert seen(folder, name)["losses"] == pytest.approx(
            {str(step): loss for step, loss in losses.items()}, rel=1e-5
        )
