"""Augmented images on fleets: a sample gets the same picture whichever device loads it, and when."""

import threading

import pytest
import torch
from torch import Tensor, nn

import convoy
from convoy.comm.group import Group
from convoy.data import Images
from convoy.data.augment import Augment, augment_steps
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.train.loader import Loader
from tests.support.model_zoo import make_importable
from tests.support.threads import run_on_threads

SHAPE, SAMPLES, BATCH, SEED = (3, 8, 8), 22, 6, 5
STEPS = "crop,flip,resized-crop,jitter,cutout,erase"

_TURN = threading.Lock()
"""Threads share torch's stream of random numbers, where processes have their own."""

Pictures = dict[tuple[int, int], Tensor]
"""By epoch and label; every sample has a label of its own."""


@pytest.fixture(scope="module")
def images() -> Images:
    x_NCHW = torch.randint(0, 256, (SAMPLES, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Images(x_NCHW, torch.arange(SAMPLES), SAMPLES, (0.5,) * 3, (0.3,) * 3)


@pytest.fixture(scope="module")
def augment(images: Images) -> Augment:
    make_importable()
    return Augment(augment_steps(STEPS), images.mean, images.std)


@pytest.fixture(scope="module")
def expected(images: Images, augment: Augment) -> Pictures:
    """Return two epochs on one device, sample by sample."""
    return {(epoch, i): augment(images.batch([i])[0], [i], SEED, epoch)[0] for epoch in (0, 1) for i in range(SAMPLES)}


def pictures(loader: Loader, epochs: int = 2) -> list[Pictures]:
    """Return the pictures of each epoch."""
    return [
        {(epoch, label): x for xs, y in loader for label, x in zip(y.tolist(), xs, strict=True)}
        for epoch in range(epochs)
    ]


def assert_same(found: Pictures, expected: Pictures) -> None:
    assert all(x.equal(expected[key]) for key, x in found.items())


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_differs_between_epochs(images: Images, expected: Pictures, workers: int) -> None:
    first, second = pictures(Loader(images, BATCH, seed=SEED, augment=STEPS, workers=workers))
    assert len(first) == len(second) == SAMPLES
    assert_same(first | second, expected)
    assert not any(first[0, i].equal(second[1, i]) for i in range(SAMPLES))


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize(
    ("name", "speeds", "workers"),
    [("data", (1, 1, 1, 1), 0), ("data-by-speed", (3, 0, 2, 1), 0), ("model", (1, 1, 1, 1), 0), ("data-by-speed", (2, 1), 2)],
)  # fmt: skip
def test_fleets_augment_as_one_device(
    name: str, speeds: tuple[float, ...], workers: int, images: Images, expected: Pictures
) -> None:
    plan = named_plan(name, trace(net(), torch.zeros(1, *SHAPE)).graph, BATCH, Speeds(speeds))

    def work(group: Group) -> list[tuple[Tensor, Tensor]]:
        part = convoy.distribute(net(), plan, group, torch.zeros(1, *SHAPE))
        loader = Loader(images, BATCH, part, seed=SEED, augment=STEPS, workers=workers if group.device else 0)
        part.group.agree = lambda _, text: (text,) * plan.devices  # type: ignore[method-assign]  # one after the other
        with _TURN:
            return [batch for _ in range(2) for batch in loader]

    devices = run_on_threads(plan.devices, work)
    for step, batches in enumerate(zip(*devices, strict=True)):
        epoch, labels = step // 4, batches[0][1].tolist()
        whole = torch.stack([expected[epoch, label] for label in labels])
        if name == "model":
            assert all(x.equal(whole) for x, _ in batches)
        else:
            assert torch.cat([x for x, _ in batches]).equal(whole)
