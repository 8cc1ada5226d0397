"""Augmentation: what each step does, that it is drawn by seed, epoch and sample alone, and how steps are written."""

import numpy as np
import pytest
import torch
from torch import Tensor

from convoy.data.augment import (
    STEPS,
    Augment,
    Crop,
    Cutout,
    Erase,
    Flip,
    Jitter,
    ResizedCrop,
    augment_steps,
    read_augment,
    uniforms,
)
from convoy.errors import InputError
from tests.support.data_files import assert_says

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def noise(count: int = 9, height: int = 16, width: int = 12, channels: int = 3) -> Tensor:
    """Images in [0, 1]."""
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(2))


def drawn(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


# ---------------------------------------------------------------------------------------------------------- draws


def test_a_sample_draws_the_same_in_any_company() -> None:
    u_NK = uniforms(3, 5, [8, 1, 100_000], 7)
    assert u_NK.shape == (3, 7)
    assert uniforms(3, 5, [100_000], 7)[0].tolist() == u_NK[2].tolist()
    assert uniforms(3, 5, [8], 3)[0].tolist() == u_NK[0, :3].tolist(), "and more draws leave the first as they were"
    others = [uniforms(4, 5, [8], 7), uniforms(3, 6, [8], 7), uniforms(3, 5, [9], 7), uniforms(-3, 5, [8], 7)]
    assert len({u_NK[0, 0], *(other[0, 0] for other in others)}) == 5


def test_draws_are_those_of_philox() -> None:
    """The published vector for a counter and a key of zeros; and ours, written down once: a run that goes on sees the same."""
    words = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4).tolist()
    assert words == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert uniforms(3, 5, [8], 3).tolist() == [[0.9668294679540324, 0.045406676887069786, 0.305202204735203]]
    bits = np.random.Philox(key=(5 << 64) + 3, counter=8 << 64).random_raw(6)
    assert uniforms(3, 5, [8], 6)[0].tolist() == [(int(word) >> 11) * 2.0**-53 for word in bits]


def test_draws_are_evenly_spread() -> None:
    u_NK = uniforms(0, 0, range(4000), 5)
    assert 0 <= u_NK.min() < 0.001
    assert 0.999 < u_NK.max() < 1
    counts = np.histogram(u_NK, bins=10)[0]
    assert abs(counts - 2000).max() < 5 * 2000**0.5
    assert abs(np.corrcoef(u_NK.T) - np.eye(5)).max() < 5 / 4000**0.5


