"""Defines the built-in networks: those measured in earlier works, and some for comparison."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from convoy.errors import InputError

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


def two_conv(image: ImageShape, classes: int, filters: Sequence[int], kernel: int = 5) -> nn.Module:
    """Build the network of Marques et al. 2018: two convolutional layers with the given numbers of filters.

    Kernel size (odd), 'same' padding and 2x2 pooling are assumptions: the abstracts do not give them.
    """
    first, second = filters
    channels, height, width = image
    return nn.Sequential(
        nn.Conv2d(channels, first, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), classes),
    )


def alexnet(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """Build AlexNet for small images, with `sizes[0]` features in its fully connected layers."""
    (features,) = sizes
    channels, height, width = image
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(256 * (height // 8) * (width // 8), features), nn.ReLU()),
        *(nn.Linear(features, features), nn.ReLU()),
        *(nn.Linear(features, features), nn.ReLU()),
        nn.Linear(features, classes),
    )


_VGG_CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions before each pooling: columns A, B, D and E of table 1 of Simonyan and Zisserman 2015."""


def vgg(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """Build the network of Simonyan and Zisserman 2015, without dropout.

    Convolutions use the initialisation of He et al. 2015: without batch norm, torch's weights are too small to train.
    """
    depth, features = sizes
    if depth not in _VGG_CONVOLUTIONS:
        raise InputError(f"a VGG has a depth of 11, 13, 16 or 19, not {depth}: give e.g. vgg:11:4096")
    channels, height, width = image
    layers: list[nn.Module] = []
    for filters, count in zip((64, 128, 256, 512, 512), _VGG_CONVOLUTIONS[depth], strict=True):
        for _ in range(count):
            layers += _conv_relu(channels, filters)
            channels = filters
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        *(nn.Linear(channels * (height // 32) * (width // 32), features), nn.ReLU()),
        *(nn.Linear(features, features), nn.ReLU()),
        nn.Linear(features, classes),
    )


class _BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x_NCHW)))
        out: Tensor = self.relu(self.bn2(self.conv2(y)) + self.shortcut(x_NCHW))
        return out


def _residual(image: ImageShape, classes: int, width: int, stages: int, blocks: int) -> nn.Module:
    """Build a 3x3 stem without pooling, then stages of basic blocks, each with twice the filters and half the side."""
    layers: list[nn.Module] = []
    channels = width
    for stage in range(stages):
        for block in range(blocks):
            out = width << stage
            layers.append(_BasicBlock(channels, out, 2 if stage and not block else 1))
            channels = out
    stem = [nn.Conv2d(image[0], width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """Build the residual network for small images of He et al. 2016, section 4.2: depth 6n+2, three widths."""
    depth, width = sizes
    if depth < 8 or (depth - 2) % 6:
        raise InputError(f"a small ResNet has a depth of 6n+2 (8, 14, 20, ...), not {depth}: give e.g. resnet:8:16")
    return _residual(image, classes, width, stages=3, blocks=(depth - 2) // 6)


def resnet18(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """Build ResNet-18 of He et al. 2016, table 1, for small images: a 3x3 stem without pooling."""
    (width,) = sizes
    return _residual(image, classes, width, stages=4, blocks=2)


def _conv_relu(channels_in: int, channels: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return [convolution, nn.ReLU()]


def _double(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(*_conv_relu(channels_in, channels), *_conv_relu(channels, channels))


class _UNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(UNET_LEVELS + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in pairwise([channels, *widths]))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[:-1])
        self.join = nn.ModuleList(_double(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        levels = [self.down[0](x_NCHW)]
        for down in self.down[1:]:
            levels.append(down(self.pool(levels[-1])))
        y = levels.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            y = join(torch.cat([levels.pop(), up(y)], dim=1))
        out: Tensor = self.head(y)
        return out


UNET_LEVELS = 4
"""Number of times a U-Net halves its images."""


def unet(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """Build the U-Net of Ronneberger et al. 2015, figure 1, without batch norm and dropout: a class for every pixel."""
    (width,) = sizes
    step = 1 << UNET_LEVELS
    if image[1] % step or image[2] % step:
        raise InputError(
            f"a U-Net halves its images {UNET_LEVELS} times, these are {image[1]}x{image[2]}: give sides that are multiples of "
            f"{step}"
        )
    return _UNet(image[0], classes, width)


_Build = Callable[[ImageShape, int, Sequence[int]], nn.Module]
NETS: Mapping[str, tuple[_Build, tuple[int, ...], str, int]] = {
    "two-conv": (two_conv, (50, 500), "two-conv:K1:K2, filters of the two convolutions", 4),
    "alexnet": (alexnet, (4096,), "alexnet:F, features of the fully connected layers", 8),
    "vgg": (vgg, (11, 4096), "vgg:DEPTH:F, depth 11, 13, 16 or 19 and features of the fully connected layers", 32),
    "resnet": (resnet, (8, 16), "resnet:DEPTH:WIDTH, depth 6n+2 and filters of the first stage", 4),
    "resnet18": (resnet18, (64,), "resnet18:WIDTH, filters of the first stage", 8),
    "unet": (unet, (64,), "unet:WIDTH, filters of the first level; a class for every pixel", 16),
}
"""Name -> builder, default sizes, meaning of the sizes, smallest image side."""

PER_PIXEL = ("unet",)
"""Nets that give a class for every pixel, not for the image."""


def build_builtin(text: str, image: ImageShape, classes: int) -> nn.Module:
    """Build a network of `NETS` from a text such as "two-conv:150:800".

    Raises:
        InputError: sizes are not positive whole numbers, images are too small, or the net does not fit into memory.
    """
    name, *numbers = text.split(":")
    build, defaults, meaning, least = NETS[name]
    try:
        sizes = tuple(int(n) for n in numbers) or defaults
    except ValueError:
        sizes = ()
    if len(sizes) != len(defaults) or any(n < 1 for n in sizes):
        raise InputError(f"net {text!r}: write it as {meaning}; whole numbers of 1 or more")
    if min(image[1:]) < least:
        raise InputError(f"net {text!r} needs images of {least}x{least} or more, these are {image[1]}x{image[2]}")
    try:
        return build(image, classes, sizes)
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"net {text!r} needs too much memory ({reason}): give smaller numbers") from error
