"""One line, `prepare`, or four: join (elastic/entrance.py), make_plan, distribute, loader. And what a script does only once."""

import builtins
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, Dataset

from convoy.comm.collectives import agree_on_modes, from_first
from convoy.comm.environment import read_process_env
from convoy.comm.group import Group, index_in_job
from convoy.data.augment import read_augment
from convoy.elastic.entrance import join
from convoy.errors import InputError, MismatchError, PlanError
from convoy.fleet import Fleet
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.redistribute import Sum
from convoy.machine.accelerator import random_state_kept
from convoy.measure.device_info import describe_device, fleet_of
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.measure.replanner import Replanner
from convoy.measure.speeds import given_speeds, measure_speeds
from convoy.measure.timing import Progress
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel, trace, unwrapped
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import check_alone, choose, working
from convoy.planner.request import PlanRequest
from convoy.planner.spare import SparePrice, spare_price
from convoy.runtime.clock import Clock
from convoy.runtime.module import Distributed
from convoy.runtime.precision import compute_in, dtype_named
from convoy.runtime.shard_guards import check_not_distributed
from convoy.simulate.interval import Within, around
from convoy.simulate.memory import MemoryLimits
from convoy.simulate.table import Measurement, read_fleet_file
from convoy.train.adopt import AdoptedLoader, batch_size_of, check_loader, first_samples, rebind, remembered
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader

BUDGET_S = 20.0
"""Default seconds for measuring, for the plan "auto"."""

UNCERTAIN = 2.0
"""If the high end of an interval is above this multiple of its low end, the choice is uncertain: devices are measured again."""

_group: Group | None = None
"""That of this process, once `prepare` has joined one: a second model trains on the same devices."""


@dataclass(frozen=True, slots=True)
class Plans(Sequence[Plan]):
    """The plan to train by, then those that are predicted to take nearly as long.

    Attributes:
        request: what they were made for, with what is known of the devices.
        step_s: predicted seconds of a micro-batch by each plan; empty if nothing was predicted.
        spread: the factor within which nine of ten measurements of each lie.
        spare: the cost of snapshots for recovery, by the first plan; None if it is not known.
    """

    plans: tuple[Plan, ...]
    request: PlanRequest = field(compare=False)
    step_s: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    spare: SparePrice | None = None

    @property
    def speeds(self) -> Speeds:
        """Samples/s of each device alone, or as they were given."""
        assert self.request.fleet.speeds is not None
        return self.request.fleet.speeds

    @property
    def measured(self) -> Measurement | None:
        """The times that were planned with, for `auto`."""
        return self.request.fleet.measured

    def anew(self, rebalancer: Rebalancer | None = None) -> Replanner:
        """Return what plans again when the devices change: `Members(model, optimizer, replan=plans.anew())`.

        Args:
            rebalancer: corrects what was measured.
        """
        return Replanner(self.request, rebalancer)

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]

    def predicted_s(self, plan: Plan) -> float | None:
        """Return the predicted seconds of a micro-batch by one of the plans; None for any other plan."""
        return next((step_s for each, step_s in zip(self.plans, self.step_s, strict=False) if each == plan), None)

    def within(self, plan: Plan) -> Within | None:
        """Return the interval of nine of ten measurements of it; None for any other plan."""
        rows = zip(self.plans, self.step_s, self.spread, strict=False)
        return next((around(step_s, spread) for each, step_s, spread in rows if each == plan), None)


