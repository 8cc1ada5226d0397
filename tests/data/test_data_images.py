"""Images in memory: normalisation, single and batched reads, and refusals."""

import numpy as np
import pytest
import torch

from convoy.data import Images, Splits
from convoy.data.images import Labelled, byte_counts, fair_order, in_memory, statistics
from convoy.errors import DataError, InputError


@pytest.fixture
def pixels() -> Labelled:
    generator = torch.Generator().manual_seed(5)
    x_NCHW = torch.randint(0, 256, (50, 3, 4, 5), dtype=torch.uint8, generator=generator)
    return x_NCHW, torch.arange(50) % 7


def splits(train: Labelled, test: Labelled, dtype: torch.dtype = torch.float32, classes: str = "abcdefg") -> Splits:
    return in_memory("mine", train, test, dtype, classes)


def test_statistics_equal_those_of_numpy(pixels: Labelled) -> None:
    mean, std = statistics(byte_counts(pixels[0]))
    x_NCHW = pixels[0].numpy().astype(np.float64) / 255
    np.testing.assert_allclose(mean, x_NCHW.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, x_NCHW.std((0, 2, 3)), rtol=1e-13)
    constant = torch.full((1, 1, 1, 2), 51, dtype=torch.uint8)
    assert statistics(byte_counts(constant)) == ((0.2,), (1.0,))


def test_training_and_test_images_are_normalised_by_the_training_images(pixels: Labelled) -> None:
    x_NCHW, y_N = pixels
    both = splits((x_NCHW[:40], y_N[:40]), (x_NCHW[40:], y_N[40:]), torch.float64)
    mean_C11, std_C11 = (
        f(x_NCHW[:40].double() / 255, (0, 2, 3)).reshape(3, 1, 1) for f in (torch.mean, population_std)
    )
    for images, part in ((both.train, slice(40)), (both.test, slice(40, 50))):
        found, y = images.batch(range(len(images)))
        torch.testing.assert_close(found, (x_NCHW[part].double() / 255 - mean_C11) / std_C11, rtol=1e-12, atol=1e-12)
        assert y.equal(y_N[part])
    assert (both.train.classes, both.train.image_shape, both.name) == (7, (3, 4, 5), "mine")
    few = both.first(3)
    assert (len(few.train), len(few.test)) == (3, 10)
    assert few.train[2][0].equal(both.train[2][0]), "normalised as before"


def population_std(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return x.std(axes, correction=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("indices", [[], [3, 0, 49, 3], range(5, 20), torch.tensor([8, 2])])
def test_a_batch_is_the_stack_of_its_samples(
    pixels: Labelled, dtype: torch.dtype, indices: list[int] | range | torch.Tensor
) -> None:
    images = splits(pixels, pixels, dtype).train
    x_NCHW, y_N = images.batch(indices)
    assert x_NCHW.shape == (len(indices), 3, 4, 5)
    assert (x_NCHW.dtype, y_N.dtype) == (dtype, torch.int64)
    for row, index in enumerate(indices):
        x_CHW, label = images[int(index)]
        assert x_NCHW[row].equal(x_CHW)
        assert label == y_N[row] == images.targets[int(index)]


def test_images_refuse_invalid_arrays(pixels: Labelled) -> None:
    x_NCHW, y_N = pixels
    mean, std = (0.5,) * 3, (0.2,) * 3
    with pytest.raises(InputError, match=r"torch\.float32 \(50, 3, 4, 5\) .*: give uint8"):
        Images(x_NCHW.float(), y_N, 7, mean, std)
    with pytest.raises(InputError, match=r"labels torch\.int64 \(49,\): give uint8 .* int64 of shape \(N,\)"):
        Images(x_NCHW, y_N[:49], 7, mean, std)
    with pytest.raises(InputError, match=r"images of torch\.float16: choose one of torch\.float32, torch\.float64"):
        Images(x_NCHW, y_N, 7, mean, std, torch.float16)
    with pytest.raises(InputError, match=r"give one, above 0, per channel \(3\)"):
        Images(x_NCHW, y_N, 7, mean[:2], std)
    with pytest.raises(InputError, match="give one, above 0"):
        Images(x_NCHW, y_N, 7, mean, (0.2, 0.0, 0.2))
    with pytest.raises(DataError, match="sample 6 has label 6, and 7 of 50 labels are outside 0 to 5"):
        Images(x_NCHW, y_N, 6, mean, std)


def test_fair_order_is_stable_and_mixes_classes() -> None:
    names = [f"class{c}/{i}.jpg" for c in range(4) for i in range(50)]
    order = fair_order(names)
    assert sorted(order) == list(range(200))
    met = [names[i][:6] for i in order[:40]]
    assert all(5 <= met.count(f"class{c}") <= 15 for c in range(4)), "a fair sample of all classes comes first"
    fewer = [name for name in names if name != "class2/7.jpg"]
    assert [fewer[i] for i in fair_order(fewer)] == [names[i] for i in order if names[i] != "class2/7.jpg"]
