"""The measuring job: every device times its layers, all at the same time, then the wire, then the sizes that plans have.

Layer by layer the devices wait for each other, so that they load a shared machine as in training, and a device that is
lost is missed soon. The layers that all have measured are kept in a partial file, from which a second run goes on.
"""

import datetime
import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy._version import __version__
from convoy.comm.collectives import check_same, from_first, gather
from convoy.comm.group import Group
from convoy.fleet import Fleet
from convoy.measure.axes import allowances, timing_s
from convoy.measure.describe import Own, describe, fit, fleet_of, host_indices, spreads, with_wire
from convoy.measure.energy import ABSENT, EnergyMeter, meter_of, once_each
from convoy.measure.layers import Bench, Point
from convoy.measure.links import Traffic, WireTimes, measure_links
from convoy.measure.load import NOTICED, read, slowed_by_others, use_since, wanted_cores
from convoy.measure.overheads import loss_shapes, measure_overheads
from convoy.measure.partial import Partial, Rows
from convoy.measure.progress import Progress
from convoy.measure.quota import ProcessorClock, QuotaProbe, contention
from convoy.measure.sizes import sizes_to_profile
from convoy.measure.sync_overhead import SyncOverhead, measure_sync_overhead
from convoy.measure.timing import STRETCH_S, TURN_ROUNDS, Now, device_now, plain_torch, time_update
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel
from convoy.plan.device_program import LocalSize, flop
from convoy.runtime.clock import Clock
from convoy.runtime.precision import agree_on_precision
from convoy.simulate.compute import bytes_moved
from convoy.simulate.costs import Overheads
from convoy.simulate.network import SHARE
from convoy.simulate.noise import QuotaNoise
from convoy.simulate.table import FORMAT, DeviceCosts, LayerPoint, Measurement

GRID_PART = 2 / 3
"""The part of the layers' seconds that goes to the grids; the rest is for the sizes that plans have."""

BUDGET_S = 60.0
LINKS_PART = 0.25
"""The part of a budget that goes to the links."""

BESIDE_STRETCHES, POINT_STRETCHES, POINTS = 550, 10, 7
"""What is measured beside layers and links takes so many stretches, a point of a layer so many; and so many points a layer has
at least, where its calls are short."""

SHORTEST_S = 2e-3
"""Of a stretch: enough for some calls of a short layer."""

SHARE_STRETCHES = 50
"""The share of a processor is in every time of a device under a quota: it is measured for so many stretches, a second."""


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """How a model is measured.

    Attributes:
        net: the model's name in messages and files.
        fleet: a description of the fleet, whose NICs and links are replaced by measured ones; None: the devices describe
            themselves.
        budget_s: approximate wall-clock seconds of the whole job. Every layer is timed at one size at least.
        links_budget_s: seconds for the wire, in addition; None: a quarter of `budget_s`.
        slowdown: the factor by which this device computes more slowly than its hardware.
        partial: file in which device 0 keeps finished layers, and finds those of an interrupted run. Removed at the end.
        precision: of the layers; see `convoy.runtime.precision`.
        stretch_s: see `convoy.measure.timing.time_piece`; None: as the budget allows.
        wall: clock of the budget.
        processor: clock of the seconds that `slowdown` multiplies; None: as the kind of device has it.
    """

    net: str
    fleet: Fleet | None = None
    budget_s: float = BUDGET_S
    links_budget_s: float | None = None
    slowdown: float = 1.0
    partial: Path | None = None
    precision: str = "float32"
    stretch_s: float | None = None
    wall: Now = time.monotonic
    processor: Now | None = None


# --- the job -----------------------------------------------------------------------------------------------------------


