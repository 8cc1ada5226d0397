"""What each device of `convoy train` does, from joining to leaving: the public API, with what a person sees and keeps of it."""

import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convoy._version import __version__
from convoy.adapt.autotune import is_end
from convoy.adapt.rebalance import Decision, Reshare
from convoy.api import distribute, loader, make_plans
from convoy.app.checks import check, check_outputs
from convoy.app.handover import Handover
from convoy.app.inputs import build_model, check_images, check_resume, device_named, example_of, load_images
from convoy.app.joining import (
    Coming,
    JoiningDevices,
    Opening,
    facts_of,
    home_of,
    measured_alone,
    run_of,
    telling_why,
)
from convoy.app.without_compiler import leave_compiler_out
from convoy.checkpoint import Checkpointer, Progress
from convoy.comm import roster
from convoy.comm.accelerator import limit_memory, set_modes
from convoy.comm.agreement import difference, from_first, gather
from convoy.comm.changing import ChangingGroup
from convoy.comm.channel import Words
from convoy.comm.environment import ProcessEnv, imposed_slowdown
from convoy.comm.group import AloneGroup, Group
from convoy.comm.launcher import Launcher
from convoy.comm.newcomer import Entrance
from convoy.comm.processes import join, own_device, watch_parent
from convoy.comm.rendezvous import credentials_of
from convoy.comm.signals import hearing_signals
from convoy.config.run_file import RunSettings, to_toml
from convoy.config.settings import Settings, key_of
from convoy.data import Splits
from convoy.errors import MismatchError
from convoy.files import write_whole
from convoy.plan.compile import compile_all
from convoy.plan.explain import differences, layer_rows, step_lines, work_shares
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.plan.program_text import program_lines
from convoy.plan.steps import passes_of
from convoy.planner.known import Known
from convoy.planner.predict import working
from convoy.profile.anew import Replanner
from convoy.profile.auto import Plans, expect_measured
from convoy.report.measured import remarks
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, RunHeader, check_directory, make_directory
from convoy.runlog.loggers import Logger, to_mlflow, to_tensorboard, to_wandb
from convoy.runlog.meters import Meters
from convoy.runlog.observers import StepTimer, Utilization
from convoy.runlog.schema import DeviceLine, EndLine
from convoy.runlog.writer import RunLog
from convoy.runtime.average import WeightAverage
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.precision import GradScaler, UnderAutocast
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loop import Recipe, Training, build_optimizer, fit
from convoy.train.lr import Schedule, build_schedule
from convoy.train.members import Members
from convoy.train.observer import Observer, Observers
from convoy.train.record import History


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
    leave_compiler_out()
    check(settings)
    set_modes(settings.tf32, settings.deterministic)
    torch.manual_seed(settings.seed)
    launcher = Launcher.of_process(os.environ)
    with telling_why(launcher), ExitStack() as stack:
        group = stack.enter_context(join(device_named(settings.device_names), timeout_s=settings.timeout_s))
        if settings.listen is not None and group.devices == 1:
            group = ChangingGroup(group)
        _agree(settings, group)
        home_of(settings, group)  # refuses an address that cannot be, before anything takes long
        if settings.memory is not None:
            limit_memory(group.torch_device, settings.memory[min(group.device, len(settings.memory) - 1)])
        screen = Screen(visible=group.device == 0)
        if group.device == 0:
            check_outputs(settings)
            check_directory(settings)
            if settings.explain:
                screen.settings(run.rows())
        from_first(group, "checkpoint: to resume", lambda: check_resume(settings))
        done = _train(run, group, screen, stack, launcher)
    # The others are free to go while device 0 trains alone beside them.
    if settings.compare and screen.visible:
        _train_alone(settings, done, screen)
    if done.directory is not None and screen.visible:
        folder = done.directory.run
        page = _write_page(folder) if settings.page else f"convoy report {shlex.quote(str(folder))}"
        screen.lines([f"A page of this run: {page}"])


