"""Training data of the benchmarks: images with one label each or one per pixel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from convoy.data import Images, load, open_image
from convoy.data.boxed import BoxedImage
from convoy.data.images import Labelled, normalise
from convoy.model.nets import ImageShape
from convoy.model.nets.builtin import PER_PIXEL
from convoy.plan.plan import OutputPlace

MEAN, STD = (0.5,) * 3, (0.29,) * 3


@dataclass(frozen=True, slots=True)
class Task:
    """The data that a net is trained on.

    Attributes:
        image: channels, height and width.
        per_pixel: whether a sample has a label for every pixel; its outputs then stay on the device of the sample.
        kept: so many images are in memory.
    """

    image: ImageShape = (3, 32, 32)
    classes: int = 10
    per_pixel: bool = False
    kept: int = 4096

    @property
    def outputs(self) -> OutputPlace:
        """Return where Convoy's plans leave the outputs."""
        return "where-computed" if self.per_pixel else "everywhere"

    def data(self, folder: Path | None) -> str:
        """Describe the images.

        Args:
            folder: of CIFAR-10, if there is one.
        """
        if self.per_pixel:
            return f"random images of {self.image[1]}x{self.image[2]} with {self.classes} classes of pixels"
        return "random images" if folder is None else "CIFAR-10"


PIXELS = Task((3, 256, 256), 21, per_pixel=True, kept=64)
"""As large as segmentation is often trained, with the classes of Pascal VOC."""


def task_of(net: str) -> Task:
    """Return the task of a net, by name."""
    return PIXELS if net.partition(":")[0] in PER_PIXEL else Task()


@dataclass(frozen=True, eq=False)
class PixelImages(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory with a label for every pixel.

    Attributes:
        x_NCHW: uint8.
        targets: the labels y_NHW, int64, each in `range(classes)`.
    """

    x_NCHW: Tensor
    targets: Tensor
    classes: int

    @property
    def image_shape(self) -> ImageShape:
        _, channels, height, width = self.x_NCHW.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return normalise(self.x_NCHW[index], MEAN, STD), self.targets[index]

    def batch(self, indices: Sequence[int] | Tensor) -> Labelled:
        """Return a batch at once: `(x_NCHW normalised, y_NHW int64)`."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return normalise(self.x_NCHW.index_select(0, chosen), MEAN, STD), self.targets.index_select(0, chosen)

    __getitems__ = batch

    def boxed(self) -> "BoxedPixels":
        """Return the same images, of which each device of a Convoy plan reads its part only."""
        return BoxedPixels(self)


@dataclass(frozen=True, eq=False)
class BoxedPixels(Dataset[tuple[BoxedImage, BoxedImage]]):
    images: PixelImages

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[BoxedImage, BoxedImage]:
        x, y = (open_image(each.numpy(), index) for each in (self.images.x_NCHW, self.images.targets))
        return x.normalise(*([255 * n for n in each] for each in (MEAN, STD))), y


Data = Images | PixelImages


def images_of(task: Task, folder: Path | None) -> Data:
    """Return training images of a task: the first of CIFAR-10, or random ones.

    Args:
        folder: of CIFAR-10; None: random images of that shape. Labels of pixels are always random.
    """
    if folder is not None and not task.per_pixel:
        kept = load("cifar10", folder).first(task.kept).train
        assert isinstance(kept, Images)
        return kept
    generator = torch.Generator().manual_seed(0)
    x_NCHW = torch.randint(0, 256, (task.kept, *task.image), dtype=torch.uint8, generator=generator)
    shape = (task.kept, *task.image[1:]) if task.per_pixel else (task.kept,)
    y = torch.randint(0, task.classes, shape, generator=generator)
    if task.per_pixel:
        return PixelImages(x_NCHW, y, task.classes)
    return Images(x_NCHW, y, task.classes, MEAN, STD)
