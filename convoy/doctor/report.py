"""Prints the devices, the links, the findings, and whether training can begin."""

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from convoy.doctor.facts import Examination, Finding, Pace, Reach
from convoy.report.numbers import in_bytes

LISTED_LINKS = 12
_INDENT = "    "
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(found: Examination, findings: Sequence[Finding], took_s: float, console: Console) -> None:
    """Print tables, findings and the last line."""
    console.print(_devices(found))
    versions = {name: sorted({getattr(each.info, name) for each in found.facts}) for name in ("convoy", "torch")}
    console.print(", ".join(f"{name} {' and '.join(those)}" for name, those in versions.items()), soft_wrap=True)
    if found.ways:
        console.print("\n".join(["", "Links, the slowest first:", *_links(found)]), soft_wrap=True)
    show_findings(findings, console)
    console.print()
    console.print(verdict(findings, took_s))


def show_findings(findings: Iterable[Finding], console: Console) -> None:
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
    """Return the last line."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in STYLES}
    listed = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if counts["error"]:
        return Text(f"Not ready to train: {listed}. Examined in {took_s:.1f} s.", style=STYLES["error"])
    return Text(f"Ready to train: {listed or 'nothing found'}. Examined in {took_s:.1f} s.", style="bold green")


def _devices(found: Examination) -> Table:
    table = Table(
        Column(justify="right"), Column("host", overflow="fold"), Column("address", no_wrap=True),
        Column("computes on", overflow="fold"),
        *(Column(name, justify="right", no_wrap=True) for name in ("cores", "free", "samples/s", "of all")),
        title="Devices", title_justify="left",
    )  # fmt: skip
    total = sum(pace.samples_per_s for pace in found.paces.values())
    for each in found.facts:
        device, speed = each.device, found.paces.get(each.device, Pace(0.0)).samples_per_s
        cores = min(each.cores, (found.file and found.row[device].cores) or each.cores)
        processor = each.inventory.processor if each.own.kind == "cpu" and each.inventory is not None else ""
        hardware = (
            (processor or each.info.name)
            .replace("(R)", "")
            .replace("(TM)", "")
            .split(" @")[0]
            .removesuffix(" Processor")
        )
        table.add_row(
            str(device), found.host[device], each.info.address or "none", f"{each.info.device}: {hardware}",
            f"{cores:.3g}" if each.own.kind == "cpu" else "", in_bytes(each.free_bytes),
            f"{speed:,.0f}" if speed else "-", f"{speed / total:.0%}" if total else "-",
        )  # fmt: skip
    return table


def _links(found: Examination) -> list[str]:
    """Return a line for each closed way and for the slowest of the open ones."""
    measured = () if found.measured is None else found.measured.links
    links = sorted((link for link in measured if link.source != link.target), key=lambda k: k.bandwidth_bytes_per_s)
    lines = [
        f"  {found.host[way.source]} to {found.host[way.target]}: {way.reach.value}"
        for way in found.ways
        if way.reach is not Reach.OPEN
    ]
    lines += [
        f"  {k.source} to {k.target}: {k.bandwidth_bytes_per_s / 1e6:,.3g} MB/s, {k.latency_s * 1e3:.2g} ms one way"
        for k in links
    ]
    return lines[:LISTED_LINKS]
