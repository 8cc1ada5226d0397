"""A small net around one layer of each kind: a splittable convolution before it and one after it."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from convoy import register_layer
from convoy.model.graph import Cut
from convoy.model.operation import PartExtent
from convoy.model.split_rules import Call, Known
from tests.support.nets import CLASSES

WIDTH = 8


class Around(nn.Module):
    """A net from images of 3x8x8: eight channels, the layer, one number per channel, and the classes."""

    shape = (3, 8, 8)

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layer = layer
        with torch.no_grad():
            channels = layer(torch.randn(2, WIDTH, 8, 8)).shape[1]
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(torch.tanh(self.stem(x))))
        return self.head(x.flatten(2).mean(2))


class Apply(nn.Module):
    """A function as a module, with the parameters of another module."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function, self.names = function, tuple(parameters)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(getattr(self, name) for name in self.names))


class Standardised(nn.Conv2d):
    """Weight standardisation (Qiao et al. 2019) in its usual form."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class RegisteredStandardised(nn.Conv2d):
    """Weight standardisation as timm writes it: the number of filters is part of the arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def _by_filters(call: Call) -> Known:
    filters = call.output[1]
    cut = Cut(1, filters, (None,), {"weight": 0, "bias": 0})
    scaled = {"out_channels": PartExtent(filters, 0, filters, "weight")}
    return Known("filters", (cut,), operation=replace(call.operation, attributes=scaled))


register_layer(RegisteredStandardised, _by_filters)


class Affine(nn.Module):
    """A layer without a Convoy rule that torch.fx cannot trace, since its Python reads numbers."""

    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, channels))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, channels))

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.detach().isfinite().all()):
            return x
        grouped = x.unflatten(1, (self.groups, -1))
        return (grouped / (1 + grouped.abs().mean(2, keepdim=True))).flatten(1, 2) * self.scale[
            :, None, None
        ] + self.shift[:, None, None]


register_layer(Affine, splits="channels", groups="groups", parameters={"scale": 0, "shift": 0})


class Attention(nn.Module):
    """Self-attention over positions, split by heads from the query projection to the output projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        x = x.flatten(2).transpose(1, 2)
        q, k, v = (
            project(x).view(n, h * w, self.heads, c // self.heads).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        return self.out(y).transpose(1, 2).reshape(n, c, h, w)


class TorchAttention(nn.Module):
    """Self-attention by torch's own module."""

    def __init__(self, width: int, heads: int, *, bias: bool = True, weights: bool = False) -> None:
        super().__init__()
        self.attend, self.weights = nn.MultiheadAttention(width, heads, bias=bias, batch_first=True), weights
        with torch.no_grad():
            for p in self.attend.parameters():  # torch's biases begin at 0
                p.add_(torch.linspace(-0.2, 0.2, p.numel()).view_as(p))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        out, weights = self.attend(y, y, y.tanh())
        out = out + weights.mean(2, keepdim=True) if self.weights else out
        return out.transpose(1, 2).unflatten(2, x.shape[2:])


class Block(nn.Module):
    """ConvNeXt's block, channels-last in the middle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class MatrixAttention(nn.Module):
    """Self-attention by matrix products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv2d(width, 3 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(x).view(n, 3, self.heads, c // self.heads, h * w)
        q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
        return (v @ (q.transpose(-2, -1) @ k).softmax(dim=-2)).reshape(n, c, h, w)


def _ones(*shape: int) -> Tensor:
    return torch.linspace(0.5, 1.5, int(torch.tensor(shape).prod())).reshape(shape)


def _conv(**options: object) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, 6, 3, **options)  # type: ignore[arg-type]


# Layers that stay split where the stem is: (net, filters of the stem on three devices)
KEPT: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "group norm": (lambda: nn.GroupNorm(4, WIDTH), (6, 0, 2)),
    "group norm without weights": (lambda: nn.GroupNorm(2, WIDTH, affine=False), (4, 0, 4)),
    "group norm as a function": (
        lambda: Apply(lambda x, w, b: F.group_norm(x, 4, w, b), w=_ones(WIDTH), b=_ones(WIDTH)), (2, 6, 0),
    ),
    "instance norm": (lambda: nn.InstanceNorm2d(WIDTH, affine=True), (5, 0, 3)),
    "instance norm that notes": (lambda: nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True), (5, 0, 3)),
    "layer norm over positions": (lambda: nn.LayerNorm((8, 8)), (1, 0, 7)),
    "prelu": (lambda: nn.PReLU(WIDTH), (5, 0, 3)),
    "prelu of one weight": (lambda: nn.PReLU(), (5, 0, 3)),
    "softmax over positions": (lambda: nn.Softmax(dim=-1), (5, 0, 3)),
    "log softmax over rows": (lambda: Apply(lambda x: x.log_softmax(2)), (5, 0, 3)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (4, 0, 4)),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), (5, 0, 3)),
    "unfold": (lambda: nn.Unfold(3), (5, 0, 3)),
    "pad": (lambda: Apply(lambda x: F.pad(x, (1, 2, 0, 1), mode="circular")), (5, 0, 3)),
    "padding layers": (lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.ConstantPad2d(1, 0.5)), (5, 0, 3)),
    "interpolate": (
        lambda: Apply(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)), (5, 0, 3),
    ),
    "pools": (lambda: nn.Sequential(nn.LPPool2d(2, 2), nn.AdaptiveMaxPool2d(3), nn.Upsample(scale_factor=2)), (5, 0, 3)),
    "grouped circular convolution": (lambda: nn.Conv2d(WIDTH, 4, 3, padding=1, groups=4, padding_mode="circular"), (6, 0, 2)),
    "grouped transposed convolution": (lambda: nn.ConvTranspose2d(WIDTH, 12, 3, 2, 1, 1, groups=4), (6, 0, 2)),
    "grouped convolution of computed weights": (lambda: Standardised(WIDTH, 12, 3, padding=1, groups=4), (2, 0, 6)),
    "registered channels": (lambda: Affine(WIDTH), (8, 0, 0)),
    "registered groups of channels": (lambda: Affine(WIDTH, 4), (2, 0, 6)),
    "some of the axes": (lambda: Apply(lambda x: x[:, :, ::2, 1:].flip(2).mean(3, keepdim=True)), (5, 0, 3)),
    "sums": (lambda: Apply(lambda x: (x - x.amax((2, 3), keepdim=True)) / x.std(dim=(2, 3), keepdim=True)), (5, 0, 3)),
    "stack": (lambda: Apply(lambda x: torch.stack((x, x.tanh()), 2).flatten(1, 2)), (5, 0, 3)),
    "where": (lambda: Apply(lambda x: torch.where(x > 0.1, x, x * x)), (5, 0, 3)),
}  # fmt: skip

