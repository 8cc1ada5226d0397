"""Images in memory: how they are normalised, read one by one and in batches, and what they refuse."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from convoy.data import Images
from convoy.data.images import byte_counts, statistics
from convoy.data.splits import fair_order, held_out, splits
from convoy.errors import DataError, InputError


@pytest.fixture
def pixels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x_NCHW = torch.randint(0, 256, (50, 3, 4, 5), dtype=torch.uint8, generator=generator)
    return x_NCHW, torch.arange(50) % 7


def test_statistics_equal_those_of_numpy(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    mean, std = statistics(byte_counts(pixels[0]))
    x_NCHW = pixels[0].numpy().astype(np.float64) / 255
    np.testing.assert_allclose(mean, x_NCHW.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, x_NCHW.std((0, 2, 3)), rtol=1e-13)


def test_statistics_by_hand() -> None:
    x_NCHW = torch.tensor([[[[0, 255]], [[51, 51]]]], dtype=torch.uint8)
    assert statistics(byte_counts(x_NCHW)) == ((0.5, 0.2), (0.5, 1.0))


def test_statistics_do_not_depend_on_threads(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = statistics(byte_counts(pixels[0]))
        torch.set_num_threads(2)
        assert statistics(byte_counts(pixels[0])) == alone
    finally:
        torch.set_num_threads(threads)


def test_training_images_are_normalised_and_test_images_by_the_same_numbers(
    pixels: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x_NCHW, y_N = pixels
    both = splits("mine", (x_NCHW[:40], y_N[:40]), (x_NCHW[40:], y_N[40:]), torch.float64)
    x_train_NCHW, _ = both.train.__getitems__(range(40))
    assert x_train_NCHW.mean((0, 2, 3)).abs().max() < 1e-14
    assert (x_train_NCHW.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-14
    assert (both.test.mean, both.test.std) == (both.train.mean, both.train.std)
    mean_C11, std_C11 = (
        torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (both.train.mean, both.train.std)
    )
    x_test_NCHW, y_test_N = both.test.__getitems__(list(range(10)))
    torch.testing.assert_close(x_test_NCHW, (x_NCHW[40:].double() / 255 - mean_C11) / std_C11, rtol=1e-12, atol=1e-12)
    assert y_test_N.equal(y_N[40:])
    assert (both.classes, both.image_shape, both.name) == (7, (3, 4, 5), "mine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("indices", [[], [7], [3, 0, 49, 3], range(5, 20), torch.tensor([8, 2])])
def test_a_batch_is_the_stack_of_its_samples(
    pixels: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, indices: list[int] | range | torch.Tensor
) -> None:
    images = splits("mine", pixels, pixels, dtype).train
    x_NCHW, y_N = images.__getitems__(indices)
    assert x_NCHW.shape == (len(indices), 3, 4, 5)
    assert (x_NCHW.dtype, y_N.dtype) == (dtype, torch.int64)
    samples = [images[int(index)] for index in indices]
    for row, (x_CHW, label) in enumerate(samples):
        assert x_NCHW[row].equal(x_CHW)
        assert isinstance(label, int)
        assert label == y_N[row] == images.targets[int(indices[row])]


def test_reading_leaves_the_stored_bytes_alone(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    images = splits("mine", pixels, pixels, torch.float32).train
    before = pixels[0].clone()
    images[3][0].zero_()
    images.__getitems__([3, 4])[1].zero_()
    assert images.x_NCHW.equal(before)
    assert images.targets[4] == 4


def test_images_work_with_a_data_loader_and_as_a_sequence(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    images = splits("mine", pixels, pixels, torch.float32).train
    batches = list(DataLoader(images, batch_size=20, collate_fn=lambda batch: batch))
    assert [tuple(x_NCHW.shape) for x_NCHW, _ in batches] == [(20, 3, 4, 5), (20, 3, 4, 5), (10, 3, 4, 5)]
    assert torch.cat([y_N for _, y_N in batches]).equal(images.targets)
    samples = list(images)  # type: ignore[call-overload]  # iterable by its indices, as any Dataset
    assert len(samples) == len(images) == 50
    assert repr(images) == "Images(50 of 3x4x5, 7 classes, torch.float32)"


@pytest.mark.parametrize("index", [50, 1000])
def test_an_index_past_the_end_is_an_index_error(pixels: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
    images = splits("mine", pixels, pixels, torch.float32).train
    with pytest.raises(IndexError):
        images[index]
    with pytest.raises(IndexError):
        images.__getitems__([0, index])


def test_images_refuse_what_they_cannot_hold(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_NCHW, y_N = pixels
    mean, std = (0.5,) * 3, (0.2,) * 3
    with pytest.raises(InputError, match=r"torch\.float32 \(50, 3, 4, 5\): give uint8"):
        Images(x_NCHW.float(), y_N, 7, mean, std)
    with pytest.raises(InputError, match=r"torch\.int64 \(49,\) for 50 images"):
        Images(x_NCHW, y_N[:49], 7, mean, std)
    with pytest.raises(InputError, match=r"images of torch\.float16: choose one of torch\.float32, torch\.float64"):
        Images(x_NCHW, y_N, 7, mean, std, torch.float16)
    with pytest.raises(InputError, match="2 means and 3 deviations for 3 channels"):
        Images(x_NCHW, y_N, 7, mean[:2], std)
    with pytest.raises(InputError, match="must be above 0"):
        Images(x_NCHW, y_N, 7, mean, (0.2, 0.0, 0.2))
    with pytest.raises(DataError, match="labels from 0 to 6 with 6 classes"):
        Images(x_NCHW, y_N, 6, mean, std)
    with pytest.raises(InputError, match="no training images"):
        splits("mine", (x_NCHW[:0], y_N[:0]), pixels, torch.float32)
    with pytest.raises(InputError, match=r"trains on images of \(3, 4, 5\) and tests on \(3, 4, 4\)"):
        splits("mine", pixels, (x_NCHW[..., :4], y_N), torch.float32)


def test_counts_of_parts_add_up_to_those_of_the_whole(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_NCHW = pixels[0]
    assert (byte_counts(x_NCHW[:7]) + byte_counts(x_NCHW[7:])).equal(byte_counts(x_NCHW))


def test_the_first_images_are_normalised_as_all_were(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    both = splits("mine", pixels, pixels, torch.float32)
    few = both.first(3)
    assert (len(few.train), len(few.test), few.classes) == (3, 50, 7)
    assert few.train[2][0].equal(both.train[2][0])


def test_the_fingerprint_tells_other_data_from_the_same(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_NCHW, y_N = pixels
    same = splits("mine", pixels, pixels, torch.float32).fingerprint
    assert splits("yours", pixels, pixels, torch.float32).fingerprint == same, "the name may be another path"
    brighter = x_NCHW.clone()
    brighter[0, 0, 0, 0] ^= 1
    others = [
        splits("mine", (brighter, y_N), pixels, torch.float32),
        splits("mine", (x_NCHW, y_N.flip(0)), pixels, torch.float32),
        splits("mine", pixels, (x_NCHW[1:], y_N[1:]), torch.float32),
        splits("mine", pixels, pixels, torch.float32, ["a", "b", "c", "d", "e", "f", "g"]),
    ]
    assert len({same, *(other.fingerprint for other in others)}) == 5


# ---------------------------------------------------------------------------------------------------- held out


def test_each_class_gives_its_part_to_the_test_and_keeps_one() -> None:
    labels = [0] * 10 + [1] * 4 + [2]
    train, test = held_out(range(15), labels, 0.3)
    assert test == [0, 1, 2, 10]  # 3 of 10, 1.2 of 4, none of 1
    assert train == [3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14]
    train, test = held_out(range(15), labels, 0.99)
    assert train == [9, 13, 14], "one of each class is left to train on"


def test_the_fair_order_is_one_of_names_and_mixes_them() -> None:
    names = [f"class{c}/{i}.jpg" for c in range(4) for i in range(50)]
    order = fair_order(names)
    assert sorted(order) == list(range(200))
    met = [names[i][:6] for i in order[:40]]
    assert all(5 <= met.count(f"class{c}") <= 15 for c in range(4)), "a fair sample of all classes comes first"
    fewer = [name for name in names if name != "class2/7.jpg"]
    assert [fewer[i] for i in fair_order(fewer)] == [names[i] for i in order if names[i] != "class2/7.jpg"]
