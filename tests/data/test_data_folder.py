"""Folders of images: how they may be laid out, what is held out, and what is said of those that cannot be used."""

import shutil
from pathlib import Path

import pytest
import torch

from convoy.app.inputs import load_images
from convoy.config.run_file import resolve_settings
from convoy.data import Samples, load
from convoy.data.folder import Files, list_folder
from convoy.errors import DataError, InputError
from tests.support.data_files import assert_says, plain_image, write_images

CLASSES = ("ant", "bee", "cat")


def value_of(label: int, number: int) -> int:
    """The grey of image `number` of a class: it tells both."""
    return 50 * label + number


def write_class(root: Path, label: int, count: int) -> None:
    write_images(root, {f"{CLASSES[label]}/{n:02}.png": plain_image((value_of(label, n),) * 3) for n in range(count)})


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Ten images of each of three classes, in one folder."""
    for label in range(3):
        write_class(tmp_path / "pets", label, 10)
    return tmp_path / "pets"


@pytest.fixture
def apart(tmp_path: Path) -> Path:
    """Training and validation images apart; one class is not validated."""
    for label, count in enumerate((4, 5, 6)):
        write_class(tmp_path / "apart" / "train", label, count)
    for label, count in enumerate((2, 1)):
        write_class(tmp_path / "apart" / "val", label, count)
    return tmp_path / "apart"


def values(samples: Samples) -> list[tuple[int, int]]:
    """Grey and label of each image, as stored."""
    return [(int(samples.read(i)[0, 0, 0]), int(samples.targets[i])) for i in range(len(samples))]


# -------------------------------------------------------------------------------------------------------- layouts


def test_training_and_validation_folders_are_taken_as_they_are(apart: Path) -> None:
    both = load(f"folder:{apart}")
    assert both.class_names == CLASSES
    assert (len(both.train), len(both.test), both.classes, both.image_shape) == (15, 3, 3, (3, 4, 6))
    expected = [(value_of(label, n), label) for label, count in enumerate((4, 5, 6)) for n in range(count)]
    assert sorted(values(both.train)) == expected
    assert sorted(values(both.test)) == [(0, 0), (1, 0), (50, 1)]
    assert "tested on val" in both.notes[0]
    assert "3 classes (ant 6, bee 6, cat 6); 15 images to train on, 3 to test on" in both.notes[0]


def test_a_test_folder_will_do_and_val_goes_before_it(apart: Path) -> None:
    shutil.copytree(apart / "val", apart / "test")
    (apart / "test" / "ant" / "00.png").unlink()
    assert len(load(str(apart)).test) == 3
    shutil.rmtree(apart / "val")
    assert len(load(str(apart)).test) == 2


def test_one_folder_gives_a_fifth_of_each_class_to_the_test(pets: Path) -> None:
    both = load(str(pets))
    assert torch.bincount(both.train.targets).tolist() == [8, 8, 8]
    assert torch.bincount(both.test.targets).tolist() == [2, 2, 2]
    assert sorted(values(both.train) + values(both.test)) == [(value_of(c, n), c) for c in range(3) for n in range(10)]
    assert "20% of each class held out for the test" in both.notes[0]
    half = load(str(pets), test_fraction=0.5)
    assert torch.bincount(half.test.targets).tolist() == [5, 5, 5]
    assert set(values(both.test)) < set(values(half.test)), "more are held out, but the same first"


def test_which_images_are_held_out_depends_on_their_names_alone(pets: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(pets, copy)
    assert list_folder(copy).test == list_folder(pets).test
    assert load(str(copy)).fingerprint == load(str(pets)).fingerprint


def test_the_first_images_are_of_all_classes(pets: Path) -> None:
    assert len(set(load(str(pets)).first(8).train.targets.tolist())) == 3


def test_what_is_no_image_is_passed_over(pets: Path) -> None:
    for name in ("Thumbs.db", ".hidden.png", "notes.txt"):
        (pets / "ant" / name).write_bytes(b"!")
    (pets / ".ipynb_checkpoints").mkdir()
    (pets / "README").touch()
    (pets / "bee" / "00.png").rename(pets / "bee" / "00.PNG")
    listing = list_folder(pets)
    assert len(listing.train + listing.test) == 30
    assert listing.class_names == CLASSES


def test_grey_images_have_one_channel_and_the_numbers_of_all(tmp_path: Path) -> None:
    write_images(tmp_path, {f"{name}/{n}.png": plain_image(51 * n) for name in "ab" for n in range(6)})
    both = load(str(tmp_path), test_fraction=0.5, dtype=torch.float64)
    assert both.image_shape == (1, 4, 6)
    stored = torch.tensor([grey for grey, _ in values(both.train)], dtype=torch.float64) / 255
    assert both.train.mean == pytest.approx((float(stored.mean()),), rel=1e-12)
    assert both.train.std == pytest.approx((float(stored.std(correction=0)),), rel=1e-12)
    x_CHW, label = both.test[0]
    grey, expected = values(both.test)[0]
    assert (x_CHW.dtype, label) == (torch.float64, expected)
    torch.testing.assert_close(
        x_CHW, torch.full((1, 4, 6), (grey / 255 - both.train.mean[0]) / both.train.std[0]).double()
    )


def test_grey_among_colour_becomes_colour_and_is_told(pets: Path) -> None:
    for name in ("ant/00.png", "ant/01.png", "bee/00.png"):
        write_images(pets, {name: plain_image(9)})
    both = load(str(pets))
    assert both.image_shape == (3, 4, 6)
    (told,) = [note for note in both.notes if "grey" in note]
    assert "of 24 training images looked at are grey, first" in told
    assert "read as RGB of equal channels" in told


# ---------------------------------------------------------------------------------------------------------- sizes


def both_lists(folder: Path) -> None:
    both = load(str(folder))
    list(both.train), list(both.test)


def test_images_of_different_sizes_want_one(pets: Path) -> None:
    write_images(pets, {"bee/03.png": plain_image((1, 2, 3), width=9, height=5)})
    with pytest.raises(DataError) as error:
        both_lists(pets)
    assert_says(error, pets / "bee" / "03.png", "9 pixels wide and 5 high", "6 and 4", "--image-size 4")
    both = load(str(pets), image_size=4)
    assert both.image_shape == (3, 4, 4)
    assert {x_CHW.shape for split in (both.train, both.test) for x_CHW, _ in split} == {(3, 4, 4)}
    # Measuring takes them, too.
    settings = resolve_settings(None, {"data": str(pets), "image_size": 4}).settings
    assert load_images(settings).image_shape == (3, 4, 4)


# --------------------------------------------------------------------------------------------------------- damage


def test_a_damaged_image_is_named_when_it_is_read(pets: Path) -> None:
    path = pets / "cat" / "05.png"
    path.write_bytes(path.read_bytes()[:40])
    files = Files(pets, ("cat/04.png", "cat/05.png"), (3, 4, 6), resized=False)
    assert files(0).shape == (3, 4, 6)
    with pytest.raises(DataError) as error:
        files(1)
    assert_says(error, path, "cannot be read as an image", "replace it by a whole JPEG or PNG")


def test_an_index_past_the_end_is_an_index_error(pets: Path) -> None:
    train = load(str(pets)).first(5).train
    assert len(list(train)) == 5
    with pytest.raises(IndexError):
        train[5]


def test_a_class_without_images_is_named(pets: Path) -> None:
    (pets / "dog").mkdir()
    (pets / "dog" / "photo.webp").touch()
    with pytest.raises(DataError) as error:
        load(str(pets))
    assert_says(error, pets / "dog", "holds no image (.jpg, .jpeg, .png)", "add some, or remove the folder")


def test_a_class_that_is_only_tested_is_named(apart: Path) -> None:
    write_images(apart / "val", {"dog/1.png": plain_image((0, 0, 0))})
    with pytest.raises(DataError) as error:
        load(str(apart))
    assert_says(error, apart / "val", "holds dog, which", apart / "train", "must be trained", "add training images")


def test_other_layouts_are_refused(pets: Path, apart: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "one", {"only/1.png": plain_image(0)})
    shutil.copytree(apart / "val", tmp_path / "half" / "val")
    shutil.copytree(apart / "train", tmp_path / "empty" / "train")
    (tmp_path / "empty" / "test").mkdir()
    for path, says in (
        (tmp_path / "nowhere", "cannot be read"),
        (pets / "ant", "holds no folders: a classifier wants two classes"),
        (tmp_path / "one", "holds 1 folder (only): a classifier wants two classes"),
        (tmp_path / "half", "holds val but no train"),
        (tmp_path / "empty", "holds no class folders: give it those of"),
    ):
        with pytest.raises(DataError) as error:
            load(f"folder:{path}")
        assert_says(error, path, says)


def test_a_fraction_must_leave_something_to_test_on(pets: Path, apart: Path) -> None:
    with pytest.raises(DataError, match=r"0\.01 of each class leaves no images for the test; give a larger"):
        load(str(pets), test_fraction=0.01)
    with pytest.raises(
        InputError, match=r"--test-fraction 0.3, but .*val holds the test images: leave the fraction out"
    ):
        load(str(apart), test_fraction=0.3)