@pytest.mark.parametrize("text", [*STEPS, ",".join(STEPS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_image_is_changed_as_if_it_were_alone(text: str, dtype: torch.dtype) -> None:
    """Bit for bit, with any number of threads: on several devices a sample falls into other batches."""
    augment = read_augment(text, MEAN, STD)
    x_NCHW = noise(33, height=15, width=13).to(dtype) * 4 - 2
    before = x_NCHW.clone()
    indices = list(range(100, 133))
    together = augment(x_NCHW, indices, seed=1, epoch=2)
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
    assert not augment(x_NCHW, indices, seed=1, epoch=3).equal(together)
    assert not augment(x_NCHW, indices, seed=2, epoch=2).equal(together)


def test_no_images_are_no_trouble() -> None:
    assert read_augment("crop,flip")(noise()[:0], [], 0, 0).shape == (0, 3, 16, 12)


# ---------------------------------------------------------------------------------------------------------- steps


def test_a_crop_moves_the_image_by_up_to_its_padding() -> None:
    x_NCHW = noise(4, height=4, width=5)
    y_NCHW = Crop(2)(x_NCHW, drawn([0.4, 0.4], [0.0, 0.999], [0.999, 0.4], [0.2, 0.6]))
    assert y_NCHW[0].equal(x_NCHW[0])
    assert y_NCHW[1, :, 2:, :3].equal(x_NCHW[1, :, :2, 2:])
    assert y_NCHW[1, :, :2].abs().max() == y_NCHW[1, :, :, 3:].abs().max() == 0
    assert y_NCHW[2, :, :2].equal(x_NCHW[2, :, 2:])
    assert y_NCHW[3, :, 1:, :4].equal(x_NCHW[3, :, :3, 1:])


def test_the_padding_is_an_eighth_of_the_shorter_side() -> None:
    for side, padding in ((32, 4), (28, 3), (4, 1)):
        x_NCHW = noise(1, side, side + 5)
        assert Crop()(x_NCHW, drawn([0.0, 0.0])).equal(Crop(padding)(x_NCHW, drawn([0.0, 0.0])))


def test_every_second_image_is_flipped() -> None:
    x_NCHW = noise(2)
    y_NCHW = Flip()(x_NCHW, drawn([0.499], [0.5]))
    assert y_NCHW[0].equal(x_NCHW[0].flip(2))
    assert y_NCHW[1].equal(x_NCHW[1])


def test_a_crop_of_the_whole_area_is_the_image() -> None:
    x_NCHW = noise(1, 16, 16)
    torch.testing.assert_close(ResizedCrop(1.0)(x_NCHW, drawn([0.7, 0.5, 0.3, 0.9])), x_NCHW, rtol=0, atol=1e-5)


def test_a_resized_crop_shows_its_part_enlarged() -> None:
    """A quarter of the area of a ramp, from its middle: the ramp goes half as far and half as steep."""
    ramp = torch.linspace(0, 1, 16)
    x_NCHW = torch.stack([ramp.expand(16, 16), ramp[:, None].expand(16, 16)])[None]
    (y_CHW,) = ResizedCrop(0.25)(x_NCHW, drawn([0.0, 0.5, 0.5, 0.5]))
    step = 0.5 / 15
    expected = 0.5 + (torch.arange(16) - 7.5) * step
    torch.testing.assert_close(y_CHW, torch.stack([expected.expand(16, 16), expected[:, None].expand(16, 16)]))
    (top_left,) = ResizedCrop(0.25)(x_NCHW, drawn([0.0, 0.5, 0.0, 0.0]))
    torch.testing.assert_close(top_left[0, 0, 1:], expected[1:] - 4 / 15)


def test_resized_crops_have_the_area_and_shape_that_was_drawn() -> None:
    crop = ResizedCrop(0.08)
    for row in uniforms(1, 1, range(300), 4).tolist():
        top, left, tall, wide = crop._box(row, tallness=2.0)
        assert 0 <= top <= top + tall <= 1
        assert 0 <= left <= left + wide <= 1
        if tall < 1 and wide < 1:
            assert 0.08 <= tall * wide <= 1
            assert 0.749 <= wide / (2 * tall) <= 1.334


def test_jitter_by_hand() -> None:
    x_NCHW = torch.tensor([0.2, 0.4, 0.6]).reshape(1, 3, 1, 1).expand(1, 3, 1, 2).clone()
    bright = Jitter(0.5)(x_NCHW, drawn([1.0, 0.5, 0.5]))
    torch.testing.assert_close(bright[0, :, 0, 0], torch.tensor([0.3, 0.6, 0.9]))
    grey = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    contrast = Jitter(0.5)(x_NCHW, drawn([0.5, 1.0, 0.5]))
    torch.testing.assert_close(contrast[0, :, 0, 0], torch.tensor([grey + 1.5 * (v - grey) for v in (0.2, 0.4, 0.6)]))
    saturation = Jitter(1.0)(x_NCHW, drawn([0.5, 0.5, 0.0]))
    torch.testing.assert_close(saturation[0, :, 0, 0], torch.full((3,), grey))
    assert Jitter(1.0)(noise(), uniforms(0, 0, range(9), 3)).aminmax() == (0, 1), "cut at black and white"


def test_jitter_changes_grey_images_and_refuses_others_than_red_green_blue() -> None:
    assert Jitter()(noise(channels=1), uniforms(0, 0, range(9), 3)).shape == (9, 1, 16, 12)
    with pytest.raises(InputError, match="these images have 4 channels"):
        Jitter()(noise(channels=4), uniforms(0, 0, range(9), 3))


def test_colours_are_changed_between_black_and_white_whatever_the_normalisation() -> None:
    x_NCHW = noise()
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (MEAN, STD))
    augment = read_augment("jitter:0.4", MEAN, STD)
    y_NCHW = augment((x_NCHW - mean) / std, range(9), 0, 0) * std + mean
    torch.testing.assert_close(y_NCHW, Jitter(0.4)(x_NCHW, uniforms(0, 0, range(9), 3)), rtol=0, atol=1e-5)


def test_cutout_blanks_a_square_around_a_pixel() -> None:
    x_NCHW = noise(3, 8, 8) + 1
    y_NCHW = Cutout(4)(x_NCHW, drawn([0.5, 0.5], [0.0, 0.999], [0.5, 0.0]))
    expected = x_NCHW.clone()
    expected[0, :, 2:6, 2:6] = 0
    expected[1, :, :2, 5:] = 0
    expected[2, :, 2:6, :2] = 0
    assert y_NCHW.equal(expected)
    assert (Cutout()(x_NCHW, drawn(*[[0.5, 0.5]] * 3)) == 0).sum() == 3 * 3 * 16, "half the side"


def test_erasing_blanks_a_rectangle_inside_some_images() -> None:
    x_NCHW = noise(400, 20, 30) + 1
    y_NCHW = Erase(0.25)(x_NCHW, uniforms(0, 0, range(400), 5))
    erased = [y_CHW[0] == 0 for y_CHW in y_NCHW if (y_CHW == 0).any()]
    assert 70 < len(erased) < 130
    for blank_HW in erased:
        tall, wide = int(blank_HW.any(1).sum()), int(blank_HW.any(0).sum())
        assert int(blank_HW.sum()) == tall * wide, "one rectangle"
        assert 4 <= tall * wide <= 215


# -------------------------------------------------------------------------------------------------------- writing


def test_steps_are_read_in_the_order_they_are_written() -> None:
    assert augment_steps("crop:4, flip") == (Crop(4), Flip())
    assert augment_steps("flip,crop") == (Flip(), Crop())
    assert augment_steps("resized-crop:0.25,jitter:0.1,cutout:8,erase:0.3") == (
        ResizedCrop(0.25), Jitter(0.1), Cutout(8), Erase(0.3),
    )  # fmt: skip


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
def test_what_cannot_be_read_is_told(text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        augment_steps(text)
    assert_says(error, says)


def test_colours_need_black_and_white() -> None:
    with pytest.raises(InputError, match=r"jitter wants to know which numbers are black and white.*let it give uint8"):
        read_augment("flip,jitter")
    assert Augment(augment_steps("flip")).mean == ()


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, 16)])
def test_what_are_no_images_is_refused(x: Tensor) -> None:
    with pytest.raises(InputError, match=r"wants floating numbers of shape \(N, C, H, W\), this data set gives torch"):
        read_augment("flip")(x, [0, 1], 0, 0)
