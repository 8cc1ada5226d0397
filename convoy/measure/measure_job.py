"""Measures the devices of a job: layers on all devices at once, then links, then the sizes that plans use.

The devices wait for each other after each layer. This loads a shared machine as in training, and detects a lost device early.
"""

import datetime
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from convoy._version import __version__
from convoy.comm.control_messages import check_same, from_first, gather
from convoy.comm.group import Group
from convoy.fleet import Fleet
from convoy.measure.device_info import (
    NOTICED,
    DeviceInfo,
    describe_device,
    fit,
    fleet_of,
    host_indices,
    read_usage,
    slowed_by_others,
)
from convoy.measure.layer_timer import LayerTimer
from convoy.measure.link_probe import measure_links
from convoy.measure.overhead_probe import find_quota, loss_shapes, measure_live, measure_overheads, measure_sync
from convoy.measure.timed_sizes import first_allowance_s, sizes_of_plans, timing_s
from convoy.measure.timing import SLICE_S, TURN_ROUNDS, Now, Progress, RoundTimer, plain_torch
from convoy.model.tracing import TracedModel
from convoy.plan.device_program import LocalSize
from convoy.runtime.clock import Clock
from convoy.runtime.precision import agree_on_precision
from convoy.simulate.costs import Overheads
from convoy.simulate.memory import MemoryLimits
from convoy.simulate.table import DeviceCosts, LayerPoint, Measurement

BUDGET_S = 60.0
LINKS_FRACTION = 0.25  # the links' fraction of a budget

GRID_FRACTION = 2 / 3  # the grids' fraction of the layers' seconds; the rest is for the sizes that plans use

OTHER_SLICES, POINT_SLICES, POINTS = 550, 10, 7
"""Slices for everything except layers and links; slices per size of a layer; number of sizes of a layer with short calls."""

SHORTEST_S = 2e-3  # the shortest slice: enough for some calls of a short layer


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The settings of a measurement.

    Attributes:
        net: the model's name in messages and files.
        fleet: the fleet's description, in which measured NICs and links are filled in; None: the devices describe themselves.
        budget_s: approximate wall-clock seconds of the whole job. Every layer is timed at least at one size.
        links_budget_s: additional seconds for the links; None: they take a quarter of `budget_s`.
        slowdown: the factor by which this device slows its computation down, to act like slower hardware.
        precision: number format of the layers; see `convoy.runtime.precision`.
        slice_s: seconds of calls timed together (see `convoy.measure.timing`); None: choose it by the budget.
        wall: clock of the budget.
        processor: clock of the seconds that `slowdown` multiplies; None: the default clock of the device.
    """

    net: str
    fleet: Fleet | None = None
    budget_s: float = BUDGET_S
    links_budget_s: float | None = None
    slowdown: float = 1.0
    precision: str = "float32"
    slice_s: float | None = None
    wall: Now = time.monotonic
    processor: Now | None = None


@plain_torch()
def measure_job(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    options: MeasureOptions,
    progress: Progress = lambda _: None,
) -> Measurement:
    """Measure a model on the devices of a group, and the links between them. All devices call it and get the same value.

    Args:
        traced: the traced whole `model`, in training mode; `model` stays unchanged.
        batch: the global batch, the largest number of samples that is timed.

    Raises:
        InputError: `options.fleet` does not describe this job; a device or the model does not support the precision.
        MismatchError: the devices were started with different models, batches or fleets.
        PlanError: the devices have no memory for the weights.
        DeviceLostError: a device did not answer within the group's time limit.
    """
    start_s, device, me = options.wall(), group.torch_device, group.device
    layers_s, links_s = options.budget_s, options.links_budget_s
    if links_s is None:
        layers_s, links_s = layers_s * (1 - LINKS_FRACTION), layers_s * LINKS_FRACTION
    rows = [DeviceInfo(**row) for row in gather(group, "machine", asdict(describe_device(device, options.slowdown)))]
    tensors = (t for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu")
    model_bytes = sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    date = _agree(group, traced, batch, options)
    fleet = fleet_of(rows) if options.fleet is None else fit(options.fleet, rows)
    limits = MemoryLimits.of(fleet, [max(0, row.process_bytes - model_bytes) for row in rows])
    limits.check_room(traced.graph, batch)
    quota = find_quota(group)
    share, quota_now = (1.0, None) if quota is None else (quota.share, quota.clock(options.slowdown))
    clock = Clock(device, options.slowdown)
    clock.now = options.processor or clock.now
    timer = RoundTimer(clock, quota_now, steady=quota_now is not None, cold=True)
    layers = LayerTimer(traced, model, batch, timer, TURN_ROUNDS, options.precision)
    names = list(dict.fromkeys(layers.alike.values()))
    slice_s = timer.slice_s = options.slice_s or slice_of(layers_s, len(names))
    begin = read_usage()
    grids_s = max(0.0, layers_s - OTHER_SLICES * slice_s) * GRID_FRACTION
    _time_grids(group, layers, names, grids_s, options.wall, progress)
    slowed = slowed_by_others(group, "load during layers", begin)

    wire = measure_links(group, host_indices(fleet), share, budget_s=links_s, progress=progress)
    progress("overheads of a step")
    outputs = loss_shapes(traced.graph, batch)
    overheads, update_s = measure_overheads(device, timer.now, slice_s, wire.traffic[me].message_s, share, outputs)
    overheads = measure_live(overheads, layers)
    if options.slowdown > 1:  # after each segment the host waits for the device, so it does not run ahead
        overheads = replace(overheads, queue_s=0.0)
    every = [Overheads(**row) for row in gather(group, "overheads", asdict(overheads))]
    progress("exchanges during computation")
    sync = measure_sync(group, clock, wire, every, slice_s)
    own = {"update_s_per_entry": update_s, "process_bytes": limits.own_bytes(me)}
    costs = tuple(
        DeviceCosts(
            device=device.name, send_s_per_byte=traffic.send_s_per_byte, receive_s_per_byte=traffic.receive_s_per_byte,
            jitter_s=jitter_s, other_load=slow - 1 if slow > NOTICED else 0.0, **asdict(overhead), **row,
        )
        for device, traffic, jitter_s, overhead, slow, row in zip(
            fleet.devices, wire.traffic, sync.jitter_s, sync.overheads, slowed,
            gather(group, "costs of a step", own), strict=True,
        )
    )  # fmt: skip
    measured = Measurement(
        wire.into(fleet), options.net, traced.graph.fingerprint, batch, __version__, str(torch.__version__), date, costs,
        _points(group, fleet, layers), wire.spreads(fleet), options.precision,
    )  # fmt: skip
    progress("the sizes that plans use")
    _time_plan_sizes(group, layers, measured, layers_s + links_s - (options.wall() - start_s), options.wall)
    factor = 1.0 if quota is None else quota.contention(layers.wall_s, layers.processor_s, slowed[me])
    return replace(measured, layer=_points(group, fleet, layers, factor))


def slice_of(budget_s: float, layers: int) -> float:
    """Return the slice length with which timing this number of short layers takes two thirds of a budget."""
    slices = OTHER_SLICES + POINTS * POINT_SLICES * layers
    return min(SLICE_S, max(SHORTEST_S, GRID_FRACTION * budget_s / slices))


def _agree(group: Group, traced: TracedModel, batch: int, options: MeasureOptions) -> str:
    """Check that all devices measure the same, and return device 0's date."""
    fleet = "" if options.fleet is None else hashlib.sha256(options.fleet.to_toml().encode()).hexdigest()
    own = {"model": traced.graph.fingerprint, "batch": batch, "fleet": fleet, "convoy": __version__}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = gather(group, "measure", [own, date])
    for name in own:
        check_same([each[name] for each, _ in rows], f"started with another {name}")
    agree_on_precision(group, traced.graph, options.precision)
    return str(rows[0][1])