@plain_torch()
def measure_job(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    options: MeasureOptions,
    progress: Progress = lambda *_: None,
) -> Measurement:
    """Measure a model on the devices of a group, and the wire between them. All devices call it; all get the same value.

    Args:
        traced: the model in training mode; `model` itself, whole and left as it is.
        batch: the global batch, the largest number of samples that is timed.

    Raises:
        InputError: a fleet that is not this job's; a precision that a device or the model does not have.
        MismatchError: the devices were started with different models, batches or fleets.
        DeviceLostError: a device did not answer within the group's time limit.
    """
    wall, slowdown, precision, fleet = options.wall, options.slowdown, options.precision, options.fleet
    start_s = wall()
    budget_s, links_budget_s = options.budget_s, options.links_budget_s
    if links_budget_s is None:
        budget_s, links_budget_s = budget_s * (1 - LINKS_PART), budget_s * LINKS_PART
    rows = [Own(**row) for row in gather(group, "machine", asdict(describe(group.torch_device, slowdown)))]
    process_bytes = max(0, rows[group.device].process_bytes - _model_bytes(model))
    header, date = _agreed(group, traced, batch, fleet, precision, rows)
    fleet = fleet_of(rows) if fleet is None else fit(fleet, rows)
    kept = Partial(options.partial if group.device == 0 else None, header)
    clock = Clock(group.torch_device, slowdown)
    clock.now = options.processor or clock.now
    bench = Bench(traced, model, batch, clock, group.torch_device, precision=precision)
    stretch_s = options.stretch_s
    if stretch_s is None:
        stretch_s = stretch_of(budget_s, len(set(bench.alike().values())))
        share_s = min(SHARE_STRETCHES * STRETCH_S, budget_s / 20)
    else:
        share_s = SHARE_STRETCHES * stretch_s
    cores = fleet.devices[group.device].cores if group.torch_device.type == "cpu" else None
    quota = QuotaProbe.of(group, share_s, cores, lambda what: progress(what, 0, 1))
    now = device_now(group.torch_device) if quota is None else quota.clock(slowdown)
    share, before = (1.0, (1.0,) * group.devices) if quota is None else (quota.share, quota.slowed)
    bench.time_by(now, steady=isinstance(now, ProcessorClock))
    bench.stretch_s, bench.rounds = stretch_s, TURN_ROUNDS
    grids_s = max(0.0, budget_s - BESIDE_STRETCHES * stretch_s) * GRID_PART
    wants, begin, energy = wanted_cores(group.torch_device), read(), meter_of(group.torch_device)
    steps, watts = _measure_tables(group, bench, kept, grids_s, progress, wall, energy)
    powers = _powers(group, energy, watts)
    slowed = slowed_by_others(group, "load beside layers", use_since(begin, wants))

    def last(what: str) -> None:
        progress(what, steps, steps)

    wire = measure_links(group, host_indices(fleet), share, budget_s=links_budget_s, progress=last)
    last("what a step costs beside its layers")
    outputs = loss_shapes(traced.graph, batch)
    costs = _measure_costs(group, now, stretch_s, wire.traffic[group.device].message_s, share, outputs, process_bytes)
    last("exchanges between devices that compute")
    ring_bytes = _ring_bytes(wire)
    sync = measure_sync_overhead(
        group, clock, lambda factors: _exchange_s(wire, _with_call_factor(costs, factors)), stretch_s,
        after_block=lambda compute: (
            None if quota is None else quota.time_block(compute, device_now(group.torch_device), stretch_s, ring_bytes)
        ),
    )  # fmt: skip
    costs = _with_call_factor(costs, sync.call_factor)
    noise = (None,) * group.devices if quota is None else quota.noise(sync, _ring_s(wire, costs, ring_bytes))
    links, cards = spreads(fleet, wire)
    points = _points(fleet, bench, kept.tables)
    reached = [_reached(device.name, points, bench.traced.graph) for device in fleet.devices]
    measured = Measurement(
        fleet=with_wire(fleet, wire),
        net=options.net,
        fingerprint=traced.graph.fingerprint,
        batch=batch,
        convoy=__version__,
        torch=str(torch.__version__),
        date=date,
        device=_device_costs(fleet, wire.traffic, costs, sync, noise, reached, map(max, before, slowed), powers),
        layer=points,
        link=links,
        host=cards,
        precision=precision,
    )
    last("the sizes that plans have")
    left_s = budget_s + links_budget_s - (wall() - start_s)
    measured = _with_plan_sizes(group, bench, measured, left_s, wall)
    if quota is not None:
        others = max(before[group.device], slowed[group.device])
        own = contention(now, bench.wall_s, bench.processor_s, others)
        measured = with_contention(measured, gather(group, "contention", own))
    kept.remove()
    return measured


