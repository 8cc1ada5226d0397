"""How cost grows with the number of equal devices and with the batch: which measured rows belong to which curve."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.configurations import EQUAL, PLAN_NAMES
from benchmarks.page import seconds, table
from benchmarks.results import Row
from benchmarks.score import error, full_spread

STRONG_BATCH, WEAK_SAMPLES, SWEPT_DEVICES = 64, 16, 4

STRONG = f"batch {STRONG_BATCH}"
WEAK = f"{WEAK_SAMPLES} samples a device"
BATCH = f"{SWEPT_DEVICES} devices"


@dataclass(frozen=True, slots=True)
class Scaled:
    """A measured row at a place on an axis."""

    axis: str
    x: int
    row: Row


def scaled(rows: Iterable[Row]) -> dict[str, list[Scaled]]:
    """The points of the three curves, by their titles. One device alone is a point of every plan: there they are the same."""
    found: dict[str, list[Scaled]] = {STRONG: [], WEAK: [], BATCH: []}
    for row in rows:
        count = row.fleet.removeprefix(EQUAL)
        if row.plan not in PLAN_NAMES or not row.fleet.startswith(EQUAL) or not count.isdecimal():
            continue
        devices = int(count)
        if row.batch == STRONG_BATCH:
            found[STRONG].append(Scaled("devices", devices, row))
        if row.batch == WEAK_SAMPLES * devices:
            found[WEAK].append(Scaled("devices", devices, row))
        if devices == SWEPT_DEVICES:
            found[BATCH].append(Scaled("samples in a batch", row.batch, row))
    return found


def scaling_section(rows: Sequence[Row], figure: str | None) -> list[str]:
    """Parts of the page; empty where nothing of this was measured."""
    found = scaled(rows)
    if not any(found.values()):
        return []
    parts = [
        "## How cost grows",
        f"Equal devices, named `{EQUAL}` and their number; a fixed batch, a batch that grows with the devices, and one "
        "fleet with growing batches. One device alone stands for all plans. Speedup: over one device at the same batch, where "
        "that was measured.",
        *([f"![Seconds of a step against devices and batch]({figure})"] if figure else []),
    ]
    for title, points in found.items():
        if points:
            parts += [f"**{title[0].upper() + title[1:]}**", _table(points)]
    return parts


def _table(points: Sequence[Scaled]) -> str:
    alone_s = {point.row.batch: point.row.median_s for point in points if point.axis == "devices" and point.x == 1}
    body = []
    for point in sorted(points, key=lambda each: each.x):
        row = point.row
        speedup = alone_s[row.batch] / row.median_s if row.batch in alone_s else None
        body.append(
            [str(point.x), row.net, str(row.batch), f"`{row.plan}`", seconds(row.median_s), f"{row.batch / row.median_s:.3g}",
             "" if speedup is None else f"{speedup:.2f}", seconds(row.predicted_s), f"{error(row):+.1%}",
             f"{full_spread(row.rounds_s):.0%}"]
        )  # fmt: skip
    head = [points[0].axis, "net", "batch", "plan", "step", "samples/s", "speedup", "predicted", "error", "spread"]
    return table(head, body)