def run_newcomer(doors: Sequence[tuple[str, int]], device: str | None, here: Mapping[str, Any]) -> None:
    """What a device does that comes into a training which runs.

    Args:
        doors: where its devices answer.
        device: to compute on; None: as in a job of one.
        here: settings of this device that are its own, by name.

    Raises:
        InputError, MismatchError: there is no such training, it does not take this device, or was started by another version.
        DeviceLostError: it has ended, or went on without this device.
    """
    leave_compiler_out()
    watch_parent()
    launcher = Launcher.of_process(os.environ)
    with telling_why(launcher):
        _come_in(doors, device, here, launcher)


def _come_in(doors: Sequence[tuple[str, int]], device: str | None, here: Mapping[str, Any], launcher: Launcher) -> None:
    env = ProcessEnv(0, 2, 0, None, *doors[0], hosted=False, attempt=0)
    entrance = Entrance(doors, credentials_of(env))
    offer = entrance.hello(HELLO_S)
    if offer["version"] != __version__:
        raise MismatchError(
            f"the job runs Convoy {offer['version']}, this is {__version__}: install the same version on every machine"
        )
    run = run_of(offer, {"devices": device or "auto", **here})
    settings = run.settings
    check(settings)
    set_modes(settings.tf32, settings.deterministic)
    torch.manual_seed(settings.seed)
    torch_device = own_device(device_named(settings.device_names), 0)
    roster.enter(str(offer["job"]), 0, str(torch_device))
    with ExitStack() as stack:
        group = stack.enter_context(ChangingGroup(AloneGroup(torch_device, settings.timeout_s)))
        _train(run, group, Screen(visible=False), stack, launcher, Coming(entrance, offer))


HELLO_S = 10.0
"""How long a training may take to answer who asks to join: it may be just beginning."""


