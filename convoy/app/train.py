"""What each device of a training job does, from joining to leaving."""

import math
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from convoy.adapt.rebalance import Decision, Reshare
from convoy.app.assembly import build_keeper, build_loaders, build_training
from convoy.app.auto import Chosen, choose
from convoy.app.inputs import build_model, check, check_outputs, example_of, load_images
from convoy.checkpoint import Progress
from convoy.comm.agreement import difference, gather
from convoy.comm.group import Group
from convoy.comm.processes import join
from convoy.config.files import write_whole
from convoy.config.run_file import Run, to_toml
from convoy.config.settings import AUTO, Settings, key_of
from convoy.data import Splits
from convoy.errors import MismatchError
from convoy.model.tracing import TracedModel, trace
from convoy.plan.explain import layer_rows, step_lines, work_shares
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.planner.predict import working
from convoy.profile.layers import given_speeds, measure_speeds
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, RunHeader, check_directory, make_directory
from convoy.runlog.observers import Observers, StepTimer, TensorBoard, Utilization
from convoy.runlog.schema import DeviceLine, EndLine
from convoy.runlog.writer import RunLog
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import mark_pieces
from convoy.runtime.precision import UnderAutocast, compute_in
from convoy.train.controller import Rebalancer
from convoy.train.loop import History, Observer, Training, fit


def run_device(run: Run) -> None:
    """What each device of a job does."""
    settings = run.settings
    check(settings)
    torch.manual_seed(settings.seed)
    with ExitStack() as stack:
        # Alone, a device named on the command line; in a job of several, the launcher has told each its own.
        names = settings.device_names
        named = names[0] if len(names) == 1 and names[0] != "auto" else None
        group = stack.enter_context(join(named, timeout_s=settings.timeout_s))
        _agree(settings, group)
        screen = Screen(visible=group.device == 0)
        if group.device == 0:
            check_outputs(settings)
            check_directory(settings)
            if settings.explain:
                screen.settings(run.rows())
        history, splits, inexact, directory = _train(run, group, screen, stack)
    # The others are free to go while device 0 trains alone beside them.
    if settings.compare and screen.visible:
        _train_alone(settings, splits, history, screen, inexact)
    if directory is not None:
        screen.lines([f"A page of this run: convoy report {shlex.quote(str(directory.run))}"])


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


def _train(
    run: Run, group: Group, screen: Screen, stack: ExitStack
) -> tuple[History, Splits, str, RunDirectory | None]:
    settings = run.settings
    splits = load_images(settings)
    _agree_on_data(splits, group)
    if splits.notes:
        screen.lines([f"  {note}" for note in splits.notes])
    model, example = build_model(settings, splits), example_of(splits)
    traced = trace(model, example)
    slowdown = settings.slowdowns[group.device] * _imposed_slowdown()
    chosen = _choose(settings, group, traced, model, slowdown, screen) if settings.plan == AUTO else None
    plan, speeds = (chosen.plan, chosen.speeds) if chosen else _plan(settings, group, traced, model, slowdown, screen)
    devices = _devices(settings, group)
    _tell_fleet(settings, devices, speeds, plan, traced, screen)
    part = Distributed(model, plan, group, example, slowdown=slowdown)
    mark_pieces(part)
    compute_in(part, settings.precision)
    if group.device == 0:
        _save(settings, plan)
    steps = part.steps(settings.pass_batch)
    screen.plan(plan, layer_rows(plan, traced.graph), work_shares(steps, traced.graph))
    if settings.explain:
        screen.lines(step_lines(steps, traced.graph))
    train, test = build_loaders(settings, splits, part)
    if settings.accumulate > 1:
        screen.lines([f"A step of {settings.batch} samples is {settings.accumulate} passes of {settings.pass_batch}."])
    training = build_training(settings, part, train)
    keeper = build_keeper(settings, training, screen)
    done = keeper.progress if keeper is not None else Progress()
    # Once nothing can refuse the job any more: until then an older log stays as it is.
    directory, log = make_directory(settings) if group.device == 0 else None, None
    header = RunHeader(
        run, devices, speeds, plan, traced.graph, chosen.measured if chosen else None, train.samples,
        math.ceil(len(train) / settings.accumulate), done.step,
    )  # fmt: skip
    if directory is not None:
        log = header.open_log(directory, training.rate, stack)
    observers = _observers(settings, training, group, part, log, done.step, stack)
    part.clock.reset()
    timer = StepTimer(settings.batch)
    title, seen = f"{group.devices} devices, plan {plan.name}", done.epoch * train.samples + done.batch * settings.batch
    rebalances = settings.rebalances(device for device, _, _ in devices)
    with screen.progress(title, settings.epochs, train.samples, seen) as bar:
        rebalancer = None
        if rebalances:
            others = [each.plan for each in chosen.others] if chosen is not None else []
            if others:
                screen.lines(
                    [f"{len(others) + 1} plans are predicted to take nearly as long: some steps by each will tell."]
                )
            tell = _teller(screen, timer, log, header.predict)
            rebalancer = Rebalancer(part, training.optimizer, tell=tell, others=others)
        history = fit(training, train, test, settings.epochs, Observers(timer, bar, *observers), rebalancer, keeper)
    uses = _uses(settings, group, part, speeds, work_shares(part.steps(settings.pass_batch), traced.graph))
    followed = plan if rebalancer is None else rebalancer.trial.plan
    _report(screen, log, history, uses, timer, _predicted_s(settings, chosen, followed))
    return history, splits, plan.inexact, directory


