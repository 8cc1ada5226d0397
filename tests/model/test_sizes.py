"""trace: sizes that do not follow the batch are numbers, and decide branches and loops."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.model.tracing import trace
from tests.support.traced_models import run_traced, split_in

SIDE = 8


class Asks(nn.Module):
    """A part with a batch norm, which runs on every device unless the trace sees through the part."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.conv, self.how = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, self.norm(x))


def is_live(forward: Callable[[nn.Module, Tensor], Tensor], side: int = SIDE) -> bool:
    """Whether the net's own forward runs in every step; else the trace computes what the net does."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Asks(forward), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    traced = trace(net, torch.zeros(2, 3, side, side, dtype=torch.float64))
    for batch in (2, 7) if traced.live is None else ():
        x = torch.randn(batch, 3, side, side, dtype=torch.float64)
        assert torch.equal(run_traced(copy.deepcopy(net), traced, [x]), copy.deepcopy(net)(x))
    return traced.live is not None


def windows(part: nn.Module, x: Tensor) -> Tensor:
    """As in TinyViT: larger images are cut into windows of four pixels, which become rows of the batch."""
    b, c, h, w = x.shape
    if h == 4 and w == 4:
        return part.conv(x)
    bottom, right = (4 - h % 4) % 4, (4 - w % 4) % 4
    if bottom > 0 or right > 0:
        x = F.pad(x, (0, right, 0, bottom))
    down, across = (h + bottom) // 4, (w + right) // 4
    x = x.view(b, c, down, 4, across, 4).permute(0, 2, 4, 1, 3, 5).reshape(b * down * across, c, 4, 4)
    x = part.conv(x).view(b, down, across, c, 4, 4).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(b, c, h + bottom, w + right)[:, :, :h, :w].contiguous()


def in_bands(part: nn.Module, x: Tensor) -> Tensor:
    rows = [part.conv(x[:, :, i : i + 2]) for i in range(0, x.size(-2), 2)]
    return torch.cat(rows, 2) * (len(x.chunk(3, 1)) == 3) * sum(each.ndim + each.dim() for each in x.chunk(3, dim=1))


@pytest.mark.parametrize(
    "forward",
    [
        windows,
        in_bands,
        lambda part, x: part.conv(x) if x.shape[2] % 2 == 0 and x.shape[1:].count(SIDE) == 2 else x,
        lambda part, x: part.conv(x) if x.dtype.is_floating_point and x.dim() == 4 else x,
        lambda part, x: part.conv(x) if part.conv.weight.shape[0] == 3 and x.device.type != "meta" else x,
        lambda part, x: part.conv(x).view(x.size(0), x.shape[1:].numel()).view(x.shape),
    ],
    ids=["windows", "bands", "shape", "dtype", "device", "numel"],
)  # fmt: skip
def test_sizes_decide(forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert not is_live(forward)
    assert not is_live(forward, side=7 if forward is windows else SIDE)


@pytest.mark.parametrize(
    "forward",
    [
        lambda part, x: part.conv(x) if x.shape[0] > 3 else x,
        lambda part, x: part.conv(x) if x.shape[0] // 4 == 0 else x,
        lambda part, x: x[: x.shape[0] // 4 + 1].sum() * 0 + (part.conv(x) if x[: x.shape[0] // 4].shape[0] else x),
        lambda part, x: part.conv(x) if bool(x.sum() > 0) else x,
        lambda part, x: part.conv(x) if not x.is_cuda else x,
        lambda part, x: torch.cat([part.conv(row[None]) for row in x]),
    ],
    ids=["batch", "quarter", "rows", "numbers", "kind of device", "samples"],
)  # fmt: skip
def test_a_branch_on_batch_numbers_or_device_runs_in_every_step(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    assert is_live(forward)


def test_one_module_that_is_called_with_two_sizes() -> None:
    """The second size branches on numbers, the first does not."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Asks(lambda part, x: part.conv(x) if x.shape[-1] > 4 or bool(x.sum() > 0) else x)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x).mean((2, 3)) + self.part(x[:, :, :4, :4]).mean((2, 3))

    assert split_in(Twice()) == ["part.conv"]


class Precise(nn.Module):
    """Switches autocast off around a product that is too large for fewer bits."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.conv, self.fc, self.kind = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(2)
        with torch.autocast(device_type=self.kind or y.device.type, enabled=False):
            y = y.float() @ y.float().transpose(-1, -2)
        return self.fc(y.mean(1))


@pytest.mark.parametrize("kind", [None, "cpu"])
def test_a_forward_that_switches_autocast_off_is_called_live(kind: str | None) -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Precise(kind))
    assert split_in(net, (3, 4, 4)) == ["1.conv", "0"]
