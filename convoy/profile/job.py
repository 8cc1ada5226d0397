"""The measuring job: every device times its layers, all at the same time, then the wire, then the sizes that plans have.

Layer by layer the devices wait for each other, so that they load a shared machine as in training, and a device that is
lost is missed soon. The layers that all have measured are kept in a partial file, from which a second run goes on.
"""

import datetime
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convoy._version import __version__
from convoy.comm.agreement import check_same, from_first, gather
from convoy.comm.group import Group
from convoy.cost.overhead import Overheads
from convoy.cost.table import FORMAT, DeviceCosts, LayerPoint, Measurement
from convoy.errors import InputError
from convoy.fleet import Fleet
from convoy.model.tracing import TracedModel
from convoy.plan.size import LocalSize
from convoy.profile.axes import allowances
from convoy.profile.describe import Own, describe, fit, fleet_of, host_indices, spreads, with_wire
from convoy.profile.layers import Bench, Point
from convoy.profile.links import Traffic, WireTimes, measure_links, processor_share
from convoy.profile.overheads import measure_jitter, measure_overheads
from convoy.profile.sizes import sizes_to_profile
from convoy.profile.timing import STRETCH_S, Now, quota_now, time_update
from convoy.runtime.clock import Clock
from convoy.runtime.precision import agree_on_precision

Rows = Sequence[Sequence[float]]
"""Of one layer on one device: samples, outputs, inputs, forward_s, backward_s, spread, shared (0 or 1)."""

GRID_PART = 2 / 3
"""The part of the layers' seconds that goes to the grids; the rest is for the sizes that plans have."""

Progress = Callable[[str, int, int], None]
"""Is told what is measured, how much is done, and how much there is."""

BUDGET_S = 60.0
LINKS_BUDGET_S = 20.0

SHARE_STRETCHES = 50
"""The share of a processor is in every time of a device under a quota: it is measured for so many stretches, a second."""


# --- the file of an unfinished measuring ------------------------------------------------------------------------------


class Partial:
    """A file of JSON lines: what is measured, then one line per layer with the rows of every device.

    Args:
        path: where; None keeps nothing.
        header: what must be the same for a second run to continue.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, json.loads(json.dumps(header))
        self.tables: dict[str, list[Rows]] = {}
        if path is not None:
            self.tables = self._read(path)
            self._write()

    def add(self, layer: str, rows: Sequence[Rows]) -> None:
        """Keep a layer that all devices have measured."""
        self.tables[layer] = [list(device) for device in rows]
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([layer, rows]) + "\n")

    def remove(self) -> None:
        """The measuring is done, or not wanted."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> dict[str, list[Rows]]:
        """Whole lines of a run with the same header; nothing of any other."""
        with suppress(FileNotFoundError, UnicodeDecodeError):
            first, *lines = path.read_text(encoding="utf-8").split("\n")
            if _parsed(first) != self.header:
                return {}
            # The last line of a run that was killed may be a part of one.
            pairs = [pair for pair in map(_parsed, lines) if pair is not None]
            return {layer: rows for layer, rows in pairs if len(rows) == len(self.header["devices"])}
        return {}

    def _write(self) -> None:
        assert self.path is not None
        lines = [json.dumps(self.header), *(json.dumps(pair) for pair in self.tables.items())]
        try:
            self.path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write {self.path}: {error.strerror}; name a file in a folder you may write"
            ) from None


def unfinished(path: Path) -> str:
    """What to tell a person whose measuring ended early; empty where no layer was finished."""
    with suppress(OSError, UnicodeDecodeError):
        done = sum(_parsed(line) is not None for line in path.read_text(encoding="utf-8").splitlines()[1:])
        if done:
            return f"{done} layers are measured and kept in {path}: the same command goes on from there"
    return ""


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


# --- the job -----------------------------------------------------------------------------------------------------------