def _train(
    run: RunSettings, group: Group, screen: Screen, stack: ExitStack, launcher: Launcher, coming: Coming | None = None
) -> _Done:
    settings = run.settings
    splits = load_images(settings)
    check_images(settings, splits)
    _agree_on_data(splits, group)
    if splits.notes:
        screen.lines([f"  {note}" for note in splits.notes])
    model, example = build_model(settings, splits), example_of(splits)
    slowdown = settings.slowdowns[group.device] * imposed_slowdown()
    quick = settings.speeds is not None or group.devices == 1
    measures = settings.plan == AUTO and settings.fleet is None
    about_s = settings.budget_s if measures else None
    with nullcontext(lambda *_: None) if quick else screen.working(_planning(settings), about_s) as tell:
        plans = _plans(settings, model, example, group, slowdown, tell)
    for remark in [] if plans.measured is None else remarks(plans.measured):
        screen.line(remark)
    if settings.accumulate == "auto":  # from here on it is a number
        settings = settings.model_copy(update={"accumulate": plans.passes})
        run = replace(run, settings=settings)
        screen.line(f"A step is made in {plans.passes} pass{'es' * (plans.passes > 1)}, as memory asks for.")
    part = distribute(
        model, plans[0], group, example, slowdown=slowdown, precision=settings.precision, compile=settings.compile
    )
    expect_measured(part, plans.measured)
    devices = _devices(settings, group)
    screen.fleet(devices, plans.speeds)
    if group.device == 0 and coming is None:
        _save(settings, plans[0])
    _show_plan(settings, part, screen)
    train, test = build_loaders(settings, splits, part)
    training = build_training(settings, part, train)
    keeper = build_checkpointer(settings, training, screen, stack, begins=coming is None)
    done = keeper.progress if keeper is not None else Progress()
    # Once nothing can refuse the job any more: until then an older log stays as it is.
    directory, graph = _directory(settings, group, coming), part.traced[True].graph
    roster.tell(trains=True, run="" if directory is None else str(directory.run.absolute()))
    header = RunHeader(
        run, devices, plans.speeds, plans[0], graph, plans.measured, train.samples,
        math.ceil(len(train) / settings.passes), done.step,
    )  # fmt: skip
    log = header.open_log(directory, screen.line, stack) if directory is not None and screen.visible else None
    loggers = build_loggers(settings, directory, done.step, screen=screen, stack=stack) if screen.visible else []
    observers: list[Observer] = [Utilization(group, part.clock, log), *([log] if log is not None else []), *loggers]
    part.clock.reset()
    timer = StepTimer(settings.batch)
    title, seen = (
        f"{group.devices} device{'s' * (group.devices > 1)}, plan {part.plan.name}",
        done.epoch * train.samples + done.batch * settings.batch,
    )
    start_s = time.perf_counter()
    with screen.progress(title, settings.epochs, train.samples, seen, test.samples) as bar:
        rebalancer = None
        make = partial(build_loggers, settings, directory, screen=screen, stack=stack)
        observer = Observers(timer, bar, *observers)
        here = Handover(part, screen, header, directory, log, loggers, observer, timer, stack, make)
        observer.observers = (*observer.observers, Meters(group, here.tell_meters, done.step))
        if settings.rebalances:
            tell = _teller(
                screen, timer, lambda: here.log, header.predict, partial(_show_new_plan, part, plans[0], screen)
            )
            rebalancer = _rebalancer(part, training, plans, tell, screen)
        replan = plans.anew(rebalancer) or Replanner(Known(settings.plan, (0,), plans.speeds), rebalancer)
        joining = JoiningDevices(part, splits.fingerprint, replan, here)
        entrance = None
        if coming is None and group.devices == 1 and settings.listen is not None:
            told = {"timed": True, "measured": settings.plan == AUTO}
            known = measured_alone(told, settings, model, example, group, slowdown)
            replan.known = replace(replan.known, speeds=known.speeds, measured=known.measured)
        if coming is not None:
            if not launcher.listens:
                print("measures itself while the others train", flush=True)
            known = measured_alone(coming.offer, settings, model, example, group, slowdown)
            facts = facts_of(part, splits.fingerprint, known, f"host {devices[0][1]}, {devices[0][0]}", devices[0])
            entrance = coming.entrance, facts
        opening = Opening(settings, launcher, came=coming is not None)
        members = build_members(settings, training, here, plans, replan, joining, opening, entrance)
        if members is not None:
            opening.tell(members, replan.known, here)
        with nullcontext() if members is None else hearing_signals(members):
            history = fit(training, train, test, settings.epochs, observer, rebalancer, keeper, screen.line, members)
    wall_s = time.perf_counter() - start_s

    def used() -> list[DeviceLine]:
        shares = work_shares(part.steps(settings.pass_batch), graph)
        return _uses(here, group, part, shares, wall_s, _ids(members, group))

    uses = used() if members is None else members.repeated(used)
    if members is not None:
        members.close()
    log, ids = here.log, _ids(members, group)
    screen.usage(uses, history)
    screen.best(history)
    if part.compiler is not None:
        screen.lines([part.compiler.told()])
    chosen = plans[0] if rebalancer is None else rebalancer.autotune.plan
    predicted_s, within = plans.predicted_s(chosen), plans.within(chosen)
    if predicted_s is not None and within is not None and len(ids) == plans[0].devices:
        screen.lines([timer.beside(predicted_s, within, settings.passes)])
    if log is not None:
        for use in uses:
            log.write(use)
        log.write(EndLine(step_s=timer.step_s))
    return _Done(history, splits, [here.header.devices[d] for d in ids], uses, plans[0].inexact, directory)


def _plans(
    settings: Settings,
    model: nn.Module,
    example: Tensor,
    group: Group,
    slowdown: float,
    tell: Callable[[str, int, int], None],
) -> Plans:
    return make_plans(
        model, example, settings.pass_batch, group,
        plan=settings.plan if settings.plan in (*PLANS, AUTO) else Plan.load(Path(settings.plan)),
        speeds=settings.speeds, reduce=settings.reduce, wire=settings.wire, slowdown=slowdown,
        budget_s=settings.budget_s, fleet=settings.fleet, precision=settings.precision,
        optimizer=settings.optimizer_state, net=settings.net, passes=settings.accumulate, progress=tell,
    )  # fmt: skip


