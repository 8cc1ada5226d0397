"""Loops in which something changes from step to step: image sizes, trained parameters, modes of modules."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.loops import Make, Prepare, batches, conv, endless, update


def classifier(classes: int = 4) -> nn.Sequential:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(conv(3, 6), conv(6, 8, 2), pooled, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, classes))


def multi_scale(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = nn.Sequential(conv(3, 6), conv(6, 8, 2), nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1))
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 12, 12, labels=(12, 12)))
    for step, (x, y) in enumerate(endless(loader)):
        size = (12, 8, 16)[step % 3]
        x = F.interpolate(x, (size, size), mode="bilinear")
        y = F.interpolate(y[:, None].double(), (size, size)).long()[:, 0]
        loss = F.cross_entropy(net(x), y)
        yield update(steps, loss)


def crops_then_whole_images(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = classifier()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    whole = torch.randn(5, 3, 20, 14, generator=torch.Generator().manual_seed(3))
    for x, y in endless(loader):
        net.train()
        loss = F.cross_entropy(net(x), y)
        yield update(steps, loss)
        net.eval()
        with torch.no_grad():
            yield net(whole).square().sum()


def thawed_backbone(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = classifier()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    backbone = [p for name, p in net.named_parameters() if name.startswith(("0.", "1."))]
    for step, (x, y) in enumerate(endless(loader)):
        for p in backbone:
            p.requires_grad_(step >= 4)
        loss = F.cross_entropy(net(x), y)
        yield update(steps, loss)


def frozen_before_and_thawed(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = classifier()
    net[0].requires_grad_(False)
    net, steps, loader = prepare(net, optimizer(p for p in net.parameters() if p.requires_grad), batches(3, 8, 8))
    for step, (x, y) in enumerate(endless(loader)):
        if step == 4:
            first = [p for name, p in net.named_parameters() if name.startswith("0.")]
            for p in first:
                p.requires_grad_(True)
            steps.add_param_group({"params": first, "lr": 0.001})
        loss = F.cross_entropy(net(x), y)
        yield update(steps, loss)


def frozen_batch_norm(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = classifier()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for step, (x, y) in enumerate(endless(loader)):
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train(step < 5)
        loss = F.cross_entropy(net(x), y)
        yield update(steps, loss)


def gan_that_toggles_gradients(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    generator = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1)
    )
    critic = classifier(classes=1)
    generator, g_steps, loader = prepare(generator, optimizer(generator.parameters()), batches(3, 8, 8))
    critic, c_steps, _ = prepare(critic, optimizer(critic.parameters()), batches(3, 8, 8))
    for x, _ in endless(loader):
        fake = generator(x.roll(1, 0))
        critic.requires_grad_(True)
        c_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        update(c_steps, c_loss)
        critic.requires_grad_(False)
        g_loss = F.softplus(-critic(fake)).mean()
        update(g_steps, g_loss)
        yield c_loss + g_loss


LOOPS = [
    multi_scale,
    crops_then_whole_images,
    thawed_backbone,
    frozen_before_and_thawed,
    frozen_batch_norm,
    gan_that_toggles_gradients,
]