# Layers with filters of their own: (net, the layer's name, its extent, whether it can sum over channels)
FILTERED: dict[str, tuple[Callable[[], nn.Module], str, int, bool]] = {
    "circular": (lambda: _conv(padding=1, padding_mode="circular"), "layer", 6, True),
    "reflect": (lambda: _conv(padding=(2, 1), padding_mode="reflect", stride=2), "layer", 6, True),
    "replicate": (lambda: _conv(padding="same", dilation=2, padding_mode="replicate"), "layer", 6, True),
    "same": (lambda: nn.Conv2d(WIDTH, 6, (2, 3), padding="same"), "layer", 6, True),
    "transposed": (lambda: nn.ConvTranspose2d(WIDTH, 6, 3, 2, 1, 1), "layer", 6, True),
    "transposed without bias": (lambda: nn.ConvTranspose2d(WIDTH, 5, (2, 3), dilation=2, bias=False), "layer", 5, True),
    "weight norm": (lambda: weight_norm(nn.Conv2d(WIDTH, 6, 3, padding=1)), "layer", 6, False),
    "spectral norm": (lambda: spectral_norm(nn.Conv2d(WIDTH, 6, 3)), "layer", 6, False),
    "orthogonal": (lambda: orthogonal(nn.Conv2d(WIDTH, 6, 1)), "layer", 6, False),
    "standardised": (lambda: Standardised(WIDTH, 6, 3, padding=1), "layer", 6, False),
    "registered": (lambda: RegisteredStandardised(WIDTH, 6, 3, padding=1), "layer", 6, False),
    "transposed function": (
        lambda: Apply(lambda x, w, b: F.conv_transpose2d(x, w.tanh(), b, stride=2), w=_ones(WIDTH, 6, 2, 2), b=_ones(6)),
        "layer", 6, False,
    ),
    "attention": (lambda: Attention(WIDTH, 4), "layer.q", 8, True),
    "matrix attention": (lambda: MatrixAttention(WIDTH, 2), "layer.qkv", 24, True),
    "block": (lambda: Block(WIDTH), "layer.up", 16, True),
}  # fmt: skip

# Layers that are computed by samples.
BY_SAMPLES: dict[str, Callable[[], nn.Module]] = {
    "layer norm over channels": lambda: nn.LayerNorm((WIDTH, 8, 8)),
    "softmax over channels": lambda: nn.Softmax(dim=1),
    "softmax 2d": lambda: nn.Softmax2d(),
    "local response norm": lambda: nn.LocalResponseNorm(3),
    "channel padding": lambda: Apply(lambda x: F.pad(x, (0, 0, 0, 0, 2, 2))),
    "reversed channels": lambda: Apply(lambda x: x.flip(1, 2)),
    "windows of channels": lambda: Apply(lambda x: x.unfold(1, 3, 2).mean(4)),
    "torch's attention": lambda: TorchAttention(WIDTH, 4),
    "weight norm over columns": lambda: weight_norm(nn.Conv2d(WIDTH, 6, 3), dim=1),
}


def build(name: str) -> nn.Module:
    row = KEPT.get(name) or FILTERED.get(name)
    make = row[0] if row is not None else BY_SAMPLES[name]
    return Around(make())