def _time_grids(
    group: Group, layers: LayerTimer, names: Sequence[str], budget_s: float, wall: Now, progress: Progress
) -> None:
    """Time the layers' grids in several turns, until all times are precise enough or the budget is spent.

    A brief disturbance then affects only one of many turns. Waiting for slower devices counts towards the budget.
    """
    left_s, turn = budget_s, 0
    while (names and left_s > 0) or not turn:
        turn += 1
        for index, name in enumerate(names):
            progress(f"turn {turn}: layer {name} ({index + 1} of {len(names)})")
            start_s = wall()
            allowance_s = first_allowance_s(layers.traced.graph, names[index:], left_s)
            layers.turn(name, min(allowance_s, group.timeout_s / 4), wall)
            group.agree(f"layer {name}, turn {turn}", "")
            left_s = max(0.0, left_s - (wall() - start_s))
        rows = gather(group, f"turn {turn}", [left_s, [name for name in names if layers.unknown(name)]])
        names = [name for name in names if any(name in unknown for _, unknown in rows)]
        left_s = min(left for left, _ in rows)


def _time_plan_sizes(group: Group, layers: LayerTimer, measured: Measurement, budget_s: float, wall: Now) -> None:
    """Time as many of the plans' sizes as the budget allows, in several turns. The budget includes planning."""
    start_s, graph = wall(), layers.traced.graph
    rows = from_first(
        group, "sizes of plans", lambda: sizes_of_plans(measured, graph, layers.batch, layers.alike)
    )[group.device]  # fmt: skip
    budget_s = min(budget_s, wall() - start_s + group.timeout_s / 4)
    todo = [(layer, LocalSize(*size), timing_s(seconds, layers.timer.slice_s)) for layer, size, seconds in rows]
    while todo:
        unknown = []
        for name, size, takes_s in todo:
            # A size that no longer fits may be followed by a shorter one that does.
            if wall() - start_s + takes_s <= budget_s:
                if size not in (sizes := layers.plan_sizes.setdefault(name, [])):
                    sizes.append(size)
                layers.time(name, size)
                if not layers.timings[name, size].is_known:
                    unknown.append((name, size, takes_s))
        todo = unknown


def _points(group: Group, fleet: Fleet, layers: LayerTimer, factor: float = 1.0) -> tuple[LayerPoint, ...]:
    """Gather the points of all layers on all devices."""
    tables = gather(group, "layer times", layers.rows(factor))
    return tuple(
        LayerPoint(device.name, name, *row)
        for device, table in zip(fleet.devices, tables, strict=True)
        for name, first in layers.alike.items()
        for row in table[first]
    )
