"""The table of families: stored in families.json, shown on docs/families.md."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from lab.families.registry import CONVOLUTIONS, Member
from lab.families.trial import BATCH, BIAS, RATE, SLOW_RATE, SPEEDS, STABLE, STEPS, Row

KEPT = Path(__file__).parent / "families.json"
PAGE = Path(__file__).parents[2] / "docs" / "families.md"


@dataclass(frozen=True)
class Kept:
    """The results with their date and library versions."""

    date: str = ""
    versions: str = ""
    members: tuple[Member, ...] = ()
    rows: tuple[Row, ...] = ()


_FILE = TypeAdapter(Kept)


def versions() -> str:
    names = ("torch", "torchvision", "timm")
    return ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in names)


def read() -> Kept:
    return _FILE.validate_json(KEPT.read_bytes()) if KEPT.exists() else Kept()


def write(kept: Kept) -> None:
    KEPT.write_bytes(_FILE.dump_json(kept, indent=1))
    PAGE.write_text(text(kept))


def text(kept: Kept) -> str:
    rows = sorted(kept.rows, key=lambda row: row.family)
    exact, untried = [row for row in rows if row.exact], [row for row in rows if row.untried]
    shared = [row for row in exact if row.shared_out >= 95.0]
    others = [member for member in kept.members if not member.convolutional]
    shares = ", ".join(f"{speed:g}" for speed in SPEEDS.devices)
    return "\n".join((
        "# Tested families of nets",
        "",
        "The smallest member of every convolutional family of torchvision and timm, unchanged, with fresh weights: "
        f"{len(rows)} families, {len(untried)} of which need a larger machine ({kept.versions}; {kept.date}).",
        "",
        f"- **{len(exact)} of {len(rows)}** ({_percent(exact, rows)}) train exactly as on one device: {STEPS} steps in "
        "float64. Losses, weights, buffers, the gradients of the last step and the outputs in evaluation agree to 1e-10, "
        "with both plans below.",
        f"- **{len(shared)} of {len(rows)}** ({_percent(shared, rows)}) are exact and have at least 95 % of their "
        "FLOP distributed.",
        "",
        *_older(rows),
        f"Each net is trained on three devices with speeds of {shares} and a batch of {BATCH}, with two plans: "
        "`data-by-speed`, and every layer split by filters where possible, the others by samples. The table shows "
        "the percentages of the forward FLOP with the second plan. *Whole* counts the layers that no rule splits. *Apart* is "
        "the largest difference of both plans from one device. *Rounding* is how much one device differs from itself if its "
        "images and weights change by 1e-15.",
        "",
        f"A family is a module of the library. It is convolutional if its smallest member has at least {CONVOLUTIONS} "
        "convolutions with kernels larger than their strides. Images have the smallest size from 64 pixels on that the net "
        f"accepts, and at which rounding stays below {STABLE:g} on one device. Otherwise biases of batch norms start at "
        f"{BIAS:g} instead of 0 (*). Dropout and stochastic depth are 0. {_slow(rows)}VGG's classifier has 64 features "
        "instead of 4,096.",
        "",
        "`python -m lab.families` makes this table in half an hour:",
        "",
        "| family | smallest member | million parameters | image | layers | whole | by filter | by samples | not split "
        "| apart | rounding | exact |",
        "| --- " * 12 + "|",
        *map(_line, rows),
        "",
        *_remarks(rows),
        "## Not convolutional",
        "",
        f"Fewer than {CONVOLUTIONS} such convolutions in the smallest member: "
        + ", ".join(f"{member.family} (`{member.name}`)" for member in others) + ".",
        "",
    ))  # fmt: skip


def _slow(rows: Sequence[Row]) -> str:
    if all(row.rate == RATE for row in rows):
        return ""
    return f"Nets that diverge at a learning rate of {RATE:g} on one device use {SLOW_RATE:g} (**). "


def _older(rows: Sequence[Row]) -> list[str]:
    older = [row for row in rows if not row.gradients and not row.error]
    what = "without gradients, and with rounding of images only"
    return [f"{len(older)} of the rows are from an earlier trial: {what}.", ""] if older else []


def _line(row: Row) -> str:
    start = f"| {row.family} | `{row.name}` | {row.parameters / 1e6:.1f} "
    if row.error or row.by_filters is None:
        return f"{start}| | | | | | | | | not trained |"
    shares = " | ".join(f"{row.by_filters[how]:.0f} %" for how in ("filters", "samples", "one"))
    apart = f"{max(row.apart):.0e} | {row.rounding:.0e} | {'yes' if row.exact else '**no**'}"
    image = "x".join(map(str, row.shape[1:])) + (" *" * row.biased + "*" * (row.rate < RATE))
    return f"{start}| {image} | {row.layers} | {row.whole} | {shares} | {apart} |"


def _remarks(rows: Sequence[Row]) -> list[str]:
    odd = [row for row in rows if not row.exact or row.shared_out < 95.0]
    if not odd:
        return []
    lines = [f"- **{row.family}**: {_remark(row)}" for row in odd]
    return ["## Not exact or not fully distributed", "", *lines, ""]


def _remark(row: Row) -> str:
    if row.exact or row.error:
        return row.error or "; ".join(row.reasons)
    if row.rounding > STABLE:
        return (
            f"no answer at 1e-10: images and weights changed by 1e-15 move one device from itself by {row.rounding:.0e}"
        )
    return "not exact"


def _percent(some: Sequence[Row], of: Sequence[Row]) -> str:
    return f"{100 * len(some) / max(len(of), 1):.0f} %"