def measure_job(
    group: Group,
    traced: TracedModel,
    model: nn.Module,
    batch: int,
    *,
    net: str,
    fleet: Fleet | None = None,
    budget_s: float = BUDGET_S,
    links_budget_s: float = LINKS_BUDGET_S,
    slowdown: float = 1.0,
    partial: Path | None = None,
    precision: str = "float32",
    progress: Progress = lambda *_: None,
    stretch_s: float = STRETCH_S,
) -> Measurement:
    """Measure a model on the devices of a group, and the wire between them. All devices call it; all get the same value.

    Args:
        traced: the model in training mode; `model` itself, whole and left as it is.
        batch: the global batch, the largest number of samples that is timed.
        net: the model's name, for people.
        fleet: the fleet's description; its cards and links are replaced by measured ones. None: the devices
            describe themselves.
        budget_s, links_budget_s: about the seconds that the layers and the wire may take.
        slowdown: this device plays one that is so many times slower at computing.
        partial: where device 0 keeps finished layers, and finds those of an earlier run that was cut off. It is removed
            at the end.
        precision: what the layers compute in; see `convoy.runtime.precision`.
        stretch_s: see `convoy.profile.timing.time_piece`.

    Raises:
        InputError: a fleet that is not this job's; a precision that a device or the model does not have.
        MismatchError: the devices were started with different models, batches or fleets.
        DeviceLostError: a device did not answer within the group's time limit.
    """
    own = describe(group.torch_device, slowdown)
    rows = [Own(**row) for row in gather(group, "machine", asdict(own))]
    agreed, date = _agreed(group, traced, batch, fleet)
    agree_on_precision(group, traced.graph, precision)
    fleet = fleet_of(rows) if fleet is None else fit(fleet, rows)
    kept = Partial(
        partial if group.device == 0 else None,
        agreed | {"precision": precision, "torch": str(torch.__version__), "devices": [_identity(row) for row in rows]},
    )
    share = processor_share(SHARE_STRETCHES * stretch_s)
    clock, now = Clock(group.torch_device, slowdown), quota_now(group.torch_device, share, slowdown)
    bench = Bench(traced, model, batch, clock, group.torch_device, now=now, stretch_s=stretch_s, precision=precision)
    steps = _measure_tables(group, bench, kept, budget_s * GRID_PART, progress)
    wire = measure_links(
        group,
        host_indices(fleet),
        share,
        budget_s=links_budget_s,
        progress=lambda what: progress(what, steps, steps),
    )
    progress("what a step costs beside its layers", steps, steps)
    costs = _measure_costs(group, now, stretch_s, wire.traffic[group.device].message_s, share)
    progress("exchanges between devices that compute", steps, steps)
    jitter_s = measure_jitter(group, clock, _exchange_s(wire, costs), stretch_s)
    links, cards = spreads(fleet, wire)
    measured = Measurement(
        fleet=with_wire(fleet, wire),
        net=net,
        fingerprint=traced.graph.fingerprint,
        batch=batch,
        convoy=__version__,
        torch=str(torch.__version__),
        date=date,
        device=_device_costs(fleet, wire.traffic, costs, jitter_s),
        layer=_points(fleet, bench, kept.tables),
        link=links,
        host=cards,
        precision=precision,
    )
    progress("the sizes that plans have", steps, steps)
    measured = _with_plan_sizes(group, bench, measured, budget_s * (1 - GRID_PART))
    kept.remove()
    return measured


