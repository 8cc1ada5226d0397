"""Makes what a training consists of, as the settings say: loaders, optimizer and schedule, checkpoints, rebalancing."""

import math
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from convoy.api import Plans, loader
from convoy.checkpoint import Checkpointer
from convoy.config.settings import Settings
from convoy.data import Splits
from convoy.report.screen import Screen
from convoy.runtime.average import WeightAverage
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import RateCurve, Recipe, Training, build_optimizer, build_schedule
from convoy.train.rebalance import Decision


def build_loaders(settings: Settings, splits: Splits, part: Distributed | None) -> tuple[Loader, Loader]:
    """Return loaders of micro-batches to train on and to test on."""
    size, workers = settings.pass_batch, settings.workers
    train = loader(splits.train, size, part, seed=settings.seed, workers=workers, augment=settings.augment)
    return train, loader(splits.test, max(size, 100), part, shuffle=False, workers=workers)


def build_training(settings: Settings, model: nn.Module, train: Loader) -> Training:
    """Return the model, distributed or not, with its optimizer, schedule, weight average and scaler."""
    optimizer = build_optimizer(settings.optimizer, model, settings.lr, settings.momentum, settings.weight_decay)
    steps_per_epoch = math.ceil(len(train) / settings.passes)
    schedule = RateCurve(
        settings.schedule, settings.epochs * steps_per_epoch, round(settings.warmup_epochs * steps_per_epoch),
        settings.drop_epochs * steps_per_epoch, settings.drop_factor,
    )  # fmt: skip
    recipe = Recipe(
        settings.passes, settings.clip_norm, settings.label_smoothing, settings.evaluate_epochs,
        settings.evaluate_steps, settings.on_nan == "stop",
    )  # fmt: skip
    return Training(
        model,
        optimizer,
        recipe,
        build_schedule(optimizer, schedule),
        WeightAverage(optimizer, settings.ema) if settings.ema is not None else None,
        GradScaler(model) if settings.precision == "fp16" else None,
    )


def build_checkpointer(
    settings: Settings, training: Training, screen: Screen, stack: ExitStack, *, begins: bool = True
) -> Checkpointer | None:
    """Return what saves the run, and load the checkpoint to resume from. It locks the folder while `stack` lasts.

    Args:
        begins: False on a device that joins the run later.

    Raises:
        InputError: the checkpoints cannot be used, or another run writes there.
    """
    if settings.checkpoint is None:
        return None
    checkpointer = Checkpointer(
        settings.checkpoint, training.model, training.optimizer, every=settings.checkpoint_steps,
        schedule=training.schedule, scaler=training.scaler, settings=settings.lasting,
        tell=lambda line: screen.lines([f"  {line}"]),
    )  # fmt: skip
    stack.callback(checkpointer.close)
    if not begins:
        return checkpointer
    done = checkpointer.begin(settings.resume)
    # Dropout must not draw again what it drew in the first steps.
    torch.manual_seed(settings.seed + done.step)
    return checkpointer


def build_rebalancer(
    part: Distributed, training: Training, plans: Plans, tell: Callable[[int, Decision], None], screen: Screen
) -> Rebalancer:
    if len(plans) > 1:
        screen.line(f"{len(plans)} plans are predicted to take nearly as long: training tries each for some steps.")
    return Rebalancer(part, training.optimizer, tell=tell, others=plans[1:])
