"""The digits for `--data tests.support.augmented_digits:build`, in a process in which torchvision imports: for --augment."""

from convoy.data import Images, load
from tests.support.model_zoo import make_importable

make_importable()


def build() -> tuple[Images, Images]:
    """The digits as uint8 would be normalised again: as numbers, they are taken as they are."""
    both = load("digits")
    assert isinstance(both.train, Images)
    assert isinstance(both.test, Images)
    return both.train, both.test
