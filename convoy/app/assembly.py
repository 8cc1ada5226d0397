"""What trains, put together as the settings want it; for a distributed model and an ordinary one."""

import math

import torch
from torch import nn

from convoy.checkpoint import Checkpointer
from convoy.config.settings import Settings
from convoy.data import Splits
from convoy.data.augment import Augment, read_augment
from convoy.errors import InputError
from convoy.report.screen import Screen
from convoy.runtime.average import WeightAverage
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from convoy.train.loader import Loader
from convoy.train.loop import Recipe, Training, build_optimizer
from convoy.train.lr import Schedule, build_schedule


def build_loaders(settings: Settings, splits: Splits, part: Distributed | None) -> tuple[Loader, Loader]:
    """Batches to train on and to test on, of one pass each."""
    augment: Augment | None = None
    if settings.augment is not None:
        augment = read_augment(settings.augment, splits.train.mean, splits.train.std)
    size, workers = settings.pass_batch, settings.workers
    train = Loader(splits.train, size, part, seed=settings.seed, workers=workers, augment=augment)
    return train, Loader(splits.test, max(size, 100), part, shuffle=False, workers=workers)


def build_training(settings: Settings, model: nn.Module, train: Loader) -> Training:
    """The model with all that a step needs, as the settings want it; for a distributed model and an ordinary one."""
    optimizer = build_optimizer(settings.optimizer, model, settings.lr, settings.momentum, settings.weight_decay)
    steps_per_epoch = math.ceil(len(train) / settings.accumulate)
    schedule = Schedule(
        settings.schedule, settings.epochs * steps_per_epoch, round(settings.warmup_epochs * steps_per_epoch),
        settings.drop_epochs * steps_per_epoch, settings.drop_factor,
    )  # fmt: skip
    recipe = Recipe(
        settings.accumulate, settings.clip_norm, settings.label_smoothing, settings.evaluate_epochs, settings.evaluate_steps
    )  # fmt: skip
    return Training(
        model,
        optimizer,
        recipe,
        build_schedule(optimizer, schedule),
        WeightAverage(optimizer, settings.ema) if settings.ema is not None else None,
        GradScaler(model) if settings.precision == "fp16" else None,
    )


def build_keeper(settings: Settings, training: Training, screen: Screen) -> Checkpointer | None:
    """What saves the run; the model and its training are then where the run goes on.

    Raises:
        InputError: the checkpoints cannot be used, or the run is complete.
    """
    if settings.checkpoint is None:
        return None
    keeper = Checkpointer(
        settings.checkpoint, training.model, training.optimizer, every=settings.checkpoint_steps,
        schedule=training.schedule, scaler=training.scaler, settings=settings.lasting,
        tell=lambda line: screen.lines([f"  {line}"]),
    )  # fmt: skip
    done = keeper.begin(settings.resume)
    if done.epoch >= settings.epochs:
        raise InputError(
            f"the run in {settings.checkpoint} is complete: {done.epoch} epochs are done; give --epochs above {done.epoch}"
        )
    # Dropout must not draw again what it drew in the first steps.
    torch.manual_seed(settings.seed + done.step)
    return keeper
