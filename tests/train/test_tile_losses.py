"""Losses of outputs in tiles: value and gradient match one device, and no output is sent."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import box
from convoy.plan.lower import lower
from convoy.plan.strategy import Spatial
from convoy.runtime.batches import OutputPart
from convoy.runtime.module import Distributed
from convoy.train.loop import accuracy
from tests.parity.test_spatial import spatial
from tests.support.nets import UNet
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

SHAPE = (2, 5, 9, 7)
TILES = [Spatial((3, 0, 1, 2)), Spatial((3, 1, 2, 2), (2, 3), (2, 2)), Spatial((3, 1, 2, 2), (0, 2), (2, 2))]
WEIGHT = torch.tensor([0.1, 3.0, 1.0, 0.0, 7.0], dtype=torch.float64)

with torch_seed(3):
    LOGITS, TARGETS = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)
    CLASSES = torch.where(torch.rand(2, 9, 7) < 0.3, 255, torch.randint(0, 5, (2, 9, 7)))


def dice(x: Tensor, y: Tensor) -> Tensor:
    """Return 1 - Dice over the batch, written with loops over classes, without pixels of class 255."""
    p, found = x.softmax(1), []
    for number in range(x.shape[1]):
        mine, true = p[:, number][y != 255], (y[y != 255] == number).double()
        found.append((2 * (mine * true).sum() + 1) / (mine.sum() + true.sum() + 1))
    return 1 - torch.stack(found).mean()


CASES: dict[str, tuple[Any, Any, Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255, label_smoothing=0.1), None, CLASSES),
    "sum": (nn.CrossEntropyLoss(ignore_index=255, reduction="sum"), None, CLASSES),
    "probabilities": (nn.CrossEntropyLoss(), None, TARGETS.softmax(1)),
    "bce": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT[:, None, None]), None, TARGETS.sigmoid()),
    "mse, one target for all channels": (nn.MSELoss(), None, TARGETS[:, :1]),
    "kl, by samples": (nn.KLDivLoss(reduction="batchmean"), None, TARGETS.softmax(1)),
    "dice": (convoy.train.DiceLoss(ignore_index=255), dice, CLASSES),
}


def on_tiles(strategy: Spatial, criterion: Any, y: Tensor, *, whole: bool) -> list[tuple[float, Tensor, Any]]:
    """Return each device's loss, the gradient of its tile, and the tile."""
    layout = strategy.tiles(SHAPE)

    def work(group: Group) -> tuple[float, Tensor, Any]:
        spans = tuple(slice(*span) for span in box(layout, group.device, SHAPE) or ((0, 0),))
        own = LOGITS[spans].clone().requires_grad_()
        part = OutputPart(own, layout, SHAPE, group)
        loss = convoy.loss(criterion)(part, y if whole else part.rows_of(y).clone())
        (3.0 * loss).backward()
        assert own.grad is not None
        return loss.item(), own.grad, spans

    return run_on_threads(4, work, timeout_s=20)


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:reduction. .mean. divides")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("strategy", TILES, ids=["rows", "grid", "batch and rows"])
@pytest.mark.parametrize("name", CASES)
def test_loss_of_tiles_has_the_value_and_the_gradient_of_one_device(name: str, strategy: Spatial, whole: bool) -> None:
    criterion, plain, y = CASES[name]
    x = LOGITS.clone().requires_grad_()
    expected = (plain or criterion)(x, y)
    (3.0 * expected).backward()
    assert x.grad is not None
    for value, gradient, spans in on_tiles(strategy, criterion, y, whole=whole):
        assert value == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, x.grad[spans], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(convoy.loss(criterion)(LOGITS, y), expected.detach())


def test_many_pixels_are_counted_exactly() -> None:
    shape = (1, 1, (1 << 24) + 1, 1)

    def work(group: Group) -> float:
        ones = torch.ones((), dtype=torch.float64).expand(shape)
        part = OutputPart(ones, Spatial((1,)).tiles(shape), shape, group)
        return float(convoy.loss(nn.L1Loss())(part, torch.zeros_like(ones)))

    assert run_on_threads(1, work) == [pytest.approx(1.0, rel=1e-12)]


def test_dice_of_one_channel_counts_the_pixels_of_class_1() -> None:
    x, y = LOGITS[:, :1], CLASSES % 2
    p, t = x.sigmoid(), y[:, None].double()
    expected = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
    torch.testing.assert_close(convoy.train.DiceLoss()(x, y), expected)


