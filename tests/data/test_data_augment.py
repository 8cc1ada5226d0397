"""Augmentation: the effect of each step, its dependence on seed, epoch and sample only, and its notation."""

import pytest
import torch
from torch import Tensor

from convoy.data.augment import STEPS, Augment, augment_steps
from convoy.errors import InputError
from tests.support.data_files import assert_says

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
MANY = 300


def noise(count: int = 9, height: int = 16, width: int = 12, channels: int = 3) -> Tensor:
    """Return images in [0, 1]."""
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(2))


def copies(x_CHW: Tensor, text: str, mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> Tensor:
    """Return many augmented copies of one image."""
    return Augment(augment_steps(text), mean, std)(x_CHW.expand(MANY, *x_CHW.shape), range(MANY), 0, 0)


@pytest.mark.parametrize("text", [*STEPS, ",".join(STEPS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_image_is_augmented_independently(text: str, dtype: torch.dtype) -> None:
    augment = Augment(augment_steps(text), MEAN, STD)
    x_NCHW = noise(33, height=15, width=13).to(dtype) * 4 - 2
    before = x_NCHW.clone()
    indices = list(range(100, 133))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    together = augment(x_NCHW, indices, seed=1, epoch=2)
    assert torch.rand(3).equal(expected), "the program's random numbers are left alone"
    assert x_NCHW.equal(before), "what was given stays as it is"
    assert (together.shape, together.dtype) == (x_NCHW.shape, dtype)
    assert sum(not a.equal(b) for a, b in zip(together, x_NCHW, strict=True)) >= 8, "it does change images"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for few in ([0], [32, 5], list(range(1, 30))):
            alone = augment(x_NCHW[few], [indices[i] for i in few], seed=1, epoch=2)
            assert alone.equal(together[few])
    finally:
        torch.set_num_threads(threads)
    assert augment(x_NCHW[:0], [], seed=1, epoch=2).shape == (0, 3, 15, 13)
    for other in ({"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 2}):
        assert not augment(x_NCHW, indices, **other).equal(together)
    assert (
        not augment(x_NCHW[:1], [7], seed=1, epoch=2).equal(augment(x_NCHW[:1], [8], seed=1, epoch=2)) or text == "flip"
    )


# ---------------------------------------------------------------------------------------------------------- steps


def test_crop_offsets_are_uniform_up_to_the_padding() -> None:
    (x_CHW,) = noise(1, height=6, width=5) + 1
    found = [0] * 25
    for y_CHW in copies(x_CHW, "crop:2"):
        for down in range(-2, 3):
            for right in range(-2, 3):
                moved = torch.zeros_like(x_CHW)
                moved[:, max(0, down) : 6 + down, max(0, right) : 5 + right] = x_CHW[
                    :, max(0, -down) : 6 - down, max(0, -right) : 5 - right
                ]
                found[(down + 2) * 5 + right + 2] += y_CHW.equal(moved)
    assert sum(found) == MANY
    assert min(found) > 0


def test_jitter_stays_within_the_colour_range_under_any_normalisation() -> None:
    x_CHW = torch.tensor([0.2, 0.4, 0.6]).reshape(3, 1, 1).expand(3, 4, 5)
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (MEAN, STD))
    y_NCHW = copies((x_CHW - mean) / std, "jitter:0.5", MEAN, STD) * std + mean
    plain = copies(x_CHW, "jitter:0.5", (0.0,) * 3, (1.0,) * 3)
    torch.testing.assert_close(y_NCHW, plain, rtol=0, atol=1e-5)
    bright = plain.mean((1, 2, 3))
    assert 0.15 < bright.min() < 0.25 < 0.5 < bright.max() < 0.65
    assert copies(noise(1)[0], "jitter:1", (0.0,) * 3, (1.0,) * 3).aminmax() == (0, 1), "cut at black and white"


def test_steps_that_do_not_fit_the_size_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of 16 x 12 pixels: augmentation crop:17 .*; give 16 or less"):
        copies(noise(1)[0], "crop:17")
    with pytest.raises(InputError, match="augmentation cutout:12 leaves nothing of them; give less than 12"):
        copies(noise(1)[0], "cutout:12")


# -------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("crop,flap", "unknown augmentation 'flap': choose one of crop, cutout, erase, flip, jitter, resized-crop"),
        ("", "unknown augmentation ''"),
        ("crop:0", "augmentation 'crop:0': give 1 pixel of border or more, at most the image's side, e.g. crop:4"),
        ("crop:4.5", "augmentation 'crop:4.5': give 1 pixel"),
        ("crop:", "augmentation 'crop:': give"),
        ("flip:0.5", "augmentation flip:0.5: flip takes no number; write flip"),
        ("jitter:2", "augmentation 'jitter:2': give a strength above 0 and up to 1, e.g. jitter:0.4"),
        ("erase:nan", "augmentation 'erase:nan': give a probability"),
        ("resized-crop:big", "augmentation 'resized-crop:big': give the smallest share of the area"),
        ("flip,crop,flip", "augmentation 'flip,crop,flip' has flip twice: name each step once"),
    ],
)
def test_unreadable_augmentation_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        augment_steps(text)
    assert_says(error, says)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, 16)])
def test_augmentation_refuses_non_images(x: Tensor) -> None:
    with pytest.raises(InputError, match=r"takes floating numbers \(N, C, H, W\), this data set gives torch"):
        Augment(augment_steps("flip"))(x, [0, 1], 0, 0)