def with_contention(measured: Measurement, factors: Sequence[float]) -> Measurement:
    """Return the measurement with the layer times of each device multiplied by its factor."""
    by_name = {device.name: factor for device, factor in zip(measured.fleet.devices, factors, strict=True)}
    layer = (
        replace(p, forward_s=p.forward_s * by_name[p.device], backward_s=p.backward_s * by_name[p.device])
        for p in measured.layer
    )
    return replace(measured, layer=tuple(layer))


def _model_bytes(model: nn.Module) -> int:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}.values())


def _agreed(
    group: Group, traced: TracedModel, batch: int, fleet: Fleet | None, precision: str, rows: Sequence[Own]
) -> tuple[dict[str, Any], str]:
    """What must be the same for a later run to go on with this one's times, and the date on device 0."""
    own = {
        "model": traced.graph.fingerprint,
        "batch": batch,
        "fleet": "" if fleet is None else hashlib.sha256(fleet.to_toml().encode()).hexdigest()[:16],
        "convoy": __version__,
        "format": FORMAT,
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    told = gather(group, "measure", [own, date])
    for name in own:
        check_same([each[name] for each, _ in told], f"started with another {name}")
    agree_on_precision(group, traced.graph, precision)
    devices = [[row.name, row.kind, row.cores, row.slowdown] for row in rows]
    return own | {"precision": precision, "torch": str(torch.__version__), "devices": devices}, told[0][1]


def stretch_of(budget_s: float, layers: int) -> float:
    """The stretch with which what has to be measured takes two thirds of a budget, if its calls are short.

    Args:
        layers: those that differ.
    """
    stretches = BESIDE_STRETCHES + POINTS * POINT_STRETCHES * layers
    return min(STRETCH_S, max(SHORTEST_S, GRID_PART * budget_s / stretches))


def _measure_tables(
    group: Group, bench: Bench, kept: Partial, budget_s: float, progress: Progress, wall: Now, energy: EnergyMeter
) -> tuple[int, float | None]:
    """Time what is not kept yet, layer by layer, and keep it; how many layers there were, and this device's watts meanwhile.

    A layer that takes longer than its part leaves less to the others, and so does one that another device is slower at: the
    devices wait for each other.
    """
    first = bench.alike()
    names = [name for name in bench.layers if first[name] == name]
    kept.tables = from_first(group, "kept tables", lambda: kept.tables)
    ahead = [name for name in names if name not in kept.tables]
    left_s, used_j, used_s = budget_s, 0.0, 0.0
    for index, name in enumerate(ahead):
        progress(f"layer {name}", len(names) - len(ahead) + index, len(names))
        start_s = wall()
        share_s = allowances(bench.traced.graph, ahead[index:], left_s)[name]
        energy.joules()
        points = bench.measure(name, min(share_s, group.timeout_s / 4))
        used_j, used_s = used_j + (energy.joules() or 0.0), used_s + wall() - start_s
        kept.add(name, gather(group, f"table of {name}", [_row(point) for point in points]))
        left_s = max(0.0, left_s - (wall() - start_s))
    _more_turns(group, bench, kept, ahead, left_s, progress, wall)
    return len(names), used_j / used_s if used_s > 0 and energy.key else None


def _more_turns(
    group: Group, bench: Bench, kept: Partial, names: Sequence[str], left_s: float, progress: Progress, wall: Now
) -> None:
    """Time all sizes of these layers again, layer by layer, until all are known or the time is up.

    What disturbs for a second is then in one turn of many, whatever it falls on.
    """
    turn = 1
    while True:
        start_s = wall()
        open_ = {name: len(bench.unknown(name)) for name in names}
        rows = gather(group, f"turn {turn} of the tables", [left_s, open_])
        names = [name for name in names if any(row[1][name] for row in rows)]
        if not names or min(row[0] for row in rows) <= 0:
            return
        for index, name in enumerate(names):
            progress(f"layer {name}, turn {turn + 1}", index, len(names))
            share_s = allowances(bench.traced.graph, names[index:], max(0.0, left_s - (wall() - start_s)))[name]
            points = bench.again(name, min(share_s, group.timeout_s / 4), wall)
            kept.add(name, gather(group, f"table of {name}, turn {turn}", [_row(point) for point in points]))
        left_s, turn = left_s - (wall() - start_s), turn + 1


def _powers(group: Group, energy: EnergyMeter, watts: float | None) -> list[tuple[float | None, str]]:
    """Of every device: its watts while layers were timed, and what measured them."""
    source = energy.source if watts is not None or not energy.key else f"{ABSENT}: these layers were timed before"
    rows = gather(group, "energy of layers", [energy.key, source, watts])
    return once_each(*zip(*rows, strict=True))


def _with_plan_sizes(group: Group, bench: Bench, measured: Measurement, allowance_s: float, wall: Now) -> Measurement:
    """The measurement with more sizes of layers: those that plans have, as many as there is time for."""
    start_s, first = wall(), bench.alike()
    sizes = from_first(
        group,
        "sizes to profile",
        lambda: [
            [asdict(w) for w in each] for each in sizes_to_profile(measured, bench.traced.graph, bench.batch, first)
        ],
    )[group.device]
    allowance_s = min(allowance_s, wall() - start_s + group.timeout_s / 4)
    timed: dict[tuple[str, LocalSize], tuple[float, Point]] = {}
    todo = [(each["layer"], LocalSize(**each["size"]), timing_s(each["seconds"], bench.stretch_s)) for each in sizes]
    while todo:
        for name, size, takes_s in todo:
            # A size that no longer fits may be followed by a shorter one that does.
            if wall() - start_s + takes_s <= allowance_s:
                timed[name, size] = (takes_s, bench.time(name, size))
        todo = [
            (name, size, takes_s)
            for (name, size), (takes_s, _) in timed.items()
            if not bench.is_known(name, size) and wall() - start_s + takes_s <= allowance_s
        ]
    rows: dict[str, list[list[float]]] = {}
    for (name, _), (_, point) in timed.items():
        rows.setdefault(name, []).append(_row(point))
    tables = gather(group, "times of these sizes", rows)
    more = tuple(
        replace(_point(device.name, name, row), beside=True)
        for device, table in zip(measured.fleet.devices, tables, strict=True)
        for name in bench.layers
        for row in table.get(first[name], [])
    )
    return replace(measured, layer=measured.layer + more)


def _measure_costs(
    group: Group, now: Now, stretch_s: float, message_s: float, share: float, outputs: Sequence[Sequence[int]],
    process_bytes: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """What a step costs each device beside its layers and the wire, in the names of `DeviceCosts`."""
    update_s, update_spread = time_update(group.torch_device, now, stretch_s)
    overheads = measure_overheads(group.torch_device, now, stretch_s, message_s, share, outputs)
    own = asdict(overheads) | {
        "update_s_per_entry": update_s, "update_spread": update_spread, "process_bytes": process_bytes
    }  # fmt: skip
    return gather(group, "costs of a step", own)


def _with_call_factor(costs: Sequence[dict[str, Any]], factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return the costs with the calls of each device's rounds and messages multiplied by its factor."""
    return [
        own | {name: own[name] * factor for name in ("round_s", "message_s")}
        for own, factor in zip(costs, factors, strict=True)
    ]


RING_S, RING_BYTES = 0.01, 1 << 20
"""A round in a ring is timed with the bytes of this many seconds of the slowest card, and at most this many."""


def _ring_bytes(wire: WireTimes) -> int:
    return int(min(RING_BYTES, RING_S * min((card.ring_bytes_per_s for card in wire.cards), default=math.inf)))


def _ring_s(wire: WireTimes, costs: Sequence[dict[str, Any]], size: int) -> float:
    """Return the price of a round in a ring while all devices compute."""
    rate = min((card.ring_bytes_per_s for card in wire.cards), default=math.inf)
    # While it computes, a device moves bytes with half of its processor.
    moving_s = max(size * (each.send_s_per_byte + each.receive_s_per_byte) / SHARE for each in wire.traffic)
    return max(float(each["round_s"] + each["message_s"]) for each in costs) + max(moving_s, size / rate)


def _exchange_s(wire: WireTimes, costs: Sequence[dict[str, float]]) -> float:
    """Return the price of a round in which each device sends a few bytes to all others, as the simulator has it."""
    calls = [Overheads(round_s=each["round_s"], message_s=each["message_s"]) for each in costs]
    calls_s = max(each.calls_s(2 * (len(costs) - 1)) for each in calls)
    return calls_s + max((link.latency_s for link in wire.pairs), default=0.0)


def _row(point: Point) -> list[float]:
    size, times = point.size, point.times
    seconds = [times.forward_s, times.backward_s, times.spread]
    return [size.samples, size.outputs, size.inputs, *seconds, float(size.shares_statistics)]


def _reached(device: str, points: Sequence[LayerPoint], graph: Graph) -> tuple[float, float]:
    """FLOP/s of the weighted layers on a device and bytes/s of the others, at the largest size of each; 0: there are none."""
    largest: dict[str, LayerPoint] = {}
    for point in points:
        if point.device == device and not point.shared:
            largest[point.layer] = max(
                largest.get(point.layer, point), point, key=lambda p: (p.samples, p.outputs, p.inputs)
            )
    work, work_s, moved, moved_s = 0.0, 0.0, 0.0, 0.0
    for name, point in largest.items():
        layer, seconds = graph[name], point.forward_s + point.backward_s
        size, passes = LocalSize(point.samples, point.outputs, point.inputs), 1 + (point.backward_s > 0)
        if layer.weighted:
            work, work_s = work + flop(layer, size) * (2 * passes - 1), work_s + seconds
        else:
            moved, moved_s = moved + bytes_moved(layer, size, 4) * passes, moved_s + seconds
    return (work / work_s if work_s else 0.0), (moved / moved_s if moved_s else 0.0)


def _points(fleet: Fleet, bench: Bench, tables: dict[str, list[Rows]]) -> tuple[LayerPoint, ...]:
    first = bench.alike()
    return tuple(
        _point(device.name, name, row)
        for index, device in enumerate(fleet.devices)
        for name in bench.layers
        for row in tables[first[name]][index]
    )


def _point(device: str, layer: str, row: Sequence[float]) -> LayerPoint:
    samples, outputs, inputs, forward_s, backward_s, spread, shared = row
    size = int(samples), int(outputs), int(inputs)
    return LayerPoint(device, layer, *size, float(forward_s), float(backward_s), float(spread), bool(shared))


def _device_costs(
    fleet: Fleet,
    traffic: Sequence[Traffic],
    costs: Sequence[dict[str, Any]],
    sync: SyncOverhead,
    noise: Sequence[QuotaNoise | None],
    reached: Sequence[tuple[float, float]],
    slowed: Iterable[float],
    powers: Iterable[tuple[float | None, str]],
) -> tuple[DeviceCosts, ...]:
    return tuple(
        DeviceCosts(
            device=device.name,
            send_s_per_byte=each.send_s_per_byte,
            receive_s_per_byte=each.receive_s_per_byte,
            traffic_spread=each.spread,
            jitter_s=jitter_s,
            noise=strays,
            other_load=load - 1 if load > NOTICED else 0.0,
            flop_per_s=rates[0],
            memory_bytes_per_s=rates[1],
            measured_w=watts,
            measured_by=by,
            **others,
        )
        for device, each, others, jitter_s, strays, rates, load, (watts, by) in zip(
            fleet.devices, traffic, costs, sync.jitter_s, noise, reached, slowed, powers, strict=True
        )
    )
