"""What trains in `convoy train`, made as the settings say: loaders, training, checkpoints, loggers, what follows devices."""

import math
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from convoy.api import Plans, loader
from convoy.app.handover import Handover
from convoy.app.joining import JoiningDevices, Opening, home_of
from convoy.checkpoint import Checkpointer
from convoy.comm.channel import Words
from convoy.config.settings import Settings, key_of
from convoy.data import Splits
from convoy.elastic.entrance import Entrance
from convoy.elastic.members import Members
from convoy.measure.anew import Replanner
from convoy.plan.explain import differences
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory
from convoy.runlog.loggers import Logger, to_mlflow, to_tensorboard, to_wandb
from convoy.runtime.average import WeightAverage
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Recipe, Training, build_optimizer
from convoy.train.lr import Schedule, build_schedule
from convoy.train.observer import Observer
from convoy.train.rebalance import Decision


def build_loaders(settings: Settings, splits: Splits, part: Distributed | None) -> tuple[Loader, Loader]:
    """Batches to train on and to test on, of one pass each."""
    size, workers = settings.pass_batch, settings.workers
    train = loader(splits.train, size, part, seed=settings.seed, workers=workers, augment=settings.augment)
    return train, loader(splits.test, max(size, 100), part, shuffle=False, workers=workers)


def build_training(settings: Settings, model: nn.Module, train: Loader) -> Training:
    """The model with its optimizer, schedule, average and scaler; for a distributed model and an ordinary one."""
    optimizer = build_optimizer(settings.optimizer, model, settings.lr, settings.momentum, settings.weight_decay)
    steps_per_epoch = math.ceil(len(train) / settings.passes)
    schedule = Schedule(
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
    """What saves the run, and holds its folder while `stack` lasts. Where it is resumed, the model and its training are then
    where it goes on. A device that comes later does not begin it.

    Raises:
        InputError: the checkpoints cannot be used, or another run writes there.
    """
    if settings.checkpoint is None:
        return None
    keeper = Checkpointer(
        settings.checkpoint, training.model, training.optimizer, every=settings.checkpoint_steps,
        schedule=training.schedule, scaler=training.scaler, settings=settings.lasting,
        tell=lambda line: screen.lines([f"  {line}"]),
    )  # fmt: skip
    stack.callback(keeper.close)
    if not begins:
        return keeper
    done = keeper.begin(settings.resume)
    # Dropout must not draw again what it drew in the first steps.
    torch.manual_seed(settings.seed + done.step)
    return keeper


def build_members(
    settings: Settings, training: Training, here: Handover, plans: Plans, replan: Replanner, joining: JoiningDevices,
    opening: Opening, entrance: tuple[Entrance, Words] | None = None,
) -> Members | None:  # fmt: skip
    """What lets the training go on with fewer devices, and with more, and one device end after the step; None where it is not
    to."""
    model = training.model
    if not isinstance(model, Distributed) or model.plan.mixes:
        return None
    home = home_of(settings, model.group) if entrance is None and settings.goes_on else None
    if model.group.devices == 1 and entrance is None and home is None:
        return Members(model, training.optimizer, admission=joining)
    if not settings.goes_on:
        return None

    def changed(reason: str) -> None:
        waits = members.generation is None  # to be let in
        if entrance is not None and not here.screen.visible:
            print(reason, flush=True)
        if waits:
            return
        here.carry_over(members, reason)
        words = replan.told()
        here.screen.lines([f"  {reason}", *([f"  {words}"] if words else [])])
        opening.tell(members, replan.known, here)

    others = [each for each in (training.schedule, training.scaler) if each is not None]
    every, price = (1 if settings.spare == "every-step" else None), plans.spare
    if every is None and price is not None:
        every = price.every
    if price is not None and price.overfull:
        here.screen.line(
            f"WARNING: there is no room for the state that is kept for the loss of a device: {'; '.join(price.overfull)}. With "
            "--spare none nothing is kept"
        )
    members = Members(
        model, training.optimizer, others=others, every=every, replan=replan, tell=changed, admission=joining, home=home,
        entrance=entrance,
    )  # fmt: skip
    return members


def build_loggers(
    settings: Settings, directory: RunDirectory | None, done: int, *, screen: Screen, stack: ExitStack
) -> list[Observer]:
    """Return the loggers and the page that the settings want. The loggers are closed with `stack`."""
    folder = None if directory is None else directory.folder
    name = None if folder is None else folder.name
    shown = {key_of(name): value for name, value in settings.model_dump(mode="json").items()}
    loggers: list[Logger] = []
    if settings.tensorboard is not None:
        loggers.append(to_tensorboard(settings.tensorboard, done, screen.line))
    if settings.wandb is not None:
        loggers.append(to_wandb(settings.wandb, name, shown, folder, screen.line))
    if settings.mlflow is not None:
        loggers.append(to_mlflow(settings.mlflow, name, shown, screen.line))
    for logger in loggers:
        stack.enter_context(logger)
    if not settings.page or directory is None:
        return [*loggers]
    from convoy.report.page import LivePage  # jinja2, only where a page is written

    return [*loggers, LivePage(directory.run, screen.line)]


def build_rebalancer(
    part: Distributed, training: Training, plans: Plans, tell: Callable[[int, Decision], None], screen: Screen
) -> Rebalancer:
    if len(plans) > 1:
        first, graph = plans[0], part.traced[True].graph
        told = [f"  plan {i}: {differences(first, plan, graph)}" for i, plan in enumerate(plans[1:], start=2)]
        screen.lines(
            [
                f"{len(plans)} plans are predicted to take nearly as long: some steps by each will tell.",
                "  plan 1: as above",
                *told,
            ]
        )
    return Rebalancer(part, training.optimizer, tell=tell, others=plans[1:])
