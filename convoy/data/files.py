"""Image files as a data set: read when they are wanted, scaled by what the first of them are like."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.data.folder import Listing, Named, list_folder
from convoy.data.picture import read_file, survey, traits_of_file
from convoy.data.samples import LOOKED_AT, Samples, measured_scale
from convoy.data.splits import Splits
from convoy.errors import DataError


@dataclass(frozen=True)
class Files:
    """Image files of one shape, by index.

    Attributes:
        names: relative to `root`.
        image_shape: `(C, H, W)` that every image has, or is resized to.
        resized: whether images are brought to that size; else another size is an error.
    """

    root: Path
    names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    resized: bool

    def __call__(self, index: int) -> torch.Tensor:
        """Pixels of one image, uint8 of `image_shape`.

        Raises:
            DataError: names the file that is damaged, or of another size.
        """
        path = self.root / self.names[index]
        channels, height, width = self.image_shape
        x_CHW = read_file(path, channels, height if self.resized else None)
        if x_CHW.shape != self.image_shape:
            raise DataError(
                f"{path} is {x_CHW.shape[2]} pixels wide and {x_CHW.shape[1]} high, others {width} and {height}: a net takes "
                f"images of one size; resize all of them, e.g. --image-size {min(height, width)}"
            )
        return x_CHW


def load_folder(
    path: Path, dtype: torch.dtype, image_size: int | None = None, test_fraction: float | None = None
) -> Splits:
    """Training and test images of a folder; see `folder` for how it may be laid out and `picture` for how images are read.

    Mean and deviation are those of the first `LOOKED_AT` training images, exactly. The images are grey if all of these are.

    Args:
        image_size: side in pixels of the square that every image is resized to; None: they have one size already.
        test_fraction: of each class, held out for the test where the folder has no test images; None: `TEST_FRACTION`.

    Raises:
        InputError: Pillow is missing, or a fraction is given where the folder has test images of its own.
        DataError: as `list_folder` says, or an image that was looked at cannot be used.
    """
    listing = list_folder(path, test_fraction)
    looked_at = [name for name, _ in listing.train[:LOOKED_AT]]
    channels, remarks = survey({name: traits_of_file(listing.root / name) for name in looked_at})
    if image_size is not None:
        shape = (channels, image_size, image_size)
    else:
        _, height, width = read_file(listing.root / looked_at[0], channels, None).shape
        shape = (channels, height, width)
    train, test = (
        Files(root, tuple(name for name, _ in images), shape, image_size is not None)
        for root, images in ((listing.root, listing.train), (listing.test_root, listing.test))
    )
    scale = measured_scale(train, len(looked_at), dtype)
    classes = len(listing.class_names)
    return Splits(
        name=str(path),
        train=Samples(train, _labels(listing.train), classes, shape, scale),
        test=Samples(test, _labels(listing.test), classes, shape, scale),
        class_names=listing.class_names,
        notes=(_found(listing), f"mean and deviation of {len(looked_at)} training images", *remarks),
    )


def _labels(images: tuple[Named, ...]) -> torch.Tensor:
    return torch.tensor([label for _, label in images])


def _found(listing: Listing) -> str:
    counts = Counter(label for _, label in listing.train + listing.test)
    classes = ", ".join(f"{name} {counts[label]}" for label, name in enumerate(listing.class_names[:10]))
    more = ", ..." if len(listing.class_names) > 10 else ""
    return (
        f"{len(listing.class_names)} classes ({classes}{more}); {len(listing.train)} images to train on, "
        f"{len(listing.test)} to test on; {listing.split}"
    )
