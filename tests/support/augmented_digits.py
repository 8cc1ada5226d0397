"""The digits for `--data tests.support.augmented_digits:build`, for tests of --augment that need torchvision."""

from convoy.data import Images, load
from tests.support.model_zoo import make_importable

make_importable()


def build() -> tuple[Images, Images]:
    """Return the digits as floats: uint8 images would be normalised a second time."""
    both = load("digits")
    assert isinstance(both.train, Images)
    assert isinstance(both.test, Images)
    return both.train, both.test
