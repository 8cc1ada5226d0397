"""What each device of `convoy train` does, from joining to leaving: the public API, with what a person sees and keeps of it."""

import math
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from convoy.adapt.rebalance import Decision, Reshare
from convoy.api import distribute, loader, make_plans
from convoy.app.inputs import build_model, check, check_outputs, device_named, example_of, imposed_slowdown, load_images
from convoy.checkpoint import Checkpointer, Progress
from convoy.comm.agreement import difference, gather
from convoy.comm.group import Group
from convoy.comm.processes import join
from convoy.config.files import write_whole
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.settings import Settings, key_of
from convoy.data import Splits
from convoy.errors import InputError, MismatchError
from convoy.plan.compile import compile_all
from convoy.plan.explain import layer_rows, step_lines, work_shares
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.plan.program_text import program_lines
from convoy.planner.predict import working
from convoy.profile.auto import Plans, expect_measured
from convoy.report.page import write_report
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, RunHeader, check_directory, make_directory
from convoy.runlog.observers import Observers, StepTimer, TensorBoard, Utilization
from convoy.runlog.schema import DeviceLine, EndLine
from convoy.runlog.writer import RunLog
from convoy.runtime.average import WeightAverage
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler, UnderAutocast
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import History, Observer, Recipe, Training, build_optimizer, fit
from convoy.train.lr import Schedule, build_schedule


@dataclass(frozen=True)
class _Done:
    """A training that is over, as one of its devices knows it."""

    history: History
    splits: Splits
    devices: Sequence[tuple[str, str, float]]
    uses: Sequence[DeviceLine]
    inexact: str
    directory: RunDirectory | None


def run_device(run: RunSettings) -> None:
    """What each device of a job does."""
    settings = run.settings
    check(settings)
    torch.manual_seed(settings.seed)
    with ExitStack() as stack:
        group = stack.enter_context(join(device_named(settings.device_names), timeout_s=settings.timeout_s))
        _agree(settings, group)
        screen = Screen(visible=group.device == 0)
        if group.device == 0:
            check_outputs(settings)
            check_directory(settings)
            if settings.explain:
                screen.settings(run.rows())
        done = _train(run, group, screen, stack)
    # The others are free to go while device 0 trains alone beside them.
    if settings.compare and screen.visible:
        _train_alone(settings, done, screen)
    if done.directory is not None:
        folder = done.directory.run
        page = str(write_report(folder)) if settings.page else f"convoy report {shlex.quote(str(folder))}"
        screen.lines([f"A page of this run: {page}"])