def prepare(
    model: nn.Module,
    optimizer: Optimizer | None,
    loader: DataLoader[Any] | Dataset[Any],
    *more: DataLoader[Any],
    plan: str | Plan = AUTO,
    batch_size: int | None = None,
    parts: bool = False,
    group: Group | None = None,
    speeds: Sequence[float] | None = None,
    fleet: Path | None = None,
    budget_s: float = BUDGET_S,
    precision: str = "float32",
    slowdown: float = 1.0,
    compile: bool = False,
    outputs: OutputPlace | None = None,
) -> tuple[Any, ...]:
    """A model, its optimizer and its loader, for training on all devices of the job. Every device calls it.

    ::

        model, optimizer, loader = convoy.prepare(model, optimizer, loader)

    The training loop stays as it is. Where there is no job, the script trains on one device, with the same numbers.

    Args:
        model: an ordinary module; device 0's weights count. It is taken over, as by DistributedDataParallel: its modules and
            whatever they share with the script stay the same objects. So do its parameters where the plan copies them to every
            device; where the plan splits them, old references to parameters raise when they are used.
        optimizer: made from `model.parameters()`. It stays the same object, with its groups, settings and what it remembers,
            and works on this device's shards from now on; schedules that hold it go on. None: it is made afterwards.
        loader: an ordinary DataLoader; its batch is the whole batch, of all devices. Or a data set, with `batch_size`.
        more: DataLoaders for tests; they are prepared alike.
        parts: the loaders hand out only this device's part of the inputs, for loops that do nothing with inputs but give
            them to the model. With outputs="where-computed" the labels are those of that part, and no other sample is loaded.
            Otherwise every device loads the whole batch, so that mixing samples, counting them, or a loader that was not
            prepared is as on one device.
        plan: a name, a plan as from a file, or "auto": the devices are measured, and the planner chooses.
        group: the devices, from `convoy.join`; None: joined here, once per process, and left at its end.
        speeds, fleet, budget_s, precision, slowdown, compile, outputs: as for `make_plan` and `distribute`.

    Returns:
        the distributed model, the optimizer, the loader, and `more` loaders, in this order.

    Raises:
        InputError: an optimizer of another model, a loader whose batches cannot be shared out, a model that does not run.
        PlanError: a plan that does not fit.
        MismatchError: the devices were started differently.
        DeviceLostError: a device did not come, or did not answer.
    """
    global _group
    _check_kinds(model, optimizer, loader)
    dtype_named(precision)
    loader = _in_batches(loader, batch_size)
    for each in (loader, *more):
        check_loader(each)
    if group is None:
        group = _group = _group if _group is not None and _group.failure is None else join()
    example = first_samples(loader)
    made = make_plans(
        model, example, batch_size_of(loader), group, plan=plan, speeds=speeds, fleet=fleet, budget_s=budget_s,
        precision=precision, slowdown=slowdown, optimizer=_kind_of_optimizer(optimizer), outputs=outputs,
    )[0]  # fmt: skip
    names: dict[Tensor, str] = {parameter: name for name, parameter in unwrapped(model).named_parameters()}
    before = {} if optimizer is None else remembered(optimizer, names)
    part = Distributed(model, made, group, example, slowdown=slowdown, compile=compile, takes_over=True)
    compute_in(part, precision)
    part.takes_whole = not parts
    if optimizer is not None:
        rebind(optimizer, names, before, part)
    return (part, optimizer, *(AdoptedLoader(each, part, parts=parts) for each in (loader, *more)))


def _check_kinds(model: object, optimizer: object, loader: Any) -> None:
    if isinstance(model, nn.Module):
        check_not_distributed(model)
    wanted = (("model", model, nn.Module), ("optimizer", optimizer, Optimizer | None))
    for name, given, kind in wanted:
        if not isinstance(given, kind):
            raise InputError(
                f"prepare takes a model, an optimizer and a loader, in this order; its {name} is a {type(given).__name__}"
            )
    if not isinstance(loader, DataLoader) and not hasattr(loader, "__getitem__"):
        check_loader(loader)


def _in_batches(loader: DataLoader[Any] | Dataset[Any], batch_size: int | None) -> DataLoader[Any]:
    """A loader as it is, or one of a data set."""
    if not isinstance(loader, DataLoader):
        if batch_size is None:
            raise InputError("prepare was given a data set and no batch_size: give one, in samples of the whole batch")
        return DataLoader(loader, batch_size, shuffle=True)
    if batch_size is not None and batch_size != batch_size_of(loader):
        raise InputError(
            f"batch_size={batch_size}, and the DataLoader has batches of {batch_size_of(loader)}: leave batch_size out, it is "
            "for a data set"
        )
    return loader


def _kind_of_optimizer(optimizer: Optimizer | None) -> str:
    """How much it remembers, in the planner's terms: one tensor like the weights, two, or none."""
    if optimizer is None:
        return "sgd-momentum"
    momentum = optimizer.defaults.get("momentum", 0)
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd-momentum" if momentum else "sgd"
    return "adam"


def is_first() -> bool:
    """Whether this process is device 0 of its job, or alone: the one that prints and saves.

    Where device 0 was lost, it is the first of those that are left.

    Raises:
        InputError: the environment names a job incompletely.
    """
    if (index := index_in_job()) is not None:
        return index == 0
    env = read_process_env(os.environ)
    return env is None or env.device == 0


def print(*values: object, **options: Any) -> None:
    """Python's print, on device 0 only."""
    if is_first():
        builtins.print(*values, **options)


