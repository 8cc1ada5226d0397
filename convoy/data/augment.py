"""Augmentation: a text like "crop:4,flip" becomes steps, which change the training images anew in every epoch.

| step                  | what it does                                                                                  |
|-----------------------|-----------------------------------------------------------------------------------------------|
| `crop[:PADDING]`      | moved by up to so many pixels, each way; default: an eighth of the shorter side               |
| `flip`                | left and right exchanged in every second image                                                |
| `resized-crop[:AREA]` | a part of at least this share of the area (0.08), sides 3:4 to 4:3, enlarged to the whole size |
| `jitter[:STRENGTH]`   | brightness, contrast and saturation times 1 - strength to 1 + strength (0.4)                   |
| `cutout[:SIDE]`       | a square of this side is blank; default: half the shorter side                                |
| `erase[:PROBABILITY]` | a rectangle of 2 to 33 % of the area is blank, in this share of the images (0.5)               |

Steps are applied in the order in which they are written, to normalised images: blank pixels, and those beyond the border, are
0, the mean colour. What is drawn for an image depends on its index in the data set, the seed and the epoch only, not on the
fleet, the plan, the batch or the worker that loads it. For this, every step is exact per image: no sum or product runs over
the batch, and none depends on the number of threads.

Letters: N images, C channels, H height, W width, K numbers drawn per image.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from convoy.errors import InputError, shown, unknown_name

MOST_PIXELS = 65_536
"""Of a number of pixels."""

Uniforms = npt.NDArray[np.float64]
"""Numbers in [0, 1), shape `(N, K)`."""


class Step(Protocol):
    """Changes each image of a batch, by random numbers of its own.

    Attributes:
        draws: K, the numbers that it needs per image.
        colours: whether it takes images with black = 0 and white = 1; the others take normalised ones, 0 for blank.
    """

    draws: ClassVar[int]
    colours: ClassVar[bool] = False

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        """A new tensor of the same shape."""
        ...


@dataclass(frozen=True)
class Crop(Step):
    """Cuts a part of the image's size out of the image with a blank border (He et al. 2016)."""

    padding: int | None = None
    draws: ClassVar[int] = 2

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        height, width = x_NCHW.shape[2:]
        padding = self.padding or max(1, min(height, width) // 8)
        if padding > max(height, width):
            raise InputError(
                f"augmentation crop:{padding}: images of {height} x {width} pixels would be moved out of sight; give "
                f"crop:{max(height, width)} or less"
            )
        corners = (u_NK * (2 * padding + 1)).astype(np.int64).tolist()
        padded = F.pad(x_NCHW, (padding,) * 4)
        return torch.stack(
            [
                x_CHW[:, top : top + height, left : left + width]
                for x_CHW, (top, left) in zip(padded, corners, strict=True)
            ]
        )


@dataclass(frozen=True)
class Flip(Step):
    """Mirrors half of the images, left to right."""

    draws: ClassVar[int] = 1

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        return torch.where(_per_image(u_NK[:, 0] < 0.5), x_NCHW.flip(3), x_NCHW)


@dataclass(frozen=True)
class ResizedCrop(Step):
    """Enlarges a part of random area and shape bilinearly (Szegedy et al. 2015). A side longer than the image's is cut."""

    least_area: float = 0.08
    draws: ClassVar[int] = 4

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        height, width = x_NCHW.shape[2:]
        boxes = [self._box(row, height / width) for row in u_NK.tolist()]
        top, left, tall, wide = torch.tensor(boxes, dtype=torch.float64).T[:, :, None]
        # Centres of pixels, with -1 and 1 at the borders of the image, as grid_sample counts.
        y_NH = (top + tall * _centres(height)) * 2 - 1
        x_NW = (left + wide * _centres(width)) * 2 - 1
        shape = (len(x_NCHW), height, width)
        grid_NHW2 = torch.stack([x_NW[:, None, :].expand(shape), y_NH[:, :, None].expand(shape)], dim=-1)
        return F.grid_sample(x_NCHW, grid_NHW2.to(x_NCHW.dtype), padding_mode="border", align_corners=False)

    def _box(self, row: Sequence[float], tallness: float) -> tuple[float, float, float, float]:
        """Top, left, height and width, as parts of the image's height and width."""
        area, ratio = self.least_area + (1 - self.least_area) * row[0], (4 / 3) ** (2 * row[1] - 1)
        tall, wide = (min(1.0, math.sqrt(area * factor)) for factor in (1 / ratio / tallness, ratio * tallness))
        return (1 - tall) * row[2], (1 - wide) * row[3], tall, wide


@dataclass(frozen=True)
class Jitter(Step):
    """Multiplies brightness, then contrast, then saturation by a number around 1, and clamps to black and white."""

    strength: float = 0.4
    draws: ClassVar[int] = 3
    colours: ClassVar[bool] = True

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        brightness, contrast, saturation = (
            _per_image(factors).to(x_NCHW.dtype) for factors in (1 + self.strength * (2 * u_NK - 1)).T
        )
        x_NCHW = (x_NCHW * brightness).clamp_(0, 1)
        # Of each image by itself, and by NumPy: torch's sums depend on the number of threads.
        means = np.array([np.mean(grey.numpy(), dtype=np.float64) for grey in _grey(x_NCHW)])
        x_NCHW = _away_from(_per_image(means).to(x_NCHW.dtype), x_NCHW, contrast)
        return _away_from(_grey(x_NCHW), x_NCHW, saturation)


@dataclass(frozen=True)
class Cutout(Step):
    """Blanks a square centred on any pixel, clipped at the border (DeVries and Taylor 2017)."""

    side: int | None = None
    draws: ClassVar[int] = 2

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        height, width = x_NCHW.shape[2:]
        side = self.side or max(1, min(height, width) // 2)
        corners = [(int(row[0] * height) - side // 2, int(row[1] * width) - side // 2) for row in u_NK.tolist()]
        return _blanked(x_NCHW, [(top, left, side, side) for top, left in corners])


@dataclass(frozen=True)
class Erase(Step):
    """Blanks a rectangle inside some of the images, of shapes from 1:3.3 to 3.3:1 (Zhong et al. 2017)."""

    probability: float = 0.5
    draws: ClassVar[int] = 5

    def __call__(self, x_NCHW: torch.Tensor, u_NK: Uniforms) -> torch.Tensor:
        height, width = x_NCHW.shape[2:]
        return _blanked(x_NCHW, [self._box(row, height, width) for row in u_NK.tolist()])

    def _box(self, row: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
        if row[0] >= self.probability:
            return 0, 0, 0, 0
        pixels, ratio = (0.02 + (1 / 3 - 0.02) * row[1]) * height * width, 3.3 ** (2 * row[2] - 1)
        tall, wide = min(height, round(math.sqrt(pixels / ratio))), min(width, round(math.sqrt(pixels * ratio)))
        return int(row[3] * (height - tall + 1)), int(row[4] * (width - wide + 1)), tall, wide


@dataclass(frozen=True)
class _Kind:
    """How a step is written: its name, and for some a number after a colon.

    Attributes:
        make: the step, from its number or without one.
        number: parses the number, int for pixels and float for shares; None: the step takes none.
        rule, example: which numbers fit.
    """

    make: Callable[..., Step]
    number: Callable[[str], float] | None = None
    rule: str = ""
    example: str = ""

    def read(self, name: str, text: str) -> Step:
        """The step with this number: 1 pixel or more, or a share above 0 and up to 1.

        Raises:
            InputError: a number that is none, out of range, or not taken.
        """
        if self.number is None:
            raise InputError(f"augmentation {name}:{text}: {name} takes no number; write {name}")
        try:
            number = self.number(text)
        except ValueError:
            number = math.nan
        if not (1 <= number <= MOST_PIXELS if self.number is int else 0 < number <= 1):
            raise InputError(f"augmentation {shown(f'{name}:{text}')}: give {self.rule}, e.g. {name}:{self.example}")
        return self.make(number)


STEPS: Mapping[str, _Kind] = {
    "crop": _Kind(Crop, int, "1 pixel of border or more, at most the image's side", "4"),
    "flip": _Kind(Flip),
    "resized-crop": _Kind(ResizedCrop, float, "the smallest share of the area, above 0 and up to 1", "0.25"),
    "jitter": _Kind(Jitter, float, "a strength above 0 and up to 1", "0.4"),
    "cutout": _Kind(Cutout, int, "a side of 1 pixel or more", "16"),
    "erase": _Kind(Erase, float, "a probability above 0 and up to 1", "0.5"),
}


def _per_image(values_N: npt.NDArray[np.generic]) -> torch.Tensor:
    """Reshape one number per image to `(N, 1, 1, 1)`."""
    return torch.from_numpy(np.ascontiguousarray(values_N)).reshape(-1, 1, 1, 1)


def _centres(pixels: int) -> torch.Tensor:
    """Centres of the pixels of a row, as fractions of its length."""
    return (torch.arange(pixels, dtype=torch.float64) + 0.5) / pixels


def _grey(x_NCHW: torch.Tensor) -> torch.Tensor:
    """Luma (ITU-R BT.601), shape `(N, 1, H, W)`."""
    channels = x_NCHW.shape[1]
    if channels == 1:
        return x_NCHW
    if channels != 3:
        raise InputError(f"augmentation jitter wants grey or red, green, blue: these images have {channels} channels")
    red, green, blue = x_NCHW[:, 0:1], x_NCHW[:, 1:2], x_NCHW[:, 2:3]
    return (red * 0.299).add_(green * 0.587).add_(blue * 0.114)


def _away_from(centre: torch.Tensor, x_NCHW: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Scale differences to the centre. One operation at a time: fused ones would round some pixels differently."""
    return (x_NCHW - centre).mul_(factor).add_(centre).clamp_(0, 1)


def _blanked(x_NCHW: torch.Tensor, boxes: Sequence[tuple[int, int, int, int]]) -> torch.Tensor:
    """Zero one box (top, left, height, width) of each image, clipped at the border."""
    y_NCHW = x_NCHW.clone()
    for y_CHW, (top, left, tall, wide) in zip(y_NCHW, boxes, strict=True):
        y_CHW[:, max(0, top) : max(0, top + tall), max(0, left) : max(0, left + wide)] = 0
    return y_NCHW


# ------------------------------------------------------------------------------------------------ several steps


def uniforms(seed: int, epoch: int, indices: Sequence[int], count: int) -> npt.NDArray[np.float64]:
    """Random numbers in [0, 1) for samples of a data set, shape `(len(indices), count)`.

    A row depends on the seed, the epoch and the sample's index and on nothing else. Counter-based: Philox-4x64-10 (Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed and the epoch as its key, the index in its counter.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    u_NK = np.empty((len(indices), count))
    for row, index in enumerate(indices):
        # The lowest word counts the blocks of one sample.
        counter = np.array([0, index, 0, 0], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(count)
        u_NK[row] = (words >> np.uint64(11)) * 2.0**-53
    return u_NK


@dataclass(frozen=True)
class Augment:
    """Applies steps to batches of images.

    Attributes:
        steps: in their order.
        mean, std: by which the images were normalised, per channel; only steps that change colours need them.

    Raises:
        InputError: a step that changes colours, and no mean.
    """

    steps: tuple[Step, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if any(step.colours for step in self.steps) and not self.mean:
            raise InputError(
                "augmentation jitter wants to know which numbers are black and white, and this data set gives numbers that are "
                "ready: let it give uint8, or change colours in its __getitem__"
            )

    def __call__(self, x_NCHW: torch.Tensor, indices: Sequence[int], seed: int, epoch: int) -> torch.Tensor:
        """Augment a batch; returns a tensor of the same shape.

        Args:
            x_NCHW: normalised; not changed.
            indices: of the images in their data set.

        Raises:
            InputError: not floating numbers of shape (N, C, H, W).
        """
        if x_NCHW.dim() != 4 or not x_NCHW.is_floating_point():
            raise InputError(
                f"augmentation wants floating numbers of shape (N, C, H, W), this data set gives {x_NCHW.dtype} of shape "
                f"{tuple(x_NCHW.shape)}: convoy.data.from_datasets makes them of uint8 and PIL images"
            )
        if not len(x_NCHW):
            return x_NCHW
        u_NK = uniforms(seed, epoch, indices, sum(step.draws for step in self.steps))
        used = 0
        for step in self.steps:
            own_NK = u_NK[:, used : used + step.draws]
            used += step.draws
            if step.colours:
                mean_C11, std_C11 = (
                    torch.tensor(v, dtype=x_NCHW.dtype).reshape(-1, 1, 1) for v in (self.mean, self.std)
                )
                x_NCHW = step(x_NCHW * std_C11 + mean_C11, own_NK).sub_(mean_C11).div_(std_C11)
            else:
                x_NCHW = step(x_NCHW, own_NK)
        return x_NCHW


def read_augment(text: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> Augment:
    """Read an augmentation such as "crop:4,flip", for images that were normalised by this mean and deviation.

    Raises:
        InputError: as `augment_steps` and `Augment`.
    """
    return Augment(augment_steps(text), mean, std)


def augment_steps(text: str) -> tuple[Step, ...]:
    """Parse the names and numbers of steps.

    Raises:
        InputError: an unknown name (the choices are listed), a number that does not fit, a step that comes twice.
    """
    parts = [item.strip().partition(":") for item in text.split(",")]
    steps = []
    for name, colon, number in parts:
        if name not in STEPS:
            raise unknown_name("augmentation", name, STEPS)
        steps.append(STEPS[name].read(name, number) if colon else STEPS[name].make())
    names = [name for name, _, _ in parts]
    if twice := [name for name in STEPS if names.count(name) > 1]:
        raise InputError(f"augmentation {text!r} has {', '.join(twice)} twice: name each step once")
    return tuple(steps)
