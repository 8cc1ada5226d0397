"""`convoy train` on one device, from its settings to the last line of the log."""

import math
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convoy.api import Plans, distribute, loader, make_plans
from convoy.checkpoint import Checkpointer, Progress
from convoy.checkpoint.checkpoint import check_settings, find_checkpoint
from convoy.checkpoint.run_folder import holding, run_folder, starting_point
from convoy.cli.joining import Invitation, TrainAdmission, build_members, device_named, measured_alone, run_of
from convoy.cli.reporter import Reporter
from convoy.comm.collectives import difference, from_first, gather
from convoy.comm.environment import imposed_slowdown
from convoy.comm.group import AloneGroup, ChangingGroup, Group
from convoy.comm.processes import join, own_device
from convoy.config.checks import check, check_outputs
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.settings import Settings, key_of
from convoy.data import Splits, load
from convoy.data.augment import read_augment
from convoy.elastic.entrance import greet
from convoy.elastic.regroup import home_at
from convoy.errors import InputError, MismatchError
from convoy.files import write_whole
from convoy.machine import roster
from convoy.machine.accelerator import limit_memory, set_modes
from convoy.machine.process import watch_parent
from convoy.machine.signals import handle_signals
from convoy.measure.replanner import expect_measured
from convoy.model.nets import build_net
from convoy.model.nets.builtin import PER_PIXEL
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.report.measured import remarks
from convoy.report.screen import Screen, Wait
from convoy.runlog.directory import RunDirectory, check_directory, make_directory, paths_of
from convoy.runlog.schema import DeviceLine
from convoy.runtime.average import WeightAverage
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler, UnderAutocast
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Recipe, Training, build_optimizer, fit
from convoy.train.lr import Schedule, build_schedule
from convoy.train.record import History


@dataclass(frozen=True)
class Job:
    """A training as it was started on one device.

    Attributes:
        invitation: what the running job sent, if this device joins one.
    """

    run: RunSettings
    group: Group
    screen: Screen
    stack: ExitStack
    invitation: Invitation | None = None

    @property
    def settings(self) -> Settings:
        return self.run.settings


@dataclass(frozen=True)
class FinishedTraining:
    history: History
    splits: Splits
    devices: Sequence[tuple[str, str, float]]
    uses: Sequence[DeviceLine]
    inexact: str
    directory: RunDirectory | None


def run_device(run: RunSettings) -> None:
    """Train as one of the devices that begin a job."""
    settings = run.settings
    _prepare(settings)
    with ExitStack() as stack:
        group = stack.enter_context(join(device_named(settings.device_names), timeout_s=settings.timeout_s))
        if settings.listen is not None and group.devices == 1:
            group = ChangingGroup(group)
        screen = Screen(visible=group.device == 0)
        _check_same_settings(settings, group)
        if settings.listens_at is not None:
            home_at(*settings.listens_at, group)  # refuse a wrong address before anything takes long
        if settings.memory is not None:
            limit_memory(group.torch_device, settings.memory[min(group.device, len(settings.memory) - 1)])
        if group.device == 0:
            check_outputs(settings)
            check_directory(settings)
            if settings.explain:
                screen.settings(run.rows())
        from_first(group, "checkpoint: to resume", lambda: _check_resume(settings))
        done = _train(Job(run, group, screen, stack))
    if not screen.visible:
        return
    if settings.compare:  # after the group is closed: the other devices need not wait
        _compare_with_one_device(settings, done, screen)
    if done.directory is not None:
        folder = done.directory.run
        page = f"convoy report {shlex.quote(str(folder))}"
        if settings.page:
            from convoy.report.page import write_report  # imports jinja2, which only a page needs

            page = str(write_report(folder))
        screen.line(f"A page of this run: {page}")


def run_joining_device(
    addresses: Sequence[tuple[str, int]], device: str | None, own: Mapping[str, Any], accepted: Collection[str] = ()
) -> None:
    """Join a running training.

    Args:
        addresses: of its devices.
        device: to compute on; None: as in a job of one.
        own: settings that this device has for itself, by name.
        accepted: functions outside of the working folder that the job may name as its net or data.

    Raises:
        InputError, MismatchError: there is no such training, it does not admit this device, or another version started it.
        DeviceLostError: it has ended, or continued without this device.
    """
    watch_parent()
    entrance, offer = greet(addresses)
    run = run_of(offer, {"devices": device or "auto", **own}, accepted)
    settings = run.settings
    _prepare(settings)
    torch_device = own_device(device_named(settings.device_names), 0)
    roster.enter(str(offer["job"]), 0, str(torch_device))
    with ExitStack() as stack:
        group = stack.enter_context(ChangingGroup(AloneGroup(torch_device, settings.timeout_s)))
        _train(Job(run, group, Screen(visible=False), stack, Invitation(entrance, offer)))


def _prepare(settings: Settings) -> None:
    check(settings)
    set_modes(settings.tf32, settings.deterministic)
    torch.manual_seed(settings.seed)