def _train(run: RunSettings, group: Group, screen: Screen, stack: ExitStack) -> _Done:
    settings = run.settings
    splits = load_images(settings)
    _agree_on_data(splits, group)
    if splits.notes:
        screen.lines([f"  {note}" for note in splits.notes])
    model, example = build_model(settings, splits), example_of(splits)
    slowdown = settings.slowdowns[group.device] * imposed_slowdown()
    with nullcontext() if settings.speeds is not None else screen.working(_planning(settings)):
        plans = make_plans(
            model, example, settings.pass_batch, group,
            plan=settings.plan if settings.plan in (*PLANS, AUTO) else Plan.load(Path(settings.plan)),
            speeds=settings.speeds, reduce=settings.reduce, wire=settings.wire, slowdown=slowdown,
            budget_s=settings.budget_s, fleet=settings.fleet, precision=settings.precision,
            optimizer=settings.optimizer_state, net=settings.net,
        )  # fmt: skip
    plan = plans[0]
    part = distribute(model, plan, group, example, slowdown=slowdown, precision=settings.precision)
    expect_measured(part, plans.measured)
    graph, steps = part.traced[True].graph, part.steps(settings.pass_batch)
    devices = _devices(settings, group)
    screen.fleet(devices, plans.speeds, measured=settings.speeds is None)
    idle = [str(d) for d in range(group.devices) if d not in working(plan, graph)]
    if settings.plan == AUTO and idle:
        screen.lines(
            [f"auto gives device{'s' * (len(idle) > 1)} {', '.join(idle)} nothing to compute: it is faster so."]
        )
    if group.device == 0:
        _save(settings, plan)
    screen.plan(plan, layer_rows(plan, graph), work_shares(steps, graph))
    if settings.explain:
        screen.lines(step_lines(steps))
        for program in compile_all(steps, graph):
            screen.lines(program_lines(program))
    train, test = build_loaders(settings, splits, part)
    if settings.accumulate > 1:
        screen.lines([f"A step of {settings.batch} samples is {settings.accumulate} passes of {settings.pass_batch}."])
    training = build_training(settings, part, train)
    keeper = build_checkpointer(settings, training, screen)
    done = keeper.progress if keeper is not None else Progress()
    # Once nothing can refuse the job any more: until then an older log stays as it is.
    directory, log = make_directory(settings) if group.device == 0 else None, None
    header = RunHeader(
        run, devices, plans.speeds, plan, graph, plans.measured, train.samples,
        math.ceil(len(train) / settings.accumulate), done.step,
    )  # fmt: skip
    if directory is not None:
        log = header.open_log(directory, training.rate, stack)
    observers: list[Observer] = [Utilization(group, part.clock, log)]
    if log is not None:
        observers.append(log)
    if settings.tensorboard is not None and group.device == 0:
        observers.append(stack.enter_context(TensorBoard(settings.tensorboard, done.step, training.rate)))
    part.clock.reset()
    timer = StepTimer(settings.batch)
    title, seen = f"{group.devices} devices, plan {plan.name}", done.epoch * train.samples + done.batch * settings.batch
    with screen.progress(title, settings.epochs, train.samples, seen) as bar:
        rebalancer = None
        if settings.rebalances(device for device, _, _ in devices):
            if len(plans) > 1:
                screen.lines(
                    [f"{len(plans)} plans are predicted to take nearly as long: some steps by each will tell."]
                )
            tell = _teller(screen, timer, log, header.predict)
            rebalancer = Rebalancer(part, training.optimizer, tell=tell, others=plans[1:])
        history = fit(training, train, test, settings.epochs, Observers(timer, bar, *observers), rebalancer, keeper)
    uses = _uses(settings, group, part, plans, work_shares(part.steps(settings.pass_batch), graph))
    screen.usage(uses, history)
    screen.best(history)
    predicted_s = plans.predicted_s(plan if rebalancer is None else rebalancer.autotune.plan)
    if predicted_s is not None:
        screen.lines([timer.beside(predicted_s * settings.accumulate)])
    if log is not None:
        for use in uses:
            log.write(use)
        log.write(EndLine(step_s=timer.step_s))
    return _Done(history, splits, devices, uses, plan.inexact, directory)


@dataclass
class _Slowed(Training):
    """Training in plain PyTorch on a device that is slowed down as those of the fleet are."""

    clock: Clock = field(kw_only=True)

    def backward(self, x: Tensor, y: Tensor, part: float) -> float:
        with self.clock.compute("all layers", "forward and backward"):
            return super().backward(x, y, part)


def _train_alone(settings: Settings, done: _Done, screen: Screen) -> None:
    """The same training by plain PyTorch on one CPU, as slow as the fastest of the fleet: what Convoy must equal."""
    model = UnderAutocast(build_model(settings, done.splits), settings.precision)
    train, test = build_loaders(settings, done.splits, None)
    slowdown = min(slowdown for _, _, slowdown in done.devices)
    training = build_training(settings, model, train)
    slowed = _Slowed(**vars(training), clock=Clock(torch.device("cpu"), slowdown))
    title = "one device, plain PyTorch" + (f", slowed down {slowdown:g}x" if slowdown != 1 else "")
    with screen.progress(title, settings.epochs, train.samples) as bar:
        alone = fit(slowed, train, test, settings.epochs, bar)
    screen.comparison(done.history, alone, done.devices, done.uses, inexact=done.inexact, precision=settings.precision)


