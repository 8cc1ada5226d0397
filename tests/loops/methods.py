"""Loops of well-known methods: several losses, several models, teachers, memory banks, and blocks that stay whole."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.support.loops import Make, Prepare, batches, conv, encoder, endless, update


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 6), conv(6, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.first(features), self.second(features)


def two_backwards(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = TwoHeads()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, y in endless(loader):
        kind, amount = net(x)
        steps.zero_grad()
        first = F.cross_entropy(kind, y)
        first.backward(retain_graph=True)
        second = F.mse_loss(amount[:, 0], y.double())
        second.backward()
        steps.step()
        yield first + second


def projected_gradients(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """PCGrad: remove from each task's gradient its part against the other task's."""
    net = TwoHeads()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    shared = [p for name, p in net.named_parameters() if name.startswith("body.")]
    for x, y in endless(loader):
        kind, amount = net(x)
        losses = F.cross_entropy(kind, y), F.mse_loss(amount[:, 0], y.double())
        of_task = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        steps.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in of_task)
        if (dot := a @ b) < 0:
            changed = a - dot / (b @ b) * b + b - dot / (a @ a) * a
            for p, part in zip(shared, changed.split([p.numel() for p in shared]), strict=True):
                p.grad = part.view_as(p).clone()
        steps.step()
        yield sum(losses)


class Blocks(nn.Module):
    """Two blocks, each under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU()), conv(6, 6)]
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.blocks[1](x).mean((2, 3)))