@dataclass
class _Slowed(Training):
    """Training in plain PyTorch on a device that is slowed down as those of the fleet are."""

    clock: Clock = field(kw_only=True)

    def _backward(self, x: Tensor, y: Tensor, part: float) -> Tensor:
        with self.clock.compute("all layers", "forward and backward"):
            return super()._backward(x, y, part)


def _train_alone(settings: Settings, done: _Done, screen: Screen) -> None:
    """The same training by plain PyTorch on one CPU, as slow as the fastest of the fleet: what Convoy must equal."""
    model = UnderAutocast(build_model(settings, done.splits), settings.precision)
    train, test = build_loaders(settings, done.splits, None)
    slowdown = min(slowdown for _, _, slowdown in done.devices)
    training = build_training(settings, model, train)
    slowed = _Slowed(**vars(training), clock=Clock(torch.device("cpu"), slowdown))
    title = "one device, plain PyTorch" + (f", slowed down {slowdown:g}x" if slowdown != 1 else "")
    with screen.progress(title, settings.epochs, train.samples, tests=test.samples) as bar:
        alone = fit(slowed, train, test, settings.epochs, bar, tell=screen.line)
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
    """What lets the training go on with fewer devices, and with more; None where it is not to."""
    model = training.model
    if not settings.goes_on or not isinstance(model, Distributed):
        return None
    home = home_of(settings, model.group) if entrance is None else None
    if model.group.devices == 1 and entrance is None and home is None:
        return None

    def changed(reason: str) -> None:
        waits = members.generation is None  # to be let in
        if entrance is not None and not here.screen.visible and (waits or not opening.launcher.listens):
            title = f"{entrance[1]['title']}: " if opening.launcher.listens else ""
            print(f"{title}{reason}", flush=True)
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
        model, training.optimizer, others=others, every=every, replan=replan, tell=changed, newcomers=joining, home=home,
        entrance=entrance,
    )  # fmt: skip
    return members


def build_loggers(
    settings: Settings, directory: RunDirectory | None, done: int, *, screen: Screen, stack: ExitStack
) -> list[Logger]:
    """Loggers of other projects, as the settings want them, which last as long as `stack`."""
    folder = None if directory is None else directory.folder
    name = None if folder is None else folder.name
    shown = {key_of(name): value for name, value in settings.model_dump(mode="json").items()}
    loggers = []
    if settings.tensorboard is not None:
        loggers.append(to_tensorboard(settings.tensorboard, done, screen.line))
    if settings.wandb is not None:
        loggers.append(to_wandb(settings.wandb, name, shown, folder, screen.line))
    if settings.mlflow is not None:
        loggers.append(to_mlflow(settings.mlflow, name, shown, screen.line))
    return [stack.enter_context(logger) for logger in loggers]


# --------------------------------------------------------------------------------------- what all devices must know alike


def _ids(members: Members | None, group: Group) -> tuple[int, ...]:
    """Which of the devices that began train now."""
    generation = None if members is None else members.generation
    return tuple(range(group.devices)) if generation is None else generation.members


