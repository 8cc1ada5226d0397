"""What Convoy takes of a step, on docs/benchmarks.md, from the file that `benchmarks.overhead` wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.hardware import Ground
from benchmarks.page import seconds, table
from benchmarks.results import read_if_kept
from convoy.simulate.overhead import Overheads


@dataclass(frozen=True)
class OverheadRow:
    """One net at one batch.

    Attributes:
        plain_s, alone_s, shared_s, layered_s: medians of a step, in plain PyTorch and in Convoy's three ways.
        alone, shared, layered: the same over plain PyTorch, the median of the ratios of each round.
        spread: of plain PyTorch's rounds, the middle half, relative to their median.
    """

    net: str
    batch: int
    plain_s: float
    alone_s: float
    shared_s: float
    layered_s: float
    alone: float
    shared: float
    layered: float
    spread: float


@dataclass(frozen=True)
class OverheadFile:
    """What of the file the page shows."""

    command: str
    date: str
    ground: Ground
    load_average: float
    rows: Sequence[OverheadRow]
    overheads: Overheads


_FILE = TypeAdapter(OverheadFile)


def read_overhead(path: Path) -> OverheadFile | None:
    """What is in the file; None where there is none.

    Raises:
        InputError: it is not what this version of `benchmarks.overhead` writes.
    """
    return read_if_kept(path, _FILE, "benchmarks.overhead")


def overhead_section(found: OverheadFile | None) -> list[str]:
    """Parts of the page; empty where it was not run."""
    if found is None:
        return []
    body = [
        [
            row.net,
            str(row.batch),
            seconds(row.plain_s),
            f"{row.spread:.1%}",
            f"{row.alone - 1:+.1%}",
            f"{row.shared - 1:+.1%}",
            f"{row.layered - 1:+.1%}",
        ]
        for row in found.rows
    ]
    here, of = found.ground, found.overheads
    return [
        "## What Convoy takes of a step",
        f"One thread of {here.processor}, convoy {here.convoy} at {here.revision or 'an unknown revision'}, {found.date[:10]}; "
        f"load average {found.load_average:.1f}. The same steps in plain PyTorch and in Convoy on one device, in turns. Alone: "
        "the only device. Shared: one of two devices by `data-by-speed` with as many samples of its own, without the wire. "
        "Layer by layer: alone, without fused stretches.",
        f"```\n{found.command}\n```",
        table(["net", "batch", "plain PyTorch", "spread (middle half)", "alone", "shared", "layer by layer"], body),
        f"What predictions charge on this machine beside layers, bytes and copies: {seconds(of.layer_s)} a layer, forward "
        f"and backward; {seconds(of.round_s)} a round of messages with one message, {seconds(of.message_s)} each further one; "
        f"{seconds(of.update_s_per_tensor)} a parameter tensor in the optimizer; {seconds(of.step_s)} a step for the batch, "
        "the loss and the calls around them, which plain PyTorch takes, too. A device with a tenth of a core takes ten times "
        "as long.",
    ]
