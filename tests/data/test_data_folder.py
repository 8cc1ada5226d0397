"""Image folders: layouts, held-out samples, decoding, and refusals."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.cli.train_parts import load_images
from convoy.config.run_file import resolve_settings
from convoy.data import Samples, load
from convoy.errors import DataError
from tests.support.data_files import assert_says, plain_image, write_images

CLASSES = ("ant", "bee", "cat")


def value_of(label: int, number: int) -> int:
    """Return the grey value of image `number` of a class, which encodes both."""
    return 50 * label + number


def write_class(root: Path, label: int, count: int) -> None:
    write_images(root, {f"{CLASSES[label]}/{n:02}.png": plain_image((value_of(label, n),) * 3) for n in range(count)})


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Write ten images of each of three classes, in one folder below a hidden one."""
    for label in range(3):
        write_class(tmp_path / ".here" / "pets", label, 10)
    return tmp_path / ".here" / "pets"


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Write separate training and validation images; the first class has no validation images."""
    for label, count in enumerate((4, 5, 6)):
        write_class(tmp_path / "apart" / "train", label, count)
    for label, count in ((1, 2), (2, 1)):
        write_class(tmp_path / "apart" / "val", label, count)
    return tmp_path / "apart"


def values(samples: Samples) -> list[tuple[int, int]]:
    """Return the stored grey and label of each image."""
    return [(int(samples.read(i)[0, 0, 0]), int(samples.targets[i])) for i in range(len(samples))]


def read_all(folder: Path) -> list[torch.Tensor]:
    both = load(str(folder))
    return [split.read(i) for split in (both.train, both.test) for i in range(len(split))]


# -------------------------------------------------------------------------------------------------------- layouts


def test_train_and_val_folders_are_used_unchanged(apart: Path) -> None:
    both = load(f"folder:{apart}")
    assert both.class_names == CLASSES
    assert (len(both.train), len(both.test), both.train.classes, both.train.image_shape) == (15, 3, 3, (3, 4, 6))
    expected = [(value_of(label, n), label) for label, count in enumerate((4, 5, 6)) for n in range(count)]
    assert sorted(values(both.train)) == expected
    assert sorted(values(both.test)) == [(50, 1), (51, 1), (100, 2)]
    assert both.notes[0] == "3 classes; 15 samples to train on, 3 to test on; test samples of their own"
    write_class(apart / "test", 0, 1)
    assert len(load(str(apart)).test) == 3, "val goes before test"
    shutil.rmtree(apart / "val")
    assert len(load(str(apart)).test) == 1


def test_single_folder_holds_out_a_fifth_of_each_class_by_file_name(pets: Path, tmp_path: Path) -> None:
    both = load(str(pets))
    assert torch.bincount(both.train.targets).tolist() == [8, 8, 8]
    assert torch.bincount(both.test.targets).tolist() == [2, 2, 2]
    assert sorted(values(both.train) + values(both.test)) == [(value_of(c, n), c) for c in range(3) for n in range(10)]
    half = load(str(pets), test_fraction=0.5)
    assert set(values(both.test)) < set(values(half.test)), "more are held out, but the same first"
    shutil.copytree(pets, tmp_path / "elsewhere")
    copy = load(str(tmp_path / "elsewhere"))
    assert (values(copy.train), values(copy.test)) == (values(both.train), values(both.test))
    assert copy.fingerprint == both.fingerprint
    assert len(set(both.first(8).train.targets.tolist())) == 3, "the first images are of all classes"


# ---------------------------------------------------------------------------------------------------------- files


def test_all_file_formats_decode_to_rgb(pets: Path) -> None:
    shutil.rmtree(pets / "cat")
    upright = Image.fromarray(np.arange(72, dtype=np.uint8).reshape(4, 6, 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(pets / "ant" / "turned.png", exif=exif)
    write_images(pets, {"ant/grey.png": plain_image(9), "bee/palette.png": plain_image((250, 120, 10)).quantize(4)})
    plain_image((200, 100, 50)).save(pets / "bee" / "photo.jpg", quality=95)
    x_NCHW = read_all(pets)
    assert any(x.equal(torch.from_numpy(np.array(upright)).permute(2, 0, 1)) for x in x_NCHW)
    for colour in ([9, 9, 9], [250, 120, 10], [200, 100, 50]):
        assert any((x[:, 0, 0] - torch.tensor(colour)).abs().max() <= 6 for x in x_NCHW), colour


def test_images_of_different_sizes_are_resized_or_refused(pets: Path) -> None:
    wide = np.full((5, 9, 3), 255, dtype=np.uint8)
    wide[:, 2:7] = 60
    Image.fromarray(wide).save(pets / "bee" / "03.png")
    with pytest.raises(
        DataError, match=r"pets\[\d+\] is torch.uint8 \(3, 5, 9\) .*\(3, 4, 6\) .*resize a folder by --image-size"
    ):
        read_all(pets)
    both = load(str(pets), image_size=4)
    x_NCHW = [split.read(i) for split in (both.train, both.test) for i in range(len(split))]
    assert {x_CHW.shape for x_CHW in x_NCHW} == {(3, 4, 4)}
    assert sum(x_CHW[:, :, 1:3].eq(60).all().item() for x_CHW in x_NCHW) == 1, "the middle of it is kept"
    # Measuring takes them, too.
    settings = resolve_settings(None, {"data": str(pets), "image_size": 4}).settings
    assert load_images(settings).train.image_shape == (3, 4, 4)


# --------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", [lambda whole: whole[:40], lambda _: b"GIF of nothing"])
def test_damaged_image_is_named_when_read(pets: Path, damage: object) -> None:
    path = pets / "cat" / "05.png"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"cannot be read as an image .*: replace or remove it") as error:
        read_all(pets)
    assert_says(error, path)


def test_other_layouts_are_refused(pets: Path, apart: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "one", {"only/1.png": plain_image(0)})
    shutil.copytree(apart / "val", tmp_path / "half" / "val")
    shutil.copytree(apart / "train", tmp_path / "empty" / "train")
    (tmp_path / "empty" / "test").mkdir()
    shutil.copytree(apart, tmp_path / "untrained")
    write_images(tmp_path / "untrained" / "val", {"dog/1.png": plain_image((0, 0, 0))})
    (pets / "dog").mkdir()
    (pets / "dog" / "photo.txt").touch()
    for path, says in (
        (tmp_path / "nowhere", "No such file or directory"),
        (pets / "ant", "give a folder of images for each class"),
        (pets, "dog"),
        (tmp_path / "one", "has the classes only, trained are only: train two or more"),
        (tmp_path / "half", "holds val but no train"),
        (tmp_path / "empty", "give a folder of images for each class"),
        (tmp_path / "untrained", "has the classes bee, cat, dog, trained are ant, bee, cat"),
    ):
        with pytest.raises(DataError) as error:
            load(f"folder:{path}")
        assert_says(error, path, says)
