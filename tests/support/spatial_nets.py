"""Random nets of convolutions, pooling and resizing in one to three dimensions, and random unequal cuts of their images."""

import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Batch, Filter, One, Spatial, Strategy
from convoy.runtime.module import Distributed
from tests.support.threads import run_on_threads

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVERAGE_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


class Joined(nn.Module):
    """The sum of a branch and its input, or both as channels."""

    def __init__(self, branch: nn.Module, adds: bool) -> None:
        super().__init__()
        self.branch, self.adds = branch, adds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(x)
        return x + y if self.adds else torch.cat((x, y), 1)


class PerPixel(nn.Module):
    """The second half of a ConvNeXt block: a layer norm and two Linears of each pixel's channels, or of tokens."""

    def __init__(self, channels: int, tokens: bool = False) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(channels), tokens
        self.wide, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2) if self.tokens else x.movedim(1, -1)
        y = (self.scale * self.narrow(nn.functional.gelu(self.wide(self.norm(y))))).movedim(-1, 1)
        return x + (y.unflatten(2, x.shape[2:]) if self.tokens else y)


class PixelGate(nn.Module):
    """Weights each pixel by the mean and the maximum over its channels, as in CBAM."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.softmax(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1), 1)[:, :1]


class Excitation(nn.Module):
    """Weights channels by their means over all pixels (squeeze and excitation), or by means over a few cells of the image."""

    def __init__(self, dims: int, channels: int, cells: int) -> None:
        super().__init__()
        self.pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dims](cells)
        self.mix = CONVOLUTIONS[dims](channels, channels, 1)
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        means = self.linear(x.mean([*range(2, x.dim())]))
        cells = nn.functional.interpolate(self.mix(self.pool(x)).sigmoid(), x.shape[2:])
        return x * cells * means.view(*means.shape, *[1] * (x.dim() - 2))


class Padded(nn.Module):
    """Pads or crops the ends of all axes of images."""

    def __init__(self, draw: random.Random, dims: int) -> None:
        super().__init__()
        self.mode = draw.choice(("constant", "constant", "reflect", "replicate", "circular"))
        self.ends = [draw.randint(-1 if self.mode == "constant" else 0, 2) for _ in range(2 * dims)]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, self.ends, self.mode)


class UNet(nn.Module):
    """A small U-Net without norms, in one to three dimensions. Sides of images are multiples of 4."""

    def __init__(self, dims: int, width: int) -> None:
        super().__init__()
        conv, up = CONVOLUTIONS[dims], TRANSPOSED[dims]

        def twice(a: int, b: int) -> nn.Module:
            return nn.Sequential(conv(a, b, 3, padding=1), nn.ReLU(), conv(b, b, 3, padding=1), nn.ReLU())

        self.first, self.second, self.third = twice(1, width), twice(width, 2 * width), twice(2 * width, 4 * width)
        self.pool = MAX_POOLS[dims](2)
        self.up2, self.up1 = up(4 * width, 2 * width, 2, 2), up(2 * width, width, 2, 2)
        self.join2, self.join1, self.head = twice(4 * width, 2 * width), twice(2 * width, width), conv(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(self.pool(first))
        y = self.join2(torch.cat((second, self.up2(self.third(self.pool(second)))), 1))
        result: Tensor = self.head(self.join1(torch.cat((first, self.up1(y)), 1)))
        return result


_KINDS = (
    "transposed", "max", "average", "resize", "norm", "relu", "join", "pixel", "means", "pad", "shuffle"
)  # fmt: skip


def random_layer(draw: random.Random, dims: int, channels: int) -> tuple[nn.Module, int]:
    """Return a layer for a number of channels, and the channels of its output."""
    outputs, kernel, stride = 2 * draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 2)
    kind = draw.choice(("conv", "conv", "conv", *_KINDS))
    if kind == "conv":
        dilation, groups = draw.randint(1, 2), draw.choice((1, 1, 2))
        mode = draw.choice(("zeros", "zeros", "reflect", "replicate", "circular"))
        padding: int | str = draw.choice(("same", 0)) if stride == 1 else draw.randint(0, 2)
        if mode != "zeros":
            padding = draw.randint(0, 1)
        made = CONVOLUTIONS[dims](channels, outputs, kernel, stride, padding, dilation, groups, padding_mode=mode)
        return made, outputs
    if kind == "transposed":
        extra = draw.randint(0, stride - 1)
        padding = draw.randint(0, (kernel - 1) // 2)
        return TRANSPOSED[dims](channels, outputs, kernel, stride, padding, extra, dilation=1), outputs
    ceil, padding = draw.random() < 0.5, draw.randint(0, kernel // 2)
    if kind == "max":
        return MAX_POOLS[dims](kernel, stride, padding, ceil_mode=ceil), channels
    if kind == "average":
        return AVERAGE_POOLS[dims](kernel, stride, padding, ceil, draw.random() < 0.5), channels
    if kind == "resize":
        corners = draw.random() < 0.5
        linear = nn.Upsample(scale_factor=draw.choice((2.0, 1.5)), mode=LINEAR[dims], align_corners=corners)
        return draw.choice((linear, nn.Upsample(scale_factor=draw.choice((2.0, 1.5, 0.6))))), channels
    if kind == "norm":
        return draw.choice((NORMS[dims](channels), NORMS[dims](channels), nn.GroupNorm(2, channels))), channels
    if kind in ("relu", "shuffle"):
        return nn.LeakyReLU() if kind == "relu" else nn.PReLU(channels), channels
    if kind == "pad":
        return Padded(draw, dims), channels
    if kind == "shuffle" and dims == 2:
        shuffle = (nn.Conv2d(channels, 2 * outputs, 1), nn.PixelShuffle(2), nn.PReLU(outputs // 2))
        back = draw.random() < 0.5
        return nn.Sequential(*shuffle, *[nn.PixelUnshuffle(2)] * back), 2 * outputs if back else outputs // 2
    if kind == "means":
        return Excitation(dims, channels, draw.randint(1, 5)), channels
    if kind == "pixel":
        return draw.choice((PerPixel(channels), PerPixel(channels, tokens=True), PixelGate())), channels
    adds = draw.random() < 0.5
    branch = nn.Sequential(CONVOLUTIONS[dims](channels, channels, 3, padding=1), NORMS[dims](channels), nn.SiLU())
    return Joined(branch, adds), channels if adds else 2 * channels


def random_net(draw: random.Random, dims: int) -> nn.Sequential:
    """Return a fully convolutional net, or a classifier."""
    layers: list[nn.Module] = [CONVOLUTIONS[dims](2, 4, 1)]
    channels = 4
    for _ in range(draw.randint(2, 6)):
        layer, channels = random_layer(draw, dims, channels)
        layers.append(layer)
        if channels > 16:
            layers.append(CONVOLUTIONS[dims](channels, 4, 1))
            channels = 4
    if draw.random() < 0.4:
        pool = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}[dims](1)
        layers += [pool, nn.Flatten(), nn.Linear(channels, 3)]
    return nn.Sequential(*layers)


def random_cuts(draw: random.Random, graph: Graph, batch: int, devices: int) -> Plan:
    """Return a plan with random shares, zero included, that splits most layers along their images, some otherwise."""
    plan = named_plan("data", graph, batch, Speeds((1.0,) * devices))
    layers: dict[str, Strategy] = {}
    axis = draw.randint(2, 4)

    def shares() -> tuple[int, ...]:
        found = [draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(devices)]
        found[draw.randrange(devices)] += 1
        return tuple(found)

    for name, layer in graph.layers.items():
        if not _has_images(layer) or draw.random() < (0.1 if layer.weighted else 0.7):
            continue
        own = axis if draw.random() < 0.8 else draw.randint(2, 4)
        axes, grid = (min(own, len(layer.shape)),), ()
        if devices == 4 and draw.random() < 0.5:
            others = [a for a in (0, *range(2, len(layer.shape) + 1)) if a not in axes]
            axes, grid = (draw.choice(others), *axes), (2, 2)
        layers[name] = Spatial(shares(), axes, grid)
        if layer.weighted and layer.groups == 1 and draw.random() < 0.15:
            first = draw.randint(0, layer.channels_out)
            layers[name] = Filter((first, layer.channels_out - first, *(0,) * (devices - 2)))
        elif draw.random() < 0.1:
            layers[name] = draw.choice((One(draw.randrange(devices)), Batch((batch, *(0,) * (devices - 1)))))
    return replace(plan, layers=layers)


def difference(net: nn.Module, plan: Plan, inputs: Sequence[Tensor]) -> float:
    """Return the largest difference of losses, outputs, input gradients and weights from plain PyTorch."""

    def train(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), []
        for x in inputs:
            x = x.clone().requires_grad_()
            loss = call(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [loss.detach(), x.grad]
        model.eval()
        with torch.no_grad():
            return [*found, call(inputs[0])]

    plain = copy.deepcopy(net)
    expected = [*train(plain, plain), *plain.state_dict().values()]

    def work(group: Group) -> float:
        here = Distributed(net, plan, group, inputs[0])
        found = [*train(here, lambda x: here(x, whole=True)), *here.full_state_dict().values()]
        return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel())

    return max(run_on_threads(plan.devices, work))


def _has_images(layer: Layer) -> bool:
    return bool(layer.windows) and len(layer.shape) > 1


def spatial(net: nn.Module, x: Tensor, devices: int, strategy: Spatial) -> Plan:
    """Return a plan that gives one strategy to all layers that read windows of images."""
    graph = trace(net, x).graph
    plan = named_plan("data", graph, len(x), Speeds((1.0,) * devices))
    return replace(plan, layers={name: strategy for name, layer in graph.layers.items() if _has_images(layer)})


def random_difference(seed: int) -> float:
    """Return the difference of a random net with random cuts."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        dims = draw.choice((1, 2, 2, 3))
        net = random_net(draw, dims).double()
        x = torch.randn(draw.randint(1, 3), 2, *(draw.randint(5, 11) for _ in range(dims)), dtype=torch.float64)
        try:
            copy.deepcopy(net)(x)
            break
        except (RuntimeError, ValueError, AssertionError):  # it shrinks its images to nothing
            continue
    plan = random_cuts(draw, trace(net, x).graph, len(x), draw.choice((2, 3, 4)))
    return difference(net, plan, [x, x])


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    wrong = [seed for seed in range(first, first + count) if not random_difference(seed) < 1e-10]
    print(f"{count - len(wrong)} of {count} random nets equal to one device; different: {wrong}")
