"""Sweeps over the five axes of Castello et al. 2021: batch size, arithmetic, memory bandwidth, link bandwidth, devices.

Every point is priced by the closed form (`closed_form.py`, which states what it assumes). Speedup is against the same
device training alone with the same global batch; a speedup against another baseline means something else.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convoy.errors import InputError
from convoy.layout.collectives import Reduce
from convoy.model.graph import Graph
from studies.closed_form import StepTimes, plan_times
from studies.collectives import Floats, Numbers
from studies.points import Points
from studies.power import Power

PLANS = ("data", "model", "hybrid", "master")
"""Plans with a closed form. On equal devices data-by-speed is data; auto has none, see `fleets.py`."""

BASE: Mapping[str, float] = {
    "devices": 8,
    "batch": 256,
    "flop_per_s": 1e12,
    "memory_bytes_per_s": 100e9,
    "link_bytes_per_s": 1.25e9,
    "latency_s": 5e-5,
    "message_s": 5e-6,
}
"""Where each axis is swept from: eight nodes of 1 TFLOP/s and 100 GB/s on 10 Gbit/s Ethernet, round figures. 5 us per message
is the order of a socket call."""

AXES: Mapping[str, Sequence[float]] = {
    "batch": tuple(2.0**i for i in range(3, 15)),
    "flop_per_s": tuple(np.geomspace(1e10, 1e14, 33)),
    "memory_bytes_per_s": tuple(np.geomspace(5e9, 4e12, 33)),
    "link_bytes_per_s": tuple(np.geomspace(12.5e6, 125e9, 33)),
    "devices": tuple(2.0**i for i in range(13)),
}
"""The five axes, and the values of each."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One plan over some points.

    Attributes:
        alone_s: the step of one such device alone.
    """

    plan: str
    points: Points
    times: StepTimes
    alone_s: Floats

    @property
    def speedup(self) -> Floats:
        return self.alone_s / self.times.step_s

    @property
    def samples_per_s(self) -> Floats:
        return self.points.batch / self.times.step_s

    def image_j(self, power: Power) -> Floats:
        """Return joules per sample over all devices, given each one's watts."""
        idle_j = power.idle_w * self.points.devices * self.times.step_s
        busy_j = (power.busy_w - power.idle_w) * self.times.busy_device_s
        return np.asarray((idle_j + busy_j) / self.points.batch)


def sweep(
    graph: Graph,
    points: Points,
    plans: Sequence[str] = PLANS,
    *,
    reduce: Reduce | None = None,
    optimizer: str = "sgd-momentum",
    overlap: bool = False,
) -> list[Sweep]:
    """Price each plan at every point; see `closed_form.plan_times` for the options.

    Raises:
        InputError: a plan without a closed form, an unknown reduce or optimizer.
    """
    for name in plans:
        if name not in (*PLANS, "data-by-speed"):
            raise InputError(f"plan {name!r} has no closed form: choose from {', '.join(PLANS)}, or replay a fleet")
    # Alone, every plan does the same: nothing is split and nothing travels.
    single = replace(points, devices=np.ones(len(points)))
    alone_s = plan_times("data", graph, single, optimizer=optimizer).step_s
    options = {"reduce": reduce, "optimizer": optimizer, "overlap": overlap}
    return [Sweep(name, points, plan_times(name, graph, points, **options), alone_s) for name in plans]  # type: ignore[arg-type]


def along(axis: str, values: Sequence[float] | Floats | None = None, base: Mapping[str, float] = BASE) -> Points:
    """Return points along one of `AXES`, with everything else at `base`.

    Raises:
        InputError: an axis that is not one of the five.
    """
    if axis not in AXES:
        raise InputError(f"axis {axis!r}: the axes are {', '.join(AXES)}; choose one")
    return points_at(base, **{axis: np.asarray(AXES[axis] if values is None else values, dtype=np.float64)})


def points_at(base: Mapping[str, float], **changed: Numbers) -> Points:
    """Return the base point with some numbers replaced by others or by arrays."""
    given: dict[str, Numbers] = {**base, **changed}
    return Points.of(**given)


def five_axes(
    graph: Graph, plans: Sequence[str] = PLANS, base: Mapping[str, float] = BASE, *, overlap: bool = False
) -> dict[str, list[Sweep]]:
    """Sweep along each of the five axes."""
    return {axis: sweep(graph, along(axis, base=base), plans, overlap=overlap) for axis in AXES}


def crossover(graph: Graph, points: Points, first: str, second: str, axis: str) -> Floats:
    """Return where along `axis` `second` becomes the faster plan: one value per change between neighbouring points.

    `points` vary along `axis` only, in ascending order. The value is where straight lines between the points, drawn in
    logarithms, cross.
    """
    a, b = (s.times.step_s for s in sweep(graph, points, (first, second)))
    x = np.log(points.columns()[axis])
    gap = np.log(a) - np.log(b)
    starts = np.flatnonzero((gap[:-1] <= 0) & (gap[1:] > 0))
    part = gap[starts] / (gap[starts] - gap[starts + 1])
    return np.asarray(np.exp(x[starts] + part * (x[starts + 1] - x[starts])))


def rows_of(sweeps: Iterable[Sweep]) -> list[dict[str, str | float]]:
    """Return a row per plan and point for a CSV file: the point, the parts of the step, the speedup."""
    rows: list[dict[str, str | float]] = []
    for each in sweeps:
        columns = dict(each.points.columns())
        times = each.times
        columns |= {"compute_s": times.compute_s, "moves_s": times.moves_s, "sums_s": times.sums_s}
        columns |= {"update_s": times.update_s, "step_s": times.step_s}
        columns |= {"samples_per_s": each.samples_per_s, "speedup": each.speedup}
        columns["speedup_per_device"] = each.speedup / each.points.devices
        for i in range(len(each.points)):
            rows.append({"plan": each.plan} | {name: float(values[i]) for name, values in columns.items()})
    return rows


def write_csv(path: Path, rows: Sequence[Mapping[str, str | float]]) -> Path:
    """Write rows with the same keys; numbers have six digits.

    Raises:
        InputError: no rows, or the file cannot be written.
    """
    if not rows:
        raise InputError(f"nothing to write to {path}: a table has one row at least; widen the sweep")
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({key: _text(value) for key, value in row.items()} for row in rows)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}; give a folder that exists and can be written") from None
    return path


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