def make_plan(
    name: str,
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    batch: int,
    group: Group,
    *,
    speeds: Sequence[float] | None = None,
    reduce: Sum | None = None,
    wire: CommDtype | None = None,
    slowdown: float = 1.0,
    budget_s: float = BUDGET_S,
    fleet: Path | None = None,
    precision: str = "float32",
    outputs: OutputPlace | None = None,
) -> Plan:
    """A plan by name for this model on these devices. Every device must call it.

    Args:
        name: "data", "data-by-speed", "sharded", "master", "model", "hybrid"; or "auto": the devices are measured, and the
            planner chooses per layer.
        model: an ordinary module.
        example: one batch of each input; only shape and dtype matter.
        batch: global batch, in samples.
        group: the devices.
        speeds: one number per device; None: every device times the model's own layers first, which takes seconds. One device
            alone has nothing to share, and nothing is measured.
        reduce: "ring", "butterfly", "direct", "star", or "inexact-butterfly-mixing"; None: what the plan is known for.
        wire: "exact" (None: the same), or "inexact-bf16": what travels is rounded to bfloat16, in half the bytes.
        slowdown: this device plays one that is so many times slower.
        budget_s: for "auto", about the seconds on the wall that measuring may take.
        fleet: for "auto", a file that `convoy measure` wrote for this model: nothing is measured then. Only device 0 reads it.
        precision: what the layers will compute in, as for `distribute`: they are timed so.
        outputs: "everywhere" (None: the same, or the plan's own): the model returns those of the whole batch, on every device;
            "where-computed": each device's of its samples, for `convoy.loss`, and nothing of them travels.

    Raises:
        InputError, PlanError: an unknown name (the choices are listed), a batch below 1, speeds that do not fit; no plan
            that fits the devices' memory.
        DeviceLostError: a device did not answer while speeds were shared.
    """
    return make_plans(
        model, example, batch, group, plan=name, speeds=speeds, reduce=reduce, wire=wire, slowdown=slowdown,
        budget_s=budget_s, fleet=fleet, precision=precision, outputs=outputs,
    )[0]  # fmt: skip


def make_plans(
    model: nn.Module,
    example: Tensor | Sequence[Tensor],
    batch: int,
    group: Group,
    *,
    plan: str | Plan = AUTO,
    speeds: Sequence[float] | None = None,
    reduce: Sum | None = None,
    wire: CommDtype | None = None,
    slowdown: float = 1.0,
    budget_s: float = BUDGET_S,
    fleet: Path | None = None,
    precision: str = "float32",
    optimizer: str = "sgd-momentum",
    net: str | None = None,
    micro_batches: int = 1,
    outputs: OutputPlace | None = None,
    progress: Progress | None = None,
) -> Plans:
    """Return the plan of `make_plan`, and for "auto" those that are predicted to take nearly as long with fewer messages.

    A `Rebalancer` tries them: `Rebalancer(model, optimizer, others=plans[1:])`. The result also holds the devices' speeds, and
    for "auto" the predicted seconds of a step. Arguments and errors that are not here: see `make_plan`.

    Args:
        plan: a name; or a plan, as from a file: then only speeds are measured, and `reduce` and `wire` replace its own.
        optimizer: for "auto", whose state counts as memory: "sgd", "sgd-momentum" or "adam".
        net: for "auto", the model's name in messages and files; None: that of its class.
        micro_batches: the number of micro-batches of `batch` samples per step (see `Distributed.no_sync`).
        progress: is called with what is measured now; None: device 0 prints to standard error what it waits for.
    """
    if batch < 1:
        raise PlanError(f"a batch of {batch}: a batch holds one sample at least; give 1 or more")
    if getattr(group, "entrance", None) is not None:
        # It joins a job that has a plan: until it is admitted, it is alone.
        plan, speeds, fleet, reduce, wire = "data", None, None, None, None
    agree_on_modes(group)  # before the seconds of measuring
    traced = trace(model, example)
    request = PlanRequest(
        traced.graph, batch, FleetKnowledge(ids=tuple(range(group.devices))), None if isinstance(plan, Plan) else plan,
        optimizer, "exact" if wire is None else wire, reduce, "everywhere" if outputs is None else outputs, micro_batches,
    )  # fmt: skip
    name = type(model).__name__ if net is None else net
    options = MeasureOptions(name, budget_s=budget_s, slowdown=slowdown, precision=precision)
    prints = progress is None and group.device == 0 and group.devices > 1
    progress = progress or (lambda _: None)

    def say(*lines: str) -> None:
        for line in lines if prints else ():
            builtins.print(f"convoy: {line}", file=sys.stderr, flush=True)

    if plan == AUTO:
        if speeds is not None:
            raise InputError(
                "speeds with the plan auto: it needs the times of every layer; leave speeds out, or name a plan"
            )
        work = f"planning for {group.devices} devices"
        say(f"{work} ..." if fleet is not None else f"measuring and {work}, about {max(1, round(budget_s))} s ...")
        # Timing draws random numbers; the script's must stay those of one device.
        with random_state_kept(group.torch_device):
            plans = _plan_together(group, traced, model, request, fleet, options, progress)
        say(*choice_lines(plans, traced.graph))
        return plans
    if isinstance(plan, Plan) and plan.batch != batch:
        raise PlanError(f"the plan {plan.name} is for a batch of {plan.batch}, not {batch}: make a new plan")

    def made(by: Speeds) -> Plan:
        return plan if isinstance(plan, Plan) else named_plan(plan, traced.graph, batch, by, reduce)

    known = given_speeds((1.0,) * group.devices if speeds is None else speeds, group.devices)
    made(known).check(traced.graph, group.devices)  # before the seconds of measuring
    if speeds is None and group.devices > 1:
        say("every device times the model's layers ...")
        with random_state_kept(group.torch_device):
            clock = Clock(group.torch_device, slowdown)
            known = measure_speeds(group, traced, model, batch, clock, precision, progress)
    found = made(known)
    found = replace(
        found,
        reduce=found.reduce if reduce is None else reduce,
        wire=found.wire if wire is None else wire,
        outputs=found.outputs if outputs is None else outputs,
    )
    return Plans((found,), replace(request, fleet=replace(request.fleet, speeds=known)))