def _check_same_settings(settings: Settings, group: Group) -> None:
    """Compare the settings that decide what is computed. Raise MismatchError for the first that differs."""
    rows = gather(group, "settings", settings.decisive)
    for name in rows[0]:
        if found := difference([row[name] for row in rows]):
            raise MismatchError(
                f"the devices were started with different options: --{key_of(name)} is {found}; start every device with the "
                "same options"
            )


def _check_resume(settings: Settings) -> None:
    """Refuse a run that cannot be resumed, by its files alone. Called on device 0, where these are.

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
                f"cannot write into {folder}: {error.strerror}; name a folder that you may write"
            ) from None
    if start is None:
        return
    path, manifest = find_checkpoint(start)
    check_settings(path, manifest, settings.lasting)
    done = manifest.progress.epoch
    if done >= settings.epochs:
        raise InputError(f"the run in {folder} is complete: {done} epochs are done; give --epochs above {done}")


def _train(job: Job) -> FinishedTraining:
    """Train as the settings say, as one device of the job."""
    settings, group, screen, stack = job.settings, job.group, job.screen, job.stack
    joins = job.invitation is not None
    splits = _agreed_images(settings, group, screen)
    model, example = build_model(settings, splits), example_of(splits)
    slowdown = settings.slowdowns[group.device] * imposed_slowdown()
    plans = _make_plans(settings, group, screen, model, example, slowdown)
    part = distribute(
        model, plans[0], group, example, slowdown=slowdown, precision=settings.precision, compile=settings.compile
    )
    expect_measured(part, plans.measured)
    rows = gather(group, "fleet", [str(group.torch_device), os.uname().nodename, torch.get_num_threads()])
    devices = [
        (f"{device} ({threads} thread{'s' * (threads > 1)})", host, times)
        for (device, host, threads), times in zip(rows, settings.slowdowns, strict=True)
    ]
    screen.fleet(devices, plans.speeds)
    if group.device == 0 and not joins:
        if settings.save_run is not None:
            write_whole(settings.save_run, to_toml(settings))
        if settings.save_plan is not None:
            write_whole(settings.save_plan, plans[0].to_json())
    train, test = build_loaders(settings, splits, part)
    training = build_training(settings, part, train)
    checkpointer, done = None, Progress()
    if settings.checkpoint is not None:
        checkpointer = Checkpointer(
            settings.checkpoint, part, training.optimizer, every=settings.checkpoint_steps, schedule=training.schedule,
            scaler=training.scaler, settings=settings.lasting, tell=lambda line: screen.line(f"  {line}"),
        )  # fmt: skip
        stack.callback(checkpointer.close)
        if not joins:
            done = checkpointer.begin(settings.resume)
            torch.manual_seed(settings.seed + done.step)  # dropout must not draw again what it drew in the first steps
        done = checkpointer.progress
    if job.invitation is None:
        row = from_first(group, "directory of the run", lambda: paths_of(make_directory(settings)))
    else:
        row = job.invitation.offer["directory"]
    directory = None if row is None else RunDirectory(Path(row[0]), None if row[1] is None else Path(row[1]))
    reporter = Reporter(job.run, part, plans, devices, screen, directory, train.samples, done.step)
    stack.enter_context(reporter)
    reporter.show_plan()
    title = f"{group.devices} device{'s' * (group.devices > 1)}, plan {part.plan.name}"
    samples_done = done.epoch * train.samples + done.batch * settings.batch
    start_s = time.perf_counter()
    with screen.progress(title, settings.epochs, train.samples, samples_done, test.samples) as bar:
        reporter.observe(bar)
        rebalancer = _build_rebalancer(part, training, plans, reporter) if settings.rebalances else None
        replan = plans.anew(rebalancer)
        known = None
        if job.invitation is not None:
            print("measures itself while the others train", flush=True)
            known = measured_alone(job.invitation.offer, settings, model, example, group, slowdown)
        elif group.devices == 1 and settings.listen is not None:
            asked = {"timed": True, "measured": settings.plan == AUTO}
            alone = measured_alone(asked, settings, model, example, group, slowdown)
            replan.known = replace(replan.known, speeds=alone.speeds, measured=alone.measured)
        admission = TrainAdmission(part, splits.fingerprint, replan, reporter)
        members = build_members(admission, training, plans, job.invitation, known)
        with nullcontext() if members is None else handle_signals(members):
            history = fit(
                training,
                train,
                test,
                settings.epochs,
                reporter.observers,
                rebalancer,
                checkpointer,
                screen.line,
                members,
            )
    uses = reporter.usage(members, time.perf_counter() - start_s)
    screen.usage(uses, history)
    screen.best(history)
    reporter.on_end(plans[0] if rebalancer is None else rebalancer.autotune.plan, uses)
    trained = [reporter.devices[device] for device in group.ids]
    return FinishedTraining(history, splits, trained, uses, plans[0].inexact, directory)


def load_images(settings: Settings) -> Splits:
    splits = load(
        settings.data, settings.data_dir, image_size=settings.image_size, test_fraction=settings.test_fraction
    )
    return splits if settings.limit is None else splits.first(settings.limit)


def _agreed_images(settings: Settings, group: Group, screen: Screen) -> Splits:
    """Load the images. Refuse a net, a batch or an augmentation that does not fit them, and devices with other images."""
    if settings.net.partition(":")[0] in PER_PIXEL:
        raise InputError(
            f"--net {settings.net} gives a class for every pixel, and these images have one label each: train it in Python, "
            "with convoy.loss; convoy measure, and plan, predict and simulate with --outputs where-computed, take it as it is"
        )
    splits = load_images(settings)
    count = len(splits.train)
    if settings.batch > count:
        raise InputError(
            f"--batch {settings.batch} with {count} training images: no step has more images than there are; give --batch "
            f"{count} or less"
        )
    if settings.augment is not None:
        augment = read_augment(settings.augment, splits.train.mean, splits.train.std)
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


def _make_plans(
    settings: Settings, group: Group, screen: Screen, model: nn.Module, example: Tensor, slowdown: float
) -> Plans:
    """Return the plan and its alternatives. The devices are measured if the settings ask for it."""
    measures = settings.plan == AUTO and settings.fleet is None
    if settings.plan != AUTO:
        title = "every device times the model's layers"
    else:
        title = "the devices are measured and planned for" if measures else "the planner reads the fleet"
    is_quick = settings.speeds is not None or group.devices == 1
    about_s = settings.budget_s if measures else None
    with nullcontext(lambda *_: None) if is_quick else Wait(screen.console, title, about_s) as progress:
        plans = make_plans(
            model, example, settings.micro_batch, group,
            plan=settings.plan if settings.plan in (*PLANS, AUTO) else Plan.load(Path(settings.plan)),
            speeds=settings.speeds, reduce=settings.reduce, wire=settings.wire, slowdown=slowdown,
            budget_s=settings.budget_s, fleet=settings.fleet, precision=settings.precision,
            optimizer=settings.optimizer_state, net=settings.net, micro_batches=settings.accumulate, progress=progress,
        )  # fmt: skip
    for remark in [] if plans.measured is None else remarks(plans.measured):
        screen.line(remark)
    return plans


def build_loaders(settings: Settings, splits: Splits, part: Distributed | None) -> tuple[Loader, Loader]:
    """Return loaders of micro-batches to train on and to test on."""
    size, workers = settings.micro_batch, settings.workers
    train = loader(splits.train, size, part, seed=settings.seed, workers=workers, augment=settings.augment)
    return train, loader(splits.test, max(size, 100), part, shuffle=False, workers=workers)


def build_training(settings: Settings, model: nn.Module, train: Loader) -> Training:
    """Return the model, distributed or not, with its optimizer, schedule, weight average and scaler."""
    optimizer = build_optimizer(settings.optimizer, model, settings.lr, settings.momentum, settings.weight_decay)
    steps_per_epoch = math.ceil(len(train) / settings.accumulate)
    schedule = Schedule(
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


def _build_rebalancer(part: Distributed, training: Training, plans: Plans, reporter: Reporter) -> Rebalancer:
    if len(plans) > 1:
        reporter.screen.line(
            f"{len(plans)} plans are predicted to take nearly as long: training tries each for some steps."
        )
    return Rebalancer(part, training.optimizer, tell=reporter.on_decision, others=plans[1:])


# --- --compare --------------------------------------------------------------------------------------------------------------


@dataclass
class _Slowed(Training):
    """Training in plain PyTorch on a device that is slowed down as those of the fleet are."""

    clock: Clock = field(kw_only=True)

    def _backward(self, x: Tensor, y: Tensor, part: float) -> Tensor:
        with self.clock.compute("all layers", "forward and backward"):
            return super()._backward(x, y, part)


def _compare_with_one_device(settings: Settings, done: FinishedTraining, screen: Screen) -> None:
    """Train the same in plain PyTorch on one CPU, slowed down as the fastest device is, and print both results."""
    model = UnderAutocast(build_model(settings, done.splits), settings.precision)
    train, test = build_loaders(settings, done.splits, None)
    slowdown = min(slowdown for _, _, slowdown in done.devices)
    training = build_training(settings, model, train)
    slowed = _Slowed(**vars(training), clock=Clock(torch.device("cpu"), slowdown))
    title = "one device, plain PyTorch" + (f", slowed down {slowdown:g}x" if slowdown != 1 else "")
    with screen.progress(title, settings.epochs, train.samples, tests=test.samples) as bar:
        alone = fit(slowed, train, test, settings.epochs, bar, tell=screen.line)
    rounding = f"rounding of {settings.precision}, which grows from step to step; in float64 they agree to 1e-10"
    reason = f"INEXACT: {done.inexact}" if done.inexact else rounding
    screen.comparison(done.history, alone, done.devices, done.uses, reason)