def activation_checkpointing(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = Blocks()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, y in endless(loader):
        loss = F.cross_entropy(net(x), y)
        yield update(steps, loss)


class Video(nn.Module):
    """Frames folded into the batch, the best of them by the largest answer, focal loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.head = nn.Sequential(conv(3, 6), conv(6, 8, 2)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.frames(x.flatten(0, 1)).mean((2, 3)).view(x.shape[0], x.shape[1], -1)
        best = features.max(1).values + features.topk(2, 1).values.mean(1)
        log = self.head(best).log_softmax(1).gather(1, y[:, None])[:, 0]
        return -((1 - log.exp()) ** 2) * log


def video_with_focal_loss(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = Video()
    net, steps, loader = prepare(
        net, optimizer(net.parameters()), batches(3, 3, 8, 8), call=lambda net, batch: net(*batch)
    )
    for x, y in endless(loader):
        loss = net(x, y).mean()
        yield update(steps, loss)


def average_with_buffers(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = encoder()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    for x, y in endless(loader):
        update(steps, F.cross_entropy(net(x), y))
        average.update_parameters(net)
        average.eval()
        with torch.no_grad():
            yield average(x).square().sum()


def distillation(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    teacher = encoder().requires_grad_(False).eval()
    net = encoder()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, y in endless(loader):
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        out = net(x)
        loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), wanted, reduction="batchmean")
        yield update(steps, loss)


def momentum_contrast(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """MoCo: keys of a momentum encoder and a queue of earlier keys, both held by the script."""
    net = encoder(6)
    slow = copy.deepcopy(net).requires_grad_(False)
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    slow, _, _ = prepare(slow, None, batches(3, 8, 8))
    queue = F.normalize(torch.randn(24, 6, generator=torch.Generator().manual_seed(4)))
    for x, _ in endless(loader):
        with torch.no_grad():
            for p, other in zip(net.parameters(), slow.parameters(), strict=True):
                other.mul_(0.9).add_(p, alpha=0.1)
            if hasattr(slow, "weights_changed"):
                slow.weights_changed()
            keys = F.normalize(slow(x.flip(3)))
        queries = F.normalize(net(x))
        scores = torch.cat(((queries * keys).sum(1, keepdim=True), queries @ queue.T), 1) / 0.2
        loss = F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))
        queue = torch.cat((keys, queue))[:24]
        yield update(steps, loss)


class Quantized(nn.Module):
    """VQ-VAE: the nearest entry of a codebook, with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = conv(3, 6, 2), nn.ConvTranspose2d(6, 3, 4, 2, 1)
        self.codes = nn.Embedding(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.down(x).permute(0, 2, 3, 1)
        far = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.weight.T + self.codes.weight.square().sum(1)
        q = self.codes(far.argmin(-1))
        return self.up((z + (q - z).detach()).permute(0, 3, 1, 2)), z, q


def vector_quantization(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = Quantized()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, _ in endless(loader):
        out, z, q = net(x)
        loss = F.mse_loss(out, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        yield update(steps, loss)


def multi_crop(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """DINO: a teacher sees two large crops, a student also two small ones; the answers are centred."""
    student = encoder(6)
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, steps, loader = prepare(student, optimizer(student.parameters()), batches(3, 12, 12))
    teacher, _, _ = prepare(teacher, None, batches(3, 12, 12))
    center = torch.zeros(6)
    for x, _ in endless(loader):
        large, small = [x, x.flip(3)], [x[:, :, :8, :8], x[:, :, 4:, 4:]]
        with torch.no_grad():
            wanted = [teacher(each) for each in large]
        loss: Any = 0.0
        for i, w in enumerate(wanted):
            for j, each in enumerate([*large, *small]):
                if i != j:
                    loss = loss - (((w - center) / 0.5).softmax(1) * student(each).log_softmax(1)).sum(1).mean()
        center = 0.9 * center + 0.1 * torch.cat(wanted).mean(0)
        yield update(steps, loss)


def paired_images(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """pix2pix: a discriminator of pairs, with an L1 term."""
    net = nn.Sequential(conv(3, 8), nn.Conv2d(8, 3, 3, padding=1), nn.Tanh())
    critic = nn.Sequential(nn.Conv2d(6, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, padding=1))
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    pair = torch.zeros(2, 6, 8, 8)
    critic, c_steps, _ = prepare(critic, optimizer(critic.parameters()), batches(6, 8, 8))
    assert pair.shape[1] == 6
    for x, _ in endless(loader):
        y = x.roll(1, 3)
        fake = net(x)
        critic.requires_grad_(True)
        c_loss = critic(torch.cat((x, fake.detach()), 1)).square().mean()
        c_loss = c_loss + (critic(torch.cat((x, y), 1)) - 1).square().mean()
        update(c_steps, c_loss)
        critic.requires_grad_(False)
        loss = (critic(torch.cat((x, fake), 1)) - 1).square().mean() + 10 * F.l1_loss(fake, y)
        update(steps, loss)
        yield c_loss + loss


def cycles(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    """CycleGAN: two generators, each after the other, and two discriminators."""
    names = ("there", "back")
    nets = {name: nn.Sequential(conv(3, 6), nn.Conv2d(6, 3, 3, padding=1)) for name in names}
    critics = {
        name: nn.Sequential(nn.Conv2d(3, 6, 4, 2, 1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1)) for name in names
    }
    made: dict[str, Any] = {}
    for kind, models in (("net", nets), ("critic", critics)):
        for name, model in models.items():
            *made[kind, name], loader = prepare(model, optimizer(model.parameters()), batches(3, 8, 8))
    for x, _ in endless(loader):
        y = x.flip(2)
        for name in names:
            made["critic", name][0].requires_grad_(False)
        fake_y, fake_x = made["net", "there"][0](x), made["net", "back"][0](y)
        loss = F.l1_loss(made["net", "back"][0](fake_y), x) + F.l1_loss(made["net", "there"][0](fake_x), y)
        loss = loss + (made["critic", "there"][0](fake_y) - 1).square().mean()
        loss = loss + (made["critic", "back"][0](fake_x) - 1).square().mean()
        for name in names:
            made["net", name][1].zero_grad()
        loss.backward()
        for name in names:
            made["net", name][1].step()
        for name, fake, real in (("there", fake_y, y), ("back", fake_x, x)):
            critic, steps = made["critic", name]
            critic.requires_grad_(True)
            update(steps, critic(fake.detach()).square().mean() + (critic(real) - 1).square().mean())
        yield loss


def triplets(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = encoder(6)
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, _ in endless(loader):
        loss = F.triplet_margin_loss(net(x), net(x.flip(3)), net(x.roll(1, 0)))
        yield update(steps, loss)


def accumulation_with_clipping(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = encoder()
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(steps, 5)
    for number, (x, y) in enumerate(endless(loader)):
        loss = F.cross_entropy(net(x), y) / 2
        loss.backward()
        if number % 2:
            if hasattr(net, "clip_grad_norm_"):
                net.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            steps.step()
            steps.zero_grad()
            plan.step()
        yield loss


def gradient_penalty(prepare: Prepare, optimizer: Make) -> Iterator[Any]:
    net = encoder(1)
    net, steps, loader = prepare(net, optimizer(net.parameters()), batches(3, 8, 8))
    for x, _ in endless(loader):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        loss = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        yield update(steps, loss)


LOOPS = [
    two_backwards,
    projected_gradients,
    activation_checkpointing,
    video_with_focal_loss,
    average_with_buffers,
    distillation,
    momentum_contrast,
    vector_quantization,
    multi_crop,
    paired_images,
    cycles,
    triplets,
    accumulation_with_clipping,
]
