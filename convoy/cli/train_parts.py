"""Builds images, net, loaders and optimizer of a training from its settings, and runs `--compare`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from convoy.api import loader
from convoy.comm.control_messages import difference
from convoy.comm.group import Group
from convoy.config.train_options import Settings
from convoy.data import Splits, load
from convoy.data.augment import Augment, augment_steps
from convoy.errors import InputError, MismatchError
from convoy.model.nets import build_net
from convoy.model.nets.builtin import PER_PIXEL
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory
from convoy.runlog.schema import DeviceLine
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage
from convoy.runtime.precision import GradScaler, UnderAutocast
from convoy.train.loader import Loader
from convoy.train.loop import RateCurve, Recipe, Training, build_optimizer, build_schedule, fit
from convoy.train.record import History


def load_images(settings: Settings) -> Splits:
    size, fraction = settings.image_size, settings.test_fraction
    splits = load(settings.data, settings.data_dir, image_size=size, test_fraction=fraction)
    return splits if settings.limit is None else splits.first(settings.limit)


def agreed_images(settings: Settings, group: Group, screen: Screen) -> Splits:
    """Load the images. Check that net, batch and augmentation fit them, and that all devices have the same."""
    if settings.net.partition(":")[0] in PER_PIXEL:
        raise InputError(
            f"--net {settings.net} gives a class for every pixel, and these images have one label each: train it in Python, "
            "with convoy.loss"
        )
    splits = load_images(settings)
    count = len(splits.train)
    if settings.batch > count:
        raise InputError(f"--batch {settings.batch} with {count} training images: give --batch {count} or less")
    if settings.augment is not None:  # try it once
        augment = Augment(augment_steps(settings.augment), splits.train.mean, splits.train.std)
        augment(example_of(splits), [0], settings.seed, 0)
    if found := difference(group.agree("data", splits.fingerprint)):
        raise MismatchError(
            f"the devices were given different data: {found}; copy the same files to every machine, and use one version of "
            "torchvision and Pillow"
        )
    for note in splits.notes:
        screen.line(f"  {note}")
    return splits


def build_model(settings: Settings, splits: Splits) -> nn.Module:
    return build_net(settings.net, splits.train.image_shape, splits.train.classes, settings.seed)


def example_of(splits: Splits) -> Tensor:
    """Return one image, as a batch of one."""
    return splits.train[0][0][None]


def build_loaders(settings: Settings, splits: Splits, part: Distributed | None) -> tuple[Loader, Loader]:
    """Return loaders of micro-batches to train on and to test on."""
    size, workers = settings.micro_batch, settings.workers
    train = loader(splits.train, size, part, seed=settings.seed, workers=workers, augment=settings.augment)
    return train, loader(splits.test, max(size, 100), part, shuffle=False, workers=workers)


def build_training(settings: Settings, model: nn.Module, train: Loader) -> Training:
    """Return the model, distributed or not, with its optimizer, schedule, weight average and scaler."""
    optimizer = build_optimizer(settings.optimizer, model, settings.lr, settings.momentum, settings.weight_decay)
    steps_per_epoch = math.ceil(len(train) / settings.accumulate)
    schedule = RateCurve(
        settings.schedule, settings.epochs * steps_per_epoch, round(settings.warmup_epochs * steps_per_epoch),
        settings.drop_epochs * steps_per_epoch, settings.drop_factor,
    )  # fmt: skip
    recipe = Recipe(
        settings.accumulate, settings.clip_norm, settings.label_smoothing, settings.evaluate_epochs,
        settings.evaluate_steps, settings.on_nan == "stop",
    )  # fmt: skip
    average = WeightAverage(optimizer, settings.ema) if settings.ema is not None else None
    scaler = GradScaler(model) if settings.precision == "fp16" else None
    return Training(model, optimizer, recipe, build_schedule(optimizer, schedule), average, scaler)


@dataclass(frozen=True)
class FinishedTraining:
    """The results of a training. `devices` are kind, host and slowdown of each."""

    history: History
    splits: Splits
    devices: Sequence[tuple[str, str, float]]
    uses: Sequence[DeviceLine]
    inexact: str
    directory: RunDirectory | None


@dataclass
class _Slowed(Training):
    """A training in plain PyTorch on a device slowed down like those of the fleet."""

    clock: Clock = field(kw_only=True)

    def backward(self, x: Tensor, y: Tensor, part: float, *, ends_step: bool = True) -> Tensor:
        with self.clock.compute("all layers", "forward and backward"):
            return super().backward(x, y, part, ends_step=ends_step)


def compare_with_one_device(settings: Settings, done: FinishedTraining, screen: Screen) -> None:
    """Train the same net in plain PyTorch on one CPU, slowed down like the fastest device, and print both results."""
    model = UnderAutocast(build_model(settings, done.splits), settings.precision)
    train, test = build_loaders(settings, done.splits, None)
    slowdown = min(slowdown for _, _, slowdown in done.devices)
    training = build_training(settings, model, train)
    training.report = screen.line
    slowed = _Slowed(**vars(training), clock=Clock(torch.device("cpu"), slowdown))
    title = "one device, plain PyTorch" + (f", slowed down {slowdown:g}x" if slowdown != 1 else "")
    with screen.progress(title, settings.epochs, train.samples, tests=test.samples) as bar:
        alone = fit(slowed, train, test, settings.epochs, bar)
    rounding = f"rounding of {settings.precision}, which grows from step to step; in float64 they agree to 1e-10"
    reason = f"INEXACT: {done.inexact}" if done.inexact else rounding
    screen.comparison(done.history, alone, done.devices, reason)