def _agreed(group: Group, traced: TracedModel, batch: int, fleet: Fleet | None) -> tuple[dict[str, Any], str]:
    """What every device must have been given, and the date on device 0."""
    own = {
        "model": traced.graph.fingerprint,
        "batch": batch,
        "fleet": "" if fleet is None else hashlib.sha256(fleet.to_toml().encode()).hexdigest()[:16],
        "convoy": __version__,
        "format": FORMAT,
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    rows = gather(group, "measure", [own, date])
    for name in own:
        check_same([row[name] for row, _ in rows], f"started with another {name}")
    return own, rows[0][1]


def _identity(row: Own) -> list[Any]:
    """What a device must still be for its earlier times to hold."""
    return [row.name, row.kind, row.cores, row.slowdown]


def _measure_tables(group: Group, bench: Bench, kept: Partial, budget_s: float, progress: Progress) -> int:
    """Time what is not kept yet, layer by layer, and keep it; how many layers there were."""
    first = bench.alike()
    names = [name for name in bench.layers if first[name] == name]
    kept.tables = from_first(group, "kept tables", lambda: kept.tables)
    ahead = [name for name in names if name not in kept.tables]
    left_s = budget_s
    for index, name in enumerate(ahead):
        progress(f"layer {name}", len(names) - len(ahead) + index, len(names))
        start_s = time.monotonic()
        share_s = allowances(bench.traced.graph, ahead[index:], left_s)[name]
        points = bench.measure(name, min(share_s, group.timeout_s / 4))
        left_s = max(0.0, left_s - (time.monotonic() - start_s))
        rows = [_row(point) for point in points]
        kept.add(name, gather(group, f"table of {name}", rows))
    return len(names)


def _with_plan_sizes(group: Group, bench: Bench, measured: Measurement, allowance_s: float) -> Measurement:
    """The measurement with more sizes of layers: those that plans have, as many as there is time for."""
    first = bench.alike()
    sizes = from_first(
        group,
        "sizes to profile",
        lambda: [
            [asdict(w) for w in each] for each in sizes_to_profile(measured, bench.traced.graph, bench.batch, first)
        ],
    )[group.device]
    start_s, allowance_s = time.monotonic(), min(allowance_s, group.timeout_s / 4)
    rows: dict[str, list[list[float]]] = {}
    for each in sizes:
        # A size that no longer fits may be followed by a shorter one that does.
        if time.monotonic() - start_s + bench.timing_s(each["seconds"]) <= allowance_s:
            rows.setdefault(each["layer"], []).append(_row(bench.time(each["layer"], LocalSize(**each["size"]))))
    tables = gather(group, "times of these sizes", rows)
    more = tuple(
        replace(_point(device.name, name, row), beside=True)
        for device, table in zip(measured.fleet.devices, tables, strict=True)
        for name in bench.layers
        for row in table.get(first[name], [])
    )
    return replace(measured, layer=measured.layer + more)


def _measure_costs(group: Group, now: Now, stretch_s: float, message_s: float, share: float) -> list[dict[str, float]]:
    """What a step costs each device beside its layers and the wire, in the names of `DeviceCosts`."""
    update_s, update_spread = time_update(group.torch_device, now, stretch_s)
    overheads = measure_overheads(group.torch_device, now, stretch_s, message_s, share)
    own = asdict(overheads) | {"update_s_per_entry": update_s, "update_spread": update_spread}
    return gather(group, "costs of a step", own)


def _exchange_s(wire: WireTimes, costs: Sequence[dict[str, float]]) -> float:
    """The price at rest of a round in which each device sends a few bytes to all others, as a replay has it."""
    calls = [Overheads(round_s=each["round_s"], message_s=each["message_s"]) for each in costs]
    calls_s = max(each.calls_s(2 * (len(costs) - 1)) for each in calls)
    return calls_s + max((link.latency_s for link in wire.pairs), default=0.0)


def _row(point: Point) -> list[float]:
    size, times = point.size, point.times
    seconds = [times.forward_s, times.backward_s, times.spread]
    return [size.samples, size.outputs, size.inputs, *seconds, float(size.shares_statistics)]


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
    fleet: Fleet, traffic: Sequence[Traffic], costs: Sequence[dict[str, float]], jitter_s: Sequence[float]
) -> tuple[DeviceCosts, ...]:
    return tuple(
        DeviceCosts(
            device=device.name,
            send_s_per_byte=each.send_s_per_byte,
            receive_s_per_byte=each.receive_s_per_byte,
            traffic_spread=each.spread,
            jitter_s=jitter,
            **others,
        )
        for device, each, others, jitter in zip(fleet.devices, traffic, costs, jitter_s, strict=True)
    )
