"""How image files of all kinds become bytes: colours, depths, transparency, sizes, and what damage is called."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.data.picture import is_picture, pixels, read_file, survey, traits, traits_of_file
from convoy.errors import DataError, InputError
from tests.support.data_files import assert_says, plain_image

ORANGE = (250, 120, 10)


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_a_png_keeps_every_byte(tmp_path: Path) -> None:
    x_HWC = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    x_CHW = read_file(saved(Image.fromarray(x_HWC), tmp_path / "a.png"), 3, None)
    assert (x_CHW.shape, x_CHW.dtype) == ((3, 4, 6), torch.uint8)
    assert np.array_equal(x_CHW.permute(1, 2, 0).numpy(), x_HWC)
    assert x_CHW.is_contiguous()


def test_a_jpeg_is_read_as_colour(tmp_path: Path) -> None:
    x_CHW = read_file(saved(plain_image(ORANGE), tmp_path / "a.jpg", quality=95), 3, None)
    assert (x_CHW.float() - torch.tensor(ORANGE)[:, None, None]).abs().max() < 8


def test_grey_becomes_three_equal_channels_or_one(tmp_path: Path) -> None:
    path = saved(plain_image(77), tmp_path / "a.png")
    assert traits_of_file(path) == ("grey",)
    assert read_file(path, 3, None).unique().tolist() == [77]
    assert read_file(path, 1, None).shape == (1, 4, 6)


def test_of_sixteen_bits_the_upper_eight_are_kept(tmp_path: Path) -> None:
    """Pillow's own conversion cuts everything above 255 to white."""
    values = np.array([[0, 255, 256, 0x1234, 0x8000, 0xFFFF]], dtype=np.uint16)
    path = saved(Image.fromarray(values), tmp_path / "a.png")
    assert traits_of_file(path) == ("grey", "of 16 bits")
    assert read_file(path, 1, None).flatten().tolist() == [0, 0, 1, 0x12, 0x80, 0xFF]


def test_what_is_transparent_is_laid_on_white(tmp_path: Path) -> None:
    """The colour below is anything: many programs leave black there."""
    image = Image.new("RGBA", (3, 1))
    image.putdata([(10, 20, 30, 255), (10, 20, 30, 0), (0, 0, 0, 128)])
    path = saved(image, tmp_path / "a.png")
    assert traits_of_file(path) == ("partly transparent",)
    x_CHW = read_file(path, 3, None)
    assert x_CHW[:, 0, 0].tolist() == [10, 20, 30]
    assert x_CHW[:, 0, 1].tolist() == [255, 255, 255]
    assert x_CHW[:, 0, 2].tolist() == [127, 127, 127]
    grey = Image.new("LA", (2, 1))
    grey.putdata([(10, 255), (10, 0)])
    assert read_file(saved(grey, tmp_path / "b.png"), 1, None).flatten().tolist() == [10, 255]


def test_palettes_and_two_colours_become_colours(tmp_path: Path) -> None:
    path = saved(plain_image(ORANGE).convert("P", palette=Image.Palette.ADAPTIVE), tmp_path / "a.png")
    assert traits_of_file(path) == ()
    assert read_file(path, 3, None)[:, 0, 0].tolist() == list(ORANGE)
    bits = saved(Image.new("1", (2, 2), 1), tmp_path / "b.png")
    assert traits_of_file(bits) == ("grey",)
    assert read_file(bits, 3, None).unique().tolist() == [255]


def test_the_middle_is_kept_when_an_image_is_resized(tmp_path: Path) -> None:
    image = plain_image((0, 0, 255), width=40, height=10)
    image.paste(plain_image((255, 0, 0), width=10, height=10), (15, 0))  # the middle quarter is red
    for size in (10, 5):
        x_CHW = read_file(saved(image, tmp_path / "a.png"), 3, size)
        assert x_CHW.shape == (3, size, size)
        assert x_CHW[:, :, size // 2].unique(dim=1).flatten().tolist() == [255, 0, 0]
        assert x_CHW[2, :, 1:-1].max() == 0, "nothing of the blue beside it, but where the border is smoothed"
        assert x_CHW[2].max() < 40
    tall = saved(image.transpose(Image.Transpose.ROTATE_90), tmp_path / "b.png")
    assert read_file(tall, 3, 10)[2].max() == 0


def test_a_large_jpeg_read_small_looks_as_if_read_whole(tmp_path: Path) -> None:
    """It is decoded at a part of its size, but never so small that it would be blurred."""
    blocks = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8).repeat(12, 0).repeat(12, 1)
    path = saved(Image.fromarray(blocks), tmp_path / "a.jpg", quality=95)
    for side in (40, 100, 400):
        whole = pixels(Image.open(path), "whole", 3, side)
        assert (read_file(path, 3, side).float() - whole).abs().mean() < 4


def test_a_photograph_is_turned_the_way_up_that_it_says(tmp_path: Path) -> None:
    image = plain_image((0, 0, 0), width=8, height=4)
    exif = image.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert read_file(saved(image, tmp_path / "a.jpg", exif=exif), 3, None).shape == (3, 8, 4)


@pytest.mark.parametrize("ending", ["jpg", "png"])
@pytest.mark.parametrize("kept", [0, 20, 300])
def test_a_file_that_is_cut_short_is_named(tmp_path: Path, ending: str, kept: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / f"a.{ending}")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError) as error:
        read_file(path, 3, None)
    assert_says(error, path, "cannot be read as an image", "replace it by a whole JPEG or PNG, or remove it")


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(b"<html>not found</html>")
    for read in (traits_of_file, lambda path: read_file(path, 3, None)):
        with pytest.raises(DataError) as error:
            read(path)
        assert_says(error, path, "cannot be read as an image")


def test_a_picture_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(plain_image(0), tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(DataError, match="exceeds limit"):
        read_file(path, 3, None)


def test_numbers_that_are_no_pixels_are_refused() -> None:
    with pytest.raises(DataError, match=r"mine\[3\] holds numbers of 32 bits \(mode F\): images have 8 or 16 bits"):
        pixels(Image.new("F", (2, 2)), "mine[3]", 3)


def test_a_colour_image_is_not_made_grey_in_silence() -> None:
    with pytest.raises(DataError, match=r"mine\[3\] is in colour \(mode RGB\), and all .* are grey: convert it"):
        pixels(plain_image(ORANGE), "mine[3]", 1)


def test_a_survey_tells_what_is_out_of_the_ordinary() -> None:
    clear, grey = traits(plain_image(ORANGE)), traits(plain_image(7))
    assert survey({"a": clear, "b": clear}) == (3, ())
    assert survey({"a": clear, "b": grey, "c": grey}) == (
        3,
        ("2 of 3 training images looked at are grey, first b: read as RGB of equal channels",),
    )
    assert survey({"a": grey}) == (1, ("1 of 1 training images looked at are grey, first a: read as one channel",))


def test_without_pillow_the_line_to_type_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(plain_image(0), tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"Pillow, which is not installed: run pip install 'convoy-train\[images\]'"):
        traits_of_file(path)


def test_what_a_picture_is() -> None:
    assert is_picture(plain_image(0))
    assert not is_picture(torch.zeros(1, 2, 2))
