"""Prints the devices, the links, the findings, and whether training can begin."""

import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from convoy.doctor.schema import Examination, Finding, Link, Pace, Reach
from convoy.report.numbers import in_bytes

MATRIX_HOSTS = 6
"""More hosts than that do not fit a terminal side by side: then only the slowest links are shown."""

LISTED_LINKS = 10
_INDENT = "    "
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(examination: Examination, findings: Sequence[Finding], took_s: float, console: Console) -> None:
    """Print tables, findings and the last line."""
    if examination.checkups:
        console.print(_devices(examination))
        found = (
            (name, {getattr(own, name.lower()) for own in examination.checkups})
            for name in ("convoy", "torch", "Python")
        )
        console.print(", ".join(f"{name} {' and '.join(sorted(versions))}" for name, versions in found), soft_wrap=True)
    if examination.links:
        console.print("\nLinks, in MB/s and ms there and back:")
        console.print(_matrix(examination) if len(examination.hosts) <= MATRIX_HOSTS else _list(examination))
    tell(findings, console)
    console.print()
    console.print(verdict(findings, took_s))


def tell(findings: Iterable[Finding], console: Console) -> None:
    """Print each finding: how bad, what, and the cure."""
    for finding in findings:
        what, cure = (text if text.endswith(".") else f"{text}." for text in (finding.what, finding.cure))
        console.print()
        # By textwrap, since rich pads wrapped lines with blanks, which get into logs and mails.
        first, *rest = textwrap.wrap(f"{finding.severity.upper()}: {what}", console.width)
        word, _, start = first.partition(" ")
        console.print(Text.assemble((word, STYLES[finding.severity]), " ", start))
        for line in [*rest, *(_INDENT + each for each in textwrap.wrap(cure, console.width - len(_INDENT)))]:
            console.print(Text(line))


def verdict(findings: Sequence[Finding], took_s: float) -> Text:
    """The last line."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in STYLES}
    listed = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if counts["error"]:
        return Text(f"Not ready to train: {listed}. Examined in {took_s:.1f} s.", style=STYLES["error"])
    return Text(f"Ready to train: {listed or 'nothing found'}. Examined in {took_s:.1f} s.", style="bold green")


def _devices(examination: Examination) -> Table:
    """A row per device."""
    table = Table(
        Column(justify="right"), Column("host", overflow="fold"), Column("address", no_wrap=True),
        Column("computes on", overflow="fold"),
        *(Column(name, justify="right", no_wrap=True) for name in ("cores", "free", "samples/s", "of all")),
        title="Devices", title_justify="left",
    )  # fmt: skip
    total = sum(pace.samples_per_s for pace in examination.paces.values())
    came = {own.device: own for own in examination.checkups}
    for device in range(examination.devices):
        own, pace = came.get(device), examination.paces.get(device, Pace(0.0))
        if own is None:
            table.add_row(str(device), examination.host.get(device, "?"), "did not come", *[""] * 5)
            continue
        on_cpu, described = own.on.startswith("cpu"), examination.described(own)
        usable = min(own.usable_cores, (described and described.cores) or own.usable_cores)
        cores = f"{usable:.3g}" + (f" of {own.cores}" if usable < own.cores else "")
        gpu = own.gpus[int(own.on.partition(":")[2] or 0)] if not on_cpu and own.gpus else None
        hardware = own.hardware.replace("(R)", "").replace("(TM)", "").split(" @")[0].removesuffix(" Processor")
        table.add_row(
            str(device), examination.host[device], own.address or "none", f"{own.on}: {hardware}", cores if on_cpu else "",
            in_bytes(gpu.free_bytes if gpu else own.free_bytes), f"{pace.samples_per_s:,.0f}" if pace.samples_per_s else "-",
            f"{pace.samples_per_s / total:.0%}" if total else "-",
        )  # fmt: skip
    return table


# ------------------------------------------------------------------------------------------------ links

_CLOSED = {
    Reach.REFUSED: "refused",
    Reach.SILENT: "no answer",
    Reach.NO_ROUTE: "no route",
    Reach.STRANGER: "stranger",
}


def _matrix(examination: Examination) -> Table:
    """From each host to each: MB/s, and ms there and back."""
    hosts = examination.hosts
    table = Table("from", *(Column(f"to {host}", justify="right") for host in hosts))
    for source in hosts:
        links = [(target, examination.ways.get((source, target))) for target in hosts]
        cells = [_cells(link) if link else [Text("" if source == target else "-")] for target, link in links]
        table.add_row(source, *(Text(", ").join(each) for each in cells))
    return table


def _list(examination: Examination) -> Table:
    """The closed links and the slowest of the others."""

    def rank(pair: tuple[str, str]) -> tuple[bool, float]:
        link = examination.ways[pair]
        return link.reach is Reach.OPEN, math.inf if link.bytes_per_s is None else link.bytes_per_s

    shown = sorted(examination.ways, key=rank)[:LISTED_LINKS]
    table = Table(
        "from", "to", *(Column(name, justify="right") for name in ("MB/s", "ms there and back")),
        title=f"the slowest {len(shown)} of {len(examination.ways)}", title_justify="left",
    )  # fmt: skip
    for pair in shown:
        table.add_row(*pair, *_cells(examination.ways[pair]))
    return table


def _cells(link: Link) -> list[Text]:
    if link.reach is not Reach.OPEN:
        return [Text(_CLOSED[link.reach], style=STYLES["error"])]
    rate = "-" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e6:,.3g}"
    return [Text(rate), Text("-" if link.round_trip_s is None else f"{link.round_trip_s * 1e3:.2g}")]
