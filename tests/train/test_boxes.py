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
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import convoy
from convoy.comm.group import Group
from convoy.data import open_image
from convoy.errors import InputError
from convoy.layout.layout import Windows, box, entries
from convoy.plan.plan import Plan
from convoy.plan.strategy import Spatial
from convoy.runtime.module import Distributed
from tests.parity.test_spatial import spatial
from tests.support.counting import Counting
from tests.support.nets import UNet
from tests.support.small_script import ALONE
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

SIZE, SAMPLES = 24, 4
TILES = Spatial((3, 1, 2))


with torch_seed(1):
    NET = UNet(2).double()


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


@pytest.mark.parametrize("outputs", ["everywhere", "where-computed"])
def test_net_trains_from_files_as_on_one_device_and_reads_its_boxes_only(folder: Path, outputs: str) -> None:
    plain = copy.deepcopy(NET)
    expected = train(plain, convoy.loader(Slides(folder, whole=True), 2), sgd(plain), F.cross_entropy)
    compared = 2 * SAMPLES * 8 * 8  # the corners that the devices compare at the start of each epoch, per channel

    def work(group: Group) -> tuple[list[float], dict[str, Tensor]]:
        slides, model = Slides(folder), copy.deepcopy(NET)
        part, optimizer, loader = convoy.prepare(
            model, sgd(model), slides, batch_size=2, plan=plan_of(outputs=outputs), group=group, speeds=(3.0, 1.0, 2.0)
        )
        losses = train(part, loader, optimizer, convoy.loss(nn.CrossEntropyLoss()))
        (layout,) = part.input_layouts(2)
        window, tile = (
            box(layout, group.device, (2, 3, SIZE, SIZE)),
            TILES.tiles((2, 1, SIZE, SIZE)).boxes[group.device],
        )
        assert isinstance(layout, Windows)
        assert window is not None
        assert tile is not None
        steps, every = 4, 2 * SIZE * SIZE
        assert (
            0 <= slides.images.bytes - steps * entries(window) <= 3 * compared < steps * (3 * every - entries(window))
        )
        labels = every if outputs == "everywhere" else entries(tile)
        assert 0 <= slides.masks.bytes - steps * labels <= compared
        return losses, part.full_state_dict()

    for losses, weights in run_on_threads(3, work):
        assert losses == pytest.approx(expected, abs=1e-10)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-10)


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

    with pytest.raises(InputError, match=r"a tensor of shape \(2, 3, 28, 24\), where images have the shape \(24, 24\)"):
        run_on_threads(3, work)


def test_dataloader_keeps_its_order_batches_and_workers(folder: Path) -> None:
    slides, model = Slides(folder), copy.deepcopy(NET)
    given = DataLoader(slides, 3, num_workers=1)
    _, _, loader, again = convoy.prepare(model, None, given, given, plan="data", group=ALONE)
    wanted = [*DataLoader(Slides(folder, whole=True), 3)]
    for found in (loader, again):
        for (x, y), (x_wanted, y_wanted) in zip(found, wanted, strict=True):
            assert torch.equal(x, x_wanted)
            assert torch.equal(y, y_wanted)


def test_dataloader_with_its_own_order_is_refused(folder: Path) -> None:
    slides = Slides(folder)
    loader = DataLoader(slides, 2, sampler=WeightedRandomSampler([1.0] * SAMPLES, 2))
    with pytest.raises(InputError, match="its own collate_fn or sampler, and images that are read by box"):
        convoy.prepare(copy.deepcopy(NET), None, loader, plan="data", group=ALONE)


def test_augment_of_images_that_are_read_by_box_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"use their crop\(\) and flip\(\)"):
        next(iter(convoy.loader(Slides(folder), 2, augment="flip")))


def test_dataset_that_returns_columns_is_still_adopted() -> None:
    class Columns(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
            return {"x": torch.zeros(len(indices), 3, SIZE, SIZE, dtype=torch.float64)}

    loader = DataLoader(Columns(), 2, collate_fn=lambda columns: columns["x"])
    _, _, loader = convoy.prepare(copy.deepcopy(NET), None, loader, plan="data", group=ALONE)
    assert [tuple(x.shape) for x in loader] == [(2, 3, SIZE, SIZE)] * 2
