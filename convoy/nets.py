"""Networks by name, for the command line, the benchmarks and the tests of what was published."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from convoy.errors import InputError, unknown_name

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


def two_conv(image: ImageShape, classes: int, filters: Sequence[int]) -> nn.Module:
    """The network of Marques et al. 2018 as far as it is known: two convolutional layers of the given numbers of filters.

    5x5 kernels with 'same' padding, ReLU and 2x2 pooling after each, one fully connected layer: kernel size and pooling
    are our assumption, the works' abstracts do not give them.
    """
    first, second = filters
    channels, height, width = image
    return nn.Sequential(
        nn.Conv2d(channels, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), classes),
    )


def alexnet(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """AlexNet for small images: five convolutions, three fully connected layers of `sizes[0]` features, the classifier."""
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


def resnet(image: ImageShape, classes: int, sizes: Sequence[int]) -> nn.Module:
    """The residual network for small images of He et al. 2016, section 4.2: depth 6n+2, three widths."""
    depth, width = sizes
    if depth < 8 or (depth - 2) % 6:
        raise InputError(f"a small ResNet has a depth of 6n+2 (8, 14, 20, ...), not {depth}: give e.g. resnet:8:16")
    blocks: list[nn.Module] = []
    channels = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            out = width << stage
            blocks.append(_BasicBlock(channels, out, 2 if stage and not block else 1))
            channels = out
    stem = [nn.Conv2d(image[0], width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


_Build = Callable[[ImageShape, int, Sequence[int]], nn.Module]
NETS: Mapping[str, tuple[_Build, tuple[int, ...], str, int]] = {
    "two-conv": (two_conv, (50, 500), "two-conv:K1:K2, filters of the two convolutions", 4),
    "alexnet": (alexnet, (4096,), "alexnet:F, features of the fully connected layers", 8),
    "resnet": (resnet, (8, 16), "resnet:DEPTH:WIDTH, depth 6n+2 and filters of the first stage", 4),
}
"""Name -> builder, default sizes, what the sizes are, smallest image side."""


def build_net(text: str, image: ImageShape, classes: int, seed: int = 0) -> nn.Module:
    """A network from a text such as "two-conv:150:800", with weights drawn from `seed`.

    Raises:
        InputError: unknown name (the choices are listed), sizes that are not positive whole numbers, images too small,
            a net that does not fit into memory.
    """
    name, *numbers = text.split(":")
    if name not in NETS:
        raise unknown_name("net", name, [row[2].split(",")[0] for row in NETS.values()])
    build, defaults, meaning, least = NETS[name]
    try:
        sizes = tuple(int(n) for n in numbers) or defaults
    except ValueError:
        sizes = ()
    if len(sizes) != len(defaults) or any(n < 1 for n in sizes):
        raise InputError(f"net {text!r}: write it as {meaning}; whole numbers of 1 or more")
    if min(image[1:]) < least:
        raise InputError(f"net {text!r} needs images of {least}x{least} or more, these are {image[1]}x{image[2]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return build(image, classes, sizes)
        except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"net {text!r} needs more memory than there is ({reason}): give smaller numbers"
            ) from error