def _predicted_s(settings: Settings, chosen: Chosen | None, plan: Plan) -> float | None:
    """Of a step of all its passes; None where nothing was predicted for the plan."""
    pass_s = chosen.predicted_s(plan) if chosen is not None else None
    return pass_s * settings.accumulate if pass_s is not None else None


def _observers(
    settings: Settings,
    training: Training,
    group: Group,
    part: Distributed,
    log: RunLog | None,
    step: int,
    stack: ExitStack,
) -> list[Observer]:
    """Who writes down how the training goes. Every device counts where its time goes, one writes."""
    observers: list[Observer] = [Utilization(group, part.clock, log)]
    if log is not None:
        observers.append(log)
    if settings.tensorboard is not None and group.device == 0:
        observers.append(stack.enter_context(TensorBoard(settings.tensorboard, step, training.rate)))
    return observers


def _report(
    screen: Screen,
    log: RunLog | None,
    history: History,
    uses: Sequence[DeviceLine],
    timer: StepTimer,
    predicted_s: float | None,
) -> None:
    """What can be told when all is over."""
    screen.usage(uses, history)
    screen.best(history)
    if predicted_s is not None:
        screen.lines([timer.beside(predicted_s)])
    if log is not None:
        for use in uses:
            log.write(use)
        log.write(EndLine(step_s=timer.step_s))


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


def _plan(
    settings: Settings, group: Group, traced: TracedModel, model: nn.Module, slowdown: float, screen: Screen
) -> tuple[Plan, Speeds]:
    saved = None if settings.plan in PLANS else Plan.load(Path(settings.plan))
    if saved is not None:
        # A wrong plan is found before the seconds of measuring.
        saved.check(traced.graph, group.devices)
    if settings.speeds is not None:
        speeds = given_speeds(settings.speeds, group.devices)
    else:
        with screen.working("every device times the model's layers"):
            clock = Clock(group.torch_device, slowdown)
            speeds = measure_speeds(group, traced, model, settings.pass_batch, clock, settings.precision)
    if saved is None:
        made = named_plan(settings.plan, traced.graph, settings.pass_batch, speeds, settings.reduce)
    else:
        made = saved if settings.reduce is None else replace(saved, reduce=settings.reduce)
    return (made if settings.wire is None else replace(made, wire=settings.wire)), speeds


def _choose(
    settings: Settings, group: Group, traced: TracedModel, model: nn.Module, slowdown: float, screen: Screen
) -> Chosen:
    """Measure unless a file has the times, and plan."""
    described = os.environ.get("CONVOY_FLEET")
    with screen.working(
        "the devices are measured and planned for" if settings.fleet is None else "the planner reads the fleet"
    ):
        return choose(
            group, traced, model, settings.pass_batch, net=settings.net, file=settings.fleet,
            described=Path(described) if described else None,
            budget_s=settings.budget_s, slowdown=slowdown, optimizer=settings.optimizer_state, reduce=settings.reduce,
            wire=settings.wire or "exact", precision=settings.precision,
        )  # fmt: skip


def _tell_fleet(
    settings: Settings,
    devices: Sequence[tuple[str, str, float]],
    speeds: Speeds,
    plan: Plan,
    traced: TracedModel,
    screen: Screen,
) -> None:
    screen.fleet(devices, speeds, measured=settings.speeds is None)
    idle = [str(d) for d in range(len(devices)) if d not in working(plan, traced.graph)]
    if settings.plan == AUTO and idle:
        screen.lines(
            [f"auto gives device{'s' * (len(idle) > 1)} {', '.join(idle)} nothing to compute: it is faster so."]
        )


def _devices(settings: Settings, group: Group) -> list[tuple[str, str, float]]:
    """Device, host and slow-down of every device."""
    rows = gather(group, "fleet", [str(group.torch_device), os.uname().nodename, torch.get_num_threads()])
    return [
        (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
        for (device, host, threads), slowdown in zip(rows, settings.slowdowns, strict=True)
    ]


def _uses(
    settings: Settings, group: Group, part: Distributed, speeds: Speeds, shares: tuple[float, ...]
) -> list[DeviceLine]:
    rows = gather(group, "use", [part.clock.compute_s, part.clock.exchange_s, sum(group.sent_bytes)])
    total = sum(speeds.devices)
    return [
        DeviceLine(
            device=device, slowdown=settings.slowdowns[device], speed_share=speeds.devices[device] / total,
            work_share=shares[device], compute_s=compute_s, exchange_s=exchange_s, sent_bytes=sent_bytes,
        )
        for device, (compute_s, exchange_s, sent_bytes) in enumerate(rows)
    ]  # fmt: skip


def _train_alone(settings: Settings, splits: Splits, history: History, screen: Screen, inexact: str) -> None:
    """The same training by plain PyTorch on one device: what Convoy must equal."""
    model = UnderAutocast(build_model(settings, splits), settings.precision)
    train, test = build_loaders(settings, splits, None)
    with screen.progress("one device, plain PyTorch", settings.epochs, train.samples) as bar:
        alone = fit(build_training(settings, model, train), train, test, settings.epochs, bar)
    screen.comparison(history, alone, inexact=inexact, precision=settings.precision)


def _imposed_slowdown() -> float:
    """What a rehearsal asks of this device (its fleet file's `slowdown`)."""
    return float(os.environ.get("CONVOY_SLOWDOWN", "1"))
