"""Training images anew in every epoch: a text like "crop:4,flip" becomes steps, and those are played on a batch.

| step                  | what it does                                                                                  |
|-----------------------|-----------------------------------------------------------------------------------------------|
| `crop[:PADDING]`      | moved by up to so many pixels, each way; default: an eighth of the shorter side               |
| `flip`                | left and right exchanged in every second image                                                |
| `resized-crop[:AREA]` | a part of at least this share of the area (0.08), sides 3:4 to 4:3, enlarged to the whole size |
| `jitter[:STRENGTH]`   | brightness, contrast and saturation times 1 - strength to 1 + strength (0.4)                   |
| `cutout[:SIDE]`       | a square of this side is blank; default: half the shorter side                                |
| `erase[:PROBABILITY]` | a rectangle of 2 to 33 % of the area is blank, in this share of the images (0.5)               |

Steps are played in the order in which they are written, on normalised images: blank, and what lies beyond the border, is 0,
the mean colour. What is drawn for an image depends on the seed, the epoch and its index in the data set and on nothing
else: not on the fleet, the plan, the batch or the worker that loads it. For this, every step works on each image of a batch
as if it were alone, bit for bit.

Letters: N images, C channels, H height, W width, K numbers drawn per image.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from convoy.data.augment_steps import STEPS, Step
from convoy.data.draws import uniforms
from convoy.errors import InputError, unknown_name


@dataclass(frozen=True)
class Augment:
    """Steps to be played on batches of images.

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
        """Images anew, of the same shape.

        Args:
            x_NCHW: normalised; it stays as it is.
            indices: of the images in their data set.

        Raises:
            InputError: what are no such images.
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
    """Steps by their names, for images that were normalised by this mean and deviation: "crop,flip", "crop:4,cutout:8".

    Raises:
        InputError: as `augment_steps` and `Augment`.
    """
    return Augment(augment_steps(text), mean, std)


def augment_steps(text: str) -> tuple[Step, ...]:
    """The steps of a text.

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
