"""Train on whole images that fit in no device's memory: one per step, in tiles.

    python examples/large_images.py make --side 1024
    convoy run --devices 4 examples/large_images.py train --side 1024

The images are grey noise; every second one has a few bright cells. `train` without `convoy run` uses one device.
"""

import argparse
import resource
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import convoy
from convoy.data import BoxedImage, open_image

IMAGES = 4


def make(side: int) -> None:
    """Write the images to one file, strip by strip."""
    images = np.lib.format.open_memmap(f"slides-{side}.npy", "w+", np.uint8, (IMAGES, 3, side, side))
    random = np.random.default_rng(0)
    for index, image in enumerate(images):
        for top in range(0, side, 256):
            image[:, top : top + 256] = random.integers(96, 160, image[:, top : top + 256].shape, np.uint8)
        for y, x in random.integers(0, side - 8, (side * side // 40_000 * (index % 2), 2)):
            image[:, y : y + 8, x : x + 8] = 250


class Slides(Dataset[tuple[BoxedImage, int]]):
    def __init__(self, side: int) -> None:
        self.path = f"slides-{side}.npy"

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[BoxedImage, int]:
        return open_image(self.path, index).normalise((128.0,) * 3, (64.0,) * 3), index % 2


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = (block(3, 16), block(16, 16), block(16, 32), block(32, 32), block(32, 64), block(64, 64))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))


def train(side: int, steps: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = convoy.prepare(model, optimizer, Slides(side), batch_size=1, plan="spatial")
    step, start_s = 0, time.perf_counter()
    while step < steps:
        for image, label in loader:
            loss: Tensor = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            convoy.print(f"step {step}: loss {loss.item():.6f}, {time.perf_counter() - start_s:.1f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux gives kilobytes
    print(f"read tiles of {tuple(image.shape)}, peak memory {peak:.2f} GB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("make", "train"))
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if options.task == "make":
        make(options.side)
    else:
        train(options.side, options.steps)