def _plan_together(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    request: PlanRequest,
    file: Path | None,
    options: MeasureOptions,
    progress: Progress,
) -> Plans:
    """Measure the devices, or read a file's times; plan on device 0; send the plans to all. All devices call it.

    Without a file, the one that CONVOY_FLEET names (that of an emulated fleet) describes the fleet to measure.
    """

    def read() -> list[str | None]:
        here, times = None, None
        if file is not None:
            here, times = read_times(file, request.graph, group.devices, options.precision)
        elif emulated := os.environ.get("CONVOY_FLEET"):
            here, _ = read_fleet_file(Path(emulated))
        return [None if here is None else here.to_toml(), None if times is None else times.to_toml()]

    text, times = from_first(group, "fleet to measure", read)
    described = None if text is None else Fleet.from_toml(text, "device 0's fleet file")
    if times is None and group.devices == 1:
        return _plan_alone(group, request, described, options.slowdown)

    def measure() -> Measurement:
        found = measure_job(group, traced, model, request.batch, replace(options, fleet=described), progress)
        group.clear_counters()  # what measuring sent is no part of the training
        return found

    def planned(by: Measurement) -> Any:
        progress("the plans that these times allow")
        asked = replace(request, fleet=replace(request.fleet, measured=by))

        def answer() -> dict[str, Any]:
            rows = choose(asked)
            found = {"plans": [row.plan.to_json() for row in rows], "step_s": [row.step_s for row in rows]}
            found |= {"spread": [row.spread for row in rows], "speeds": asked.speeds.devices}
            return found | {"spare": asdict(spare_price(rows[0], asked))}

        # One device plans, so that the other devices' processors do not disturb it.
        return from_first(group, "automatic plan", answer)

    # Every device gets the times of a file: any of them may have to plan again.
    measured = measure() if times is None else Measurement.from_toml(times, "device 0's fleet file")
    row = planned(measured)
    if times is None and row["spread"][0] ** 2 > UNCERTAIN:  # perhaps another program disturbed
        again = measure()
        if (other := planned(again))["spread"][0] < row["spread"][0]:
            row, measured = other, again
    known = replace(request.fleet, measured=measured, speeds=Speeds(tuple(row["speeds"])))
    return Plans(
        tuple(Plan.from_json(text, "device 0's plan") for text in row["plans"]),
        replace(request, fleet=known),
        tuple(row["step_s"]),
        tuple(row["spread"]),
        SparePrice(**row["spare"] | {name: tuple(row["spare"][name]) for name in ("memory_bytes", "overfull")}),
    )


