"""Loads and checks what the settings name: images, net, checkpoints."""

import os

from torch import Tensor, nn

from convoy.checkpoint.checkpoint import check_settings, find_checkpoint
from convoy.checkpoint.run_folder import holding, run_folder, starting_point
from convoy.config.option_types import AUTO_DEVICE
from convoy.config.settings import Settings
from convoy.data import Splits, load
from convoy.data.augment import read_augment
from convoy.errors import InputError
from convoy.model.nets import build_net
from convoy.model.nets.builtin import PER_PIXEL


def load_images(settings: Settings) -> Splits:
    splits = load(
        settings.data, settings.data_dir, image_size=settings.image_size, test_fraction=settings.test_fraction
    )
    return splits if settings.limit is None else splits.first(settings.limit)


def check_images(settings: Settings, splits: Splits) -> None:
    """Refuse a net, a batch or an augmentation that does not fit the images. InputError."""
    if settings.net.partition(":")[0] in PER_PIXEL:
        raise InputError(
            f"--net {settings.net} gives a class for every pixel, and these images have one label each: train it in Python, "
            "with convoy.loss; convoy measure, and plan, predict and simulate with --outputs where-computed, take it as it is"
        )
    count = len(splits.train)
    if settings.batch > count:
        raise InputError(
            f"--batch {settings.batch} with {count} training images: no step has more images than there are; give --batch "
            f"{count} or less"
        )
    if settings.augment is not None:
        augment = read_augment(settings.augment, splits.train.mean, splits.train.std)
        augment(example_of(splits), [0], settings.seed, 0)


def build_model(settings: Settings, splits: Splits) -> nn.Module:
    return build_net(settings.net, splits.train.image_shape, splits.train.classes, settings.seed)


def example_of(splits: Splits) -> Tensor:
    """Return one image, as a batch of one."""
    return splits.train[0][0][None]


def device_named(names: tuple[str, ...]) -> str | None:
    """Return the device that an option names; None: in a job of several, the launcher gives each its own."""
    return names[0] if len(names) == 1 and names[0] != AUTO_DEVICE else None


def check_resume(settings: Settings) -> None:
    """Refuse a run that cannot be resumed, judged by its files alone. Called on device 0, where these are.

    Raises:
        InputError: as `Checkpointer.begin`; or the run is complete.
    """
    if settings.checkpoint is None:
        return
    folder = run_folder(settings.checkpoint)
    start = starting_point(settings.checkpoint, settings.resume)
    if os.path.isdir(folder):
        try:
            with holding(folder):
                pass
        except OSError as error:
            raise InputError(
                f"cannot write into {folder}: {error.strerror}; wait until another run has ended, or name a folder that "
                "you may write"
            ) from None
    if start is None:
        return
    path, manifest = find_checkpoint(start)
    check_settings(path, manifest, settings.lasting)
    done = manifest.progress.epoch
    if done >= settings.epochs:
        raise InputError(f"the run in {folder} is complete: {done} epochs are done; give --epochs above {done}")