@pytest.mark.parametrize(
    ("criterion", "y", "why"),
    [
        (nn.MultiLabelSoftMarginLoss(), TARGETS.sigmoid().round(), "needs whole samples"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(9, 7)), TARGETS.sigmoid(), "from pixel to pixel"),
        (convoy.train.DiceLoss(), TARGETS, r"targets of \(\d, 5, 9, 7\).*give a class number for each pixel"),
    ],
)
def test_criterion_that_needs_more_than_a_tile_is_refused(criterion: Any, y: Tensor, why: str) -> None:
    with pytest.raises(InputError, match=why):
        on_tiles(Spatial((9, 0, 0, 0)), criterion, y, whole=True)


def test_own_function_that_averages_over_pixels_is_refused() -> None:
    def work(group: Group) -> None:
        part = OutputPart(LOGITS, Spatial((1,)).tiles(SHAPE), SHAPE, group)
        convoy.loss(lambda x, y: (x - y).square().mean((1, 2, 3)), reduction="mean")(part, TARGETS)

    with pytest.raises(InputError, match=r"gives shape \(2,\) for 2 samples of \[9, 7\] pixels"):
        run_on_threads(1, work)


def test_unet_trains_on_tiles_without_sending_outputs() -> None:
    with torch_seed(1):
        net = UNet(2).double()
        x = torch.randn(2, 3, 24, 20, dtype=torch.float64)
        y = torch.randint(0, 5, (2, 24, 20))
    plan = replace(spatial(net, x, 4, Spatial((3, 0, 1, 2))), outputs="where-computed")

    def train(model: nn.Module, run: Any, criterion: Any) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
        for _ in range(3):
            loss = criterion(run(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain = copy.deepcopy(net)
    expected = train(plain, plain, lambda a, b: F.cross_entropy(a, b) + dice(a, b))

    def work(group: Group) -> None:
        model = Distributed(net, plan, group, x)
        entropy, overlap = convoy.loss(nn.CrossEntropyLoss()), convoy.loss(convoy.train.DiceLoss())
        losses = train(model, lambda x: model(x, whole=True), lambda a, b: entropy(a, b) + overlap(a, b))
        assert losses == pytest.approx(expected, abs=1e-10)
        for key, value in model.full_state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-10)
        torch.testing.assert_close(model.eval()(x, whole=True).whole(), plain.eval()(x), rtol=0, atol=1e-10)
        everywhere = lower(replace(plan, outputs="everywhere"), model.traced[True].graph)
        sent, before = (sum(steps.traffic().values()) for steps in (model.train().steps(2), everywhere))
        assert sent < before

    run_on_threads(4, work)


@pytest.mark.parametrize("whole", [True, False])
def test_label_map_of_another_size_is_refused(*, whole: bool) -> None:
    """It is as large as each tile of four equal devices, so it must not be taken for the labels of a tile."""
    layout = Spatial((1, 1, 1, 1)).tiles((2, 5, 8, 7))

    def work(group: Group) -> None:
        part = OutputPart(torch.zeros(2, 5, 2, 7), layout, (2, 5, 8, 7), group, whole=whole)
        loss = convoy.loss(nn.CrossEntropyLoss())
        loss(part, torch.zeros(2, 2 if whole else 3, 7, dtype=torch.int64))

    with pytest.raises(InputError, match=r"where images have the shape \(8, 7\)"):
        run_on_threads(4, work, timeout_s=20)


@pytest.mark.parametrize("strategy", TILES)
def test_accuracy_counts_the_pixels_of_all_tiles(strategy: Spatial) -> None:
    layout = strategy.tiles(SHAPE)

    def work(group: Group) -> float:
        class Net(nn.Module):
            def forward(self, _x: Tensor) -> OutputPart:
                spans = tuple(slice(*span) for span in box(layout, group.device, SHAPE) or ((0, 0),))
                return OutputPart(LOGITS[spans], layout, SHAPE, group)

        loader: Any = [(LOGITS, CLASSES), (LOGITS, CLASSES)]
        return accuracy(Net(), loader)

    assert run_on_threads(4, work, timeout_s=20) == [(LOGITS.argmax(1) == CLASSES).double().mean().item()] * 4