def _plan_alone(group: Group, request: PlanRequest, described: Fleet | None, slowdown: float) -> Plans:
    """Return the only plan of one device, without measuring, if it has the memory.

    Raises:
        PlanError: it has not.
    """
    speeds = given_speeds((1.0,), 1)
    plan = named_plan("data", request.graph, request.batch, speeds, request.reduce)
    plan = replace(plan, name=AUTO, wire=request.wire, outputs=request.outputs)
    own = describe_device(group.torch_device, slowdown)
    process_bytes = max(0, own.process_bytes - 4 * sum(layer.entries for layer in request.graph.layers.values()))
    check_alone(request, plan, MemoryLimits.of(described or fleet_of([own]), [process_bytes]))
    return Plans((plan,), replace(request, fleet=replace(request.fleet, speeds=speeds)))


def read_times(path: Path, graph: Graph, devices: int, precision: str = "float32") -> tuple[Fleet, Measurement | None]:
    """Return the fleet of a file for a job, and its measurement if it has one.

    Raises:
        InputError: the file cannot be used, or has another number of devices.
        MismatchError: measured with another model, or in another precision.
    """
    fleet, measured = read_fleet_file(path)
    if len(fleet.devices) != devices:
        raise InputError(
            f"--fleet {path} has {len(fleet.devices)} devices, this job has {devices}: start as many devices, or give the "
            "fleet file of these"
        )
    if measured is not None:
        measured.costs(graph)
        if measured.precision != precision:
            raise MismatchError(
                f"--fleet {path} was measured in {measured.precision}, this job computes in {precision}, which takes other "
                f"times: measure with --precision {precision}, or leave --fleet out"
            )
    return fleet, measured


def choice_lines(plans: Plans, graph: Graph) -> list[str]:
    """Return three lines for a person: what the planner chose, why, and what it predicts against one device."""
    plan, speeds = plans[0], plans.speeds.devices
    fastest = plans.speeds.fastest
    used = working(plan, graph)
    names = ", ".join(map(str, sorted(used)))
    lines = [
        f"auto chose device {names} alone: one device is faster than several"
        if len(used) == 1
        else f"auto chose devices {names} of {len(speeds)}, each layer split as its times ask for"
    ]
    lines.append(f"measured alone, samples/s: {', '.join(f'device {d} {s:,.3g}' for d, s in enumerate(speeds))}")
    if (step_s := plans.predicted_s(plan)) and (within := plans.within(plan)):
        gain = plan.batch / step_s / speeds[fastest]
        lines.append(
            f"predicted: {step_s:.3g} s a step (nine of ten: {within.low:.3g} - {within.high:.3g}), {gain:.2f} times as fast "
            f"as device {fastest} alone"
        )
        if within.high > UNCERTAIN * within.low:
            lines.append(
                "these times varied much: end what else runs on the devices, or name a plan such as data-by-speed"
            )
    return lines


def distribute(
    model: nn.Module,
    plan: Plan,
    group: Group,
    example: Tensor | Sequence[Tensor],
    *,
    slowdown: float = 1.0,
    precision: str = "float32",
    compile: bool = False,
) -> Distributed:
    """This device's part of a model; see `Distributed`. Every device must call it.

    Args:
        precision: what its layers compute in: "float32" (the type that the model has), "bf16" or "fp16"; see `compute_in`.
            Weights and what travels keep their type. With fp16, use `convoy.GradScaler` for the loss.
        compile: rows of layers go through torch.compile where a trial in the first steps finds that faster: numbers equal up to
            rounding, and the trial's seconds. It needs a C++ compiler (on GPUs Triton).

    Raises:
        InputError, PlanError, MismatchError: see `Distributed` and `compute_in`.
    """
    part = Distributed(model, plan, group, example, slowdown=slowdown, compile=compile)
    compute_in(part, precision)
    if group.devices > 1 and group.device == 0 and (told := part.traced[True].graph.unshared):
        builtins.print(told, file=sys.stderr, flush=True)
    return part


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    model: Distributed | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
    augment: str | None = None,
) -> Loader:
    """Batches of a data set, this device's part of each; see `Loader`.

    Args:
        augment: how training images change from epoch to epoch, e.g. "crop,flip"; see `convoy.data.augment`.

    Raises:
        InputError: a batch below 1, an empty data set, an unknown augmentation.
    """
    steps = None
    if augment is not None:
        steps = read_augment(augment, getattr(dataset, "mean", ()), getattr(dataset, "std", ()))
    return Loader(
        dataset, batch_size, model, shuffle=shuffle, seed=seed, drop_last=drop_last, workers=workers, augment=steps
    )
