"""Nets with one unusual call each: a non-batch value between calls, or Python that a trace loses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES = 5


class Backbone(nn.Sequential):
    """Two convolutions with batch norms, which must stay split whatever an unusual call elsewhere does."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__(
            *(nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
            *(nn.Conv2d(6, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()),
        )


class Odd(nn.Module):
    """A backbone, a function of its features and the module, and a classifier of the channel means."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], channels: int = 6) -> None:
        super().__init__()
        self.body, self.function = Backbone(), function
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6).view(6, 1, 1))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm, self.gru = nn.LSTM(6, 6, batch_first=True), nn.GRU(6, 6)
        self.fc = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
        y = self.function(self, self.body(x)) * scale
        y = y if mask is None else y * mask
        return self.fc(y.reshape(y.shape[0], y.shape[1], -1).mean(2))


def tokens(m: Any, x: Tensor) -> Tensor:
    """A class token before the positions, and attention over all of them."""
    rows = x.flatten(2).transpose(1, 2)
    rows = torch.cat([m.scale.view(1, 1, 6).expand(x.shape[0], -1, -1), rows], 1)
    return m.attention(rows, rows, rows, need_weights=False)[0][:, 0]


ODD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "stack": lambda _, x: torch.stack([x, x.relu()], 0).sum(0),
    "two views": lambda _, x: torch.cat([x, x.neg()], 0).sigmoid().chunk(2, 0)[1],
    "frames": lambda _, x: x.unflatten(1, (2, 3)).flatten(0, 1).relu().unflatten(0, (-1, 2)).flatten(1, 2),
    "lstm": lambda m, x: m.lstm(x.flatten(2).transpose(1, 2))[1][0][-1],
    "gru": lambda m, x: m.gru(x.flatten(2).permute(2, 0, 1))[0][-1],
    "tokens": tokens,
    "weights": lambda m, x: F.conv2d(x, m.scale.view(1, 6, 1, 1).expand(6, 6, 1, 1)),
}
"""Each sample for itself."""

WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "centred": lambda _, x: x - x.mean(0),
    "half": lambda _, x: x * (x.shape[0] // 2),
    "sorted": lambda _, x: x + x.flatten(1).sum(1).sort()[0].mean(),
}
"""Samples depend on each other."""


class Block(nn.Module):
    """A convolution with a batch norm."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6) if norm else nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Checkpointed(nn.Module):
    def __init__(self, norm: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.block, self.reentrant = Block(norm), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class BySize(nn.Module):
    """A branch on the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain if x.shape[0] > 3 else x + 1.0


class Alpha(nn.Module):
    """A module that reads a number users may change between steps."""

    def __init__(self, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha, self.options, self.act = alpha, {"beta": [1.0]}, lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x * self.alpha * self.options["beta"][0])


class Standardised(nn.Conv2d):
    """A convolution with standardised weights, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, correction=0)
        return F.conv2d(x, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias, padding=1)


class Kept(nn.Module):
    """A backbone, a module in the middle that must stay whole, and a classifier."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.body, self.middle, self.fc = Backbone(), middle, nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.middle(self.body(x)).mean((2, 3)))


@dataclass
class Answer:
    """A dataclass output, as transformers' models return."""

    logits: Tensor
    hidden: Tensor | None = None


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.fc, self.make = Backbone(), nn.Linear(6, CLASSES), make

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return self.make(self.fc(y.mean((2, 3))), y)