def _directory(settings: Settings, group: Group, coming: Coming | None) -> RunDirectory | None:
    """Where device 0 logs the run. The others know it, too: one of them may have to go on with it."""
    if coming is not None:
        places = coming.offer["directory"]
        return None if places is None else RunDirectory(Path(places[0]), None if places[1] is None else Path(places[1]))

    def make() -> list[str | None] | None:
        made = make_directory(settings)
        return None if made is None else [str(made.log), None if made.folder is None else str(made.folder)]

    if (row := from_first(group, "directory of the run", make)) is None:
        return None
    return RunDirectory(Path(row[0]), None if row[1] is None else Path(row[1]))


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
    here: Handover, group: Group, part: Distributed, shares: tuple[float, ...], wall_s: float, ids: Sequence[int]
) -> list[DeviceLine]:
    rows = gather(group, "use", [part.clock.compute_s, part.clock.exchange_s, sum(group.sent_bytes), wall_s])
    speeds = [here.header.speeds.devices[d] for d in ids]
    return [
        DeviceLine(
            device=ids[device], slowdown=here.header.devices[ids[device]][2], speed_share=speeds[device] / sum(speeds),
            work_share=shares[device], compute_s=compute_s, exchange_s=exchange_s, sent_bytes=sent_bytes, wall_s=device_s,
        )
        for device, (compute_s, exchange_s, sent_bytes, device_s) in enumerate(rows)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- what a person is told


def _write_page(folder: Path) -> str:
    from convoy.report.page import write_report  # with what fills in pages, after the training

    return str(write_report(folder))


def _planning(settings: Settings) -> str:
    if settings.plan != AUTO:
        return "every device times the model's layers"
    return "the devices are measured and planned for" if settings.fleet is None else "the planner reads the fleet"


def _show_plan(settings: Settings, part: Distributed, screen: Screen) -> None:
    plan, graph, steps = part.plan, part.traced[True].graph, part.steps(settings.pass_batch)
    idle = [str(d) for d in range(plan.devices) if d not in working(plan, graph)]
    if settings.plan == AUTO and idle:
        screen.lines(
            [f"auto gives device{'s' * (len(idle) > 1)} {', '.join(idle)} nothing to compute: it is faster so."]
        )
    screen.plan(plan, layer_rows(plan, graph), work_shares(steps, graph))
    if settings.explain:
        steps = lower(plan, graph, pass_=[*passes_of(settings.passes)][-1])
        screen.lines(step_lines(steps))
        for program in compile_all(steps, graph):
            screen.lines(program_lines(program))
    if settings.passes > 1:
        sent = [sum(lower(plan, graph, pass_=kind).traffic().values()) for kind in ("first", "middle", "last")]
        before = (
            f"each pass before it {sent[0]:,}"
            if sent[0] == sent[1]
            else f"the first {sent[0]:,}, which gathers weights"
        )
        before += f", each between {sent[1]:,}" * (sent[0] != sent[1] and settings.passes > 2)
        screen.lines(
            [
                f"A step of {settings.batch} samples is {settings.passes} passes of {settings.pass_batch}; gradients are "
                f"summed in the last, which sends {sent[2]:,} bytes, {before}."
            ]
        )


def _show_new_plan(part: Distributed, shown: Plan, screen: Screen) -> None:
    """The table of the plan that goes on, where it is not the one that was shown: shares change from its own."""
    plan, graph = part.plan, part.traced[True].graph
    if plan != shown:
        screen.plan(plan, layer_rows(plan, graph), work_shares(lower(plan, graph), graph), part.group.ids)


def _save(settings: Settings, plan: Plan) -> None:
    """What was asked for as files, before the training that they are for."""
    if settings.save_run is not None:
        write_whole(settings.save_run, to_toml(settings))
    if settings.save_plan is not None:
        write_whole(settings.save_plan, plan.to_json())


def _rebalancer(
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


def _teller(
    screen: Screen,
    timer: StepTimer,
    log_of: Callable[[], RunLog | None],
    predict: Callable[[Plan, RunLog, bool], None],
    on_chosen: Callable[[], None] = lambda: None,
) -> Callable[[int, Decision], None]:
    """Says what was changed and why, on the screen and in the log; `on_chosen` when one of several plans goes on."""

    def tell(step: int, decision: Decision) -> None:
        screen.lines([f"  step {step}: {decision.reason}"])
        if is_end(decision):
            on_chosen()
        if (log := log_of()) is not None and isinstance(decision, Reshare):
            log.reshare(step, decision)
            predict(decision.plan, log, bool(decision.changes))
        timer.restart()

    return tell