# ------------------------------------------------------------------------------------- what trains, as the settings say


def build_loaders(settings: Settings, splits: Splits, part: Distributed | None) -> tuple[Loader, Loader]:
    """Batches to train on and to test on, of one pass each."""
    size, workers = settings.pass_batch, settings.workers
    train = loader(splits.train, size, part, seed=settings.seed, workers=workers, augment=settings.augment)
    return train, loader(splits.test, max(size, 100), part, shuffle=False, workers=workers)


def build_training(settings: Settings, model: nn.Module, train: Loader) -> Training:
    """The model with its optimizer, schedule, average and scaler; for a distributed model and an ordinary one."""
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


def build_checkpointer(settings: Settings, training: Training, screen: Screen) -> Checkpointer | None:
    """What saves the run. Where it is resumed, the model and its training are then where it goes on.

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


# --------------------------------------------------------------------------------------- what all devices must know alike


def _agree(settings: Settings, group: Group) -> None:
    """Every device must have been started with the same settings, where they decide what is computed.

    Raises:
        MismatchError: names the devices and the first setting that differs.
    """
    rows = gather(group, "settings", settings.decisive)
    for name in rows[0]:
        if found := difference([row[name] for row in rows]):
            raise MismatchError(
                f"the devices were started with different options: --{key_of(name)} is {found}; start every device with the "
                "same options"
            )


def _agree_on_data(splits: Splits, group: Group) -> None:
    """Every device must have loaded the same images.

    Raises:
        MismatchError: names the devices that were given other images, and what they have.
    """
    if found := difference(group.agree("data", splits.fingerprint)):
        raise MismatchError(
            f"the devices were given different data: {found}; copy the same files to every machine, and use one version of "
            "Pillow"
        )


def _devices(settings: Settings, group: Group) -> list[tuple[str, str, float]]:
    """Device, host and slow-down of every device."""
    rows = gather(group, "fleet", [str(group.torch_device), os.uname().nodename, torch.get_num_threads()])
    return [
        (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
        for (device, host, threads), slowdown in zip(rows, settings.slowdowns, strict=True)
    ]


def _uses(
    settings: Settings, group: Group, part: Distributed, plans: Plans, shares: tuple[float, ...]
) -> list[DeviceLine]:
    rows = gather(group, "use", [part.clock.compute_s, part.clock.exchange_s, sum(group.sent_bytes)])
    speeds = plans.speeds.devices
    return [
        DeviceLine(
            device=device, slowdown=settings.slowdowns[device], speed_share=speeds[device] / sum(speeds),
            work_share=shares[device], compute_s=compute_s, exchange_s=exchange_s, sent_bytes=sent_bytes,
        )
        for device, (compute_s, exchange_s, sent_bytes) in enumerate(rows)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- what a person is told


def _planning(settings: Settings) -> str:
    if settings.plan != AUTO:
        return "every device times the model's layers"
    return "the devices are measured and planned for" if settings.fleet is None else "the planner reads the fleet"


def _save(settings: Settings, plan: Plan) -> None:
    """What was asked for as files, before the training that they are for."""
    if settings.save_run is not None:
        write_whole(settings.save_run, to_toml(settings))
    if settings.save_plan is not None:
        write_whole(settings.save_plan, plan.to_json())


def _teller(
    screen: Screen, timer: StepTimer, log: RunLog | None, predict: Callable[[Plan, RunLog, bool], None]
) -> Callable[[int, Decision], None]:
    """Says what was changed and why, on the screen and in the log."""

    def tell(step: int, decision: Decision) -> None:
        screen.lines([f"  step {step}: {decision.reason}"])
        if log is not None and isinstance(decision, Reshare):
            log.reshare(step, decision)
            predict(decision.plan, log, bool(decision.changes))
        timer.restart()

    return tell
