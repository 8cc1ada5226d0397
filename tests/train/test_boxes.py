"""Images that are split into tiles: each device loads its box of every image, and trains as one device."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import convoy
from convoy.comm.group import Group
from convoy.data import open_image
from convoy.errors import InputError
from convoy.layout.layout import Windows, box, entries
from convoy.plan.plan import Plan
from convoy.plan.strategy import Spatial
from convoy.runtime.module import Distributed
from tests.parity.test_spatial import spatial
from tests.support.nets import UNet
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

SIZE, SAMPLES = 24, 4
TILES = Spatial((3, 1, 2))


with torch_seed(1):
    NET = UNet(2).double()


class Counting:
    """An array that counts the bytes that are read from it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype, self.bytes = values, values.shape, values.dtype, 0

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self.values[index]
        self.bytes += found.nbytes
        return found


class Slides(Dataset[Any]):
    """Images with label maps in two files. Each is another crop, and every second one is flipped."""

    def __init__(self, folder: Path, whole: bool = False) -> None:
        self.images, self.masks = (Counting(np.load(folder / f"{n}.npy", mmap_mode="r")) for n in ("images", "masks"))
        self.whole = whole

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = open_image(self.images, index).normalise((90.0, 100.0, 110.0), (50.0, 60.0, 70.0), torch.float64)
        pair = [each.crop((index, 3), (SIZE, SIZE)) for each in (image, open_image(self.masks, index).to(torch.int64))]
        pair = [each.flip(-1) if index % 2 else each for each in pair]
        return (pair[0].read(), pair[1].read()) if self.whole else (pair[0], pair[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", draw.integers(0, 255, (SAMPLES, 3, SIZE + 4, SIZE + 6), dtype=np.uint8))
    np.save(tmp_path / "masks.npy", draw.integers(0, 5, (SAMPLES, SIZE + 4, SIZE + 6), dtype=np.uint8))
    return tmp_path


def train(model: nn.Module, loader: Any, optimizer: Any, loss: Callable[[Any, Tensor], Tensor]) -> list[float]:
    losses = []
    for _ in range(2):
        for x, y in loader:
            value = loss(model(x), y)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
    return losses


def plan_of(strategy: Spatial = TILES, outputs: str = "everywhere") -> Plan:
    plan = spatial(NET, torch.zeros(2, 3, SIZE, SIZE, dtype=torch.float64), len(strategy.shares), strategy)
    return replace(plan, outputs=outputs)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def test_net_trains_from_files_as_on_one_device_and_reads_its_boxes_only(folder: Path) -> None:
    plain = copy.deepcopy(NET)
    expected = train(plain, convoy.loader(Slides(folder, whole=True), 2), sgd(plain), F.cross_entropy)
    read = [0] * 3

    def work(group: Group) -> tuple[list[float], dict[str, Tensor]]:
        slides, model = Slides(folder), copy.deepcopy(NET)
        part, optimizer, loader = convoy.prepare(
            model, sgd(model), slides, batch_size=2, plan=plan_of(), group=group, speeds=(3.0, 1.0, 2.0)
        )
        assert isinstance(part.input_layouts(2)[0], Windows)
        losses = train(part, loader, optimizer, F.cross_entropy)
        read[group.device] = slides.images.bytes
        here = box(part.input_layouts(2)[0], group.device, (2, 3, SIZE, SIZE))
        compared = 2 * SAMPLES * 3 * 8 * 8  # corners, at the start of each epoch at most
        assert here is not None
        assert 0 <= read[group.device] - 2 * 2 * entries(here) <= compared
        assert read[group.device] < 2 * SAMPLES * 3 * SIZE * SIZE
        return losses, part.full_state_dict()

    for losses, weights in run_on_threads(3, work):
        assert losses == pytest.approx(expected, abs=1e-10)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", [TILES, Spatial((3, 0, 1, 2)), Spatial((3, 1, 2, 2), (0, 2), (2, 2))])
def test_box_cut_by_hand_gets_the_gradient_of_the_box(strategy: Spatial) -> None:
    x = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    plain, whole = copy.deepcopy(NET), x.clone().requires_grad_()
    expected = plain(whole)
    expected.square().mean().backward()
    assert whole.grad is not None

    def work(group: Group) -> None:
        part = Distributed(NET, plan_of(strategy), group, x)
        here = box(part.input_layouts(2)[0], group.device, tuple(x.shape)) or ((0, 0),)
        spans = tuple(slice(*span) for span in here)
        own = x[spans].clone().requires_grad_()
        y = part(own, batch=2)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
        y.square().mean().backward()
        torch.testing.assert_close(own.grad, whole.grad[spans], rtol=0, atol=1e-10)

    run_on_threads(len(strategy.shares), work)


def test_layer_that_follows_its_input_gets_tiles_without_overlap() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)).double()
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    plan = spatial(model, x, 3, TILES)

    def work(group: Group) -> Tensor:
        part = Distributed(model, plan, group, x)
        layout = part.input_layouts(2)[0]
        assert layout == TILES.tiles(tuple(x.shape))
        return part(x, whole=True).detach()

    for y in run_on_threads(3, work):
        torch.testing.assert_close(y, copy.deepcopy(model)(x), rtol=0, atol=1e-10)


def test_whole_images_are_cut_by_the_loader() -> None:
    x, y = torch.randn(4, 3, SIZE, SIZE, dtype=torch.float64), torch.arange(4)

    def work(group: Group) -> None:
        part = Distributed(NET, plan_of(), group, x[:2])
        here = box(part.input_layouts(2)[0], group.device, (2, 3, SIZE, SIZE))
        assert here is not None
        rows = [(x_here, y_here) for x_here, y_here in convoy.loader([*zip(x, y, strict=True)], 2, part, shuffle=False)]
        for k, (x_here, y_here) in enumerate(rows):
            assert torch.equal(x_here, x[2 * k : 2 * k + 2][tuple(slice(*span) for span in here)])
            assert y_here.tolist() == [2 * k, 2 * k + 1]

    run_on_threads(3, work)


def test_image_of_another_size_than_the_example_is_refused() -> None:
    images = [(torch.zeros(3, SIZE + 4, SIZE, dtype=torch.float64), 0)] * 2

    def work(group: Group) -> None:
        part = Distributed(NET, plan_of(), group, torch.zeros(2, 3, SIZE, SIZE, dtype=torch.float64))
        for x, _ in convoy.loader(images, 2, part):
            part(x)

    with pytest.raises(InputError, match="got an input of shape"):
        run_on_threads(3, work)
