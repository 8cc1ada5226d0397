"""What `convoy doctor` prints: the devices, the links, what was found, and whether training can begin."""

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from convoy.doctor.facts import Checkup, Examination, Finding, Link, Reach
from convoy.doctor.names import Names, names_of
from convoy.report.numbers import in_bytes

MATRIX_HOSTS = 6
"""More hosts than that do not fit a terminal side by side: then only the slowest links are shown."""

LISTED_LINKS = 10
_INDENT = "    "
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(examination: Examination, findings: Sequence[Finding], took_s: float, console: Console) -> None:
    """Tables, findings, the last line."""
    names = names_of(examination)
    if examination.checkups:
        console.print(_devices(examination, names))
        console.print(_versions(examination.checkups), soft_wrap=True)
    if examination.links:
        console.print("\nLinks, in MB/s and ms there and back:")
        console.print(_matrix(examination, names) if len(names.first) <= MATRIX_HOSTS else _list(examination, names))
    tell(findings, console)
    console.print()
    console.print(verdict(findings, took_s))


def tell(findings: Iterable[Finding], console: Console) -> None:
    """Each finding: how bad, what, and the cure."""
    for finding in findings:
        console.print()
        # By textwrap, since rich pads wrapped lines with blanks, which get into logs and mails.
        first, *rest = textwrap.wrap(f"{finding.severity.upper()}: {_sentence(finding.what)}", console.width)
        word, _, start = first.partition(" ")
        console.print(Text.assemble((word, STYLES[finding.severity]), " ", start))
        cure = textwrap.wrap(_sentence(finding.cure), console.width - len(_INDENT))
        for line in [*rest, *(_INDENT + each for each in cure)]:
            console.print(Text(line))


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def verdict(findings: Sequence[Finding], took_s: float) -> Text:
    """The last line."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in STYLES}
    listed = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count)
    if counts["error"]:
        return Text(f"Not ready to train: {listed}. Examined in {took_s:.1f} s.", style=STYLES["error"])
    return Text(f"Ready to train: {listed or 'nothing found'}. Examined in {took_s:.1f} s.", style="bold green")


def _devices(examination: Examination, names: Names) -> Table:
    """A row per device."""
    table = Table(title="Devices", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("host", overflow="fold")
    table.add_column("address", no_wrap=True)
    table.add_column("computes on", overflow="fold")
    for name in ("cores", "free", "samples/s", "of all"):
        table.add_column(name, justify="right", no_wrap=True)
    total = sum(pace.samples_per_s for pace in examination.paces.values())
    present = {checkup.device: checkup for checkup in examination.checkups}
    for device in range(examination.devices):
        checkup, pace = present.get(device), examination.paces.get(device)
        if checkup is None:
            table.add_row(str(device), names.host.get(device, "?"), "did not come", *[""] * 5)
            continue
        speed = pace.samples_per_s if pace else 0.0
        table.add_row(
            str(device), names.host[device], checkup.address or "none", _hardware(checkup), _cores(checkup, names),
            _free(checkup), f"{speed:,.0f}" if speed else "-", f"{speed / total:.0%}" if total else "-",
        )  # fmt: skip
    return table


def _hardware(checkup: Checkup) -> str:
    name = checkup.hardware.replace("(R)", "").replace("(TM)", "").split(" @")[0].removesuffix(" Processor")
    return f"{checkup.on}: {name}"


def _cores(checkup: Checkup, names: Names) -> str:
    if not checkup.on.startswith("cpu"):
        return ""
    imposed = names.fleet.devices[checkup.device].cores if names.fleet else None
    usable = min(checkup.usable_cores, imposed or checkup.usable_cores)
    return f"{usable:.3g}" + (f" of {checkup.cores}" if usable < checkup.cores else "")


def _free(checkup: Checkup) -> str:
    if checkup.on.startswith("cuda"):
        return in_bytes(checkup.gpus[int(checkup.on.partition(":")[2] or 0)].free_bytes)
    return in_bytes(checkup.free_bytes)


def _versions(checkups: Sequence[Checkup]) -> str:
    found = [sorted({getattr(checkup, name) for checkup in checkups}) for name in ("convoy", "torch", "python")]
    return ", ".join(
        f"{name} {' and '.join(each)}" for name, each in zip(("convoy", "torch", "Python"), found, strict=True)
    )


# ------------------------------------------------------------------------------------------------ links

_CLOSED = {
    Reach.REFUSED: "refused",
    Reach.SILENT: "no answer",
    Reach.NO_ROUTE: "no route",
    Reach.STRANGER: "stranger",
}


def _matrix(examination: Examination, names: Names) -> Table:
    """From each host to each: what the link carries, and how long a message takes there and back."""
    table = Table()
    table.add_column("from")
    for host in names.first:
        table.add_column(f"to {host}", justify="right")
    ways = {(names.host[link.source], names.host[link.target]): link for link in examination.links}
    for source in names.first:
        cells = [_cell(ways.get((source, target)), source == target) for target in names.first]
        table.add_row(source, *cells)
    return table


def _cell(link: Link | None, same: bool) -> Text:
    if link is None:
        return Text("" if same else "-")
    if link.reach is not Reach.OPEN:
        return Text(_CLOSED[link.reach], style=STYLES["error"])
    rate = "-" if link.bytes_per_s is None else f"{link.bytes_per_s / 1e6:,.3g}"
    trip = "-" if link.round_trip_s is None else f"{link.round_trip_s * 1e3:.2g}"
    return Text(f"{rate}, {trip}")


def _list(examination: Examination, names: Names) -> Table:
    """The closed links and the slowest of the others."""
    ranked = sorted(examination.links, key=lambda link: (link.reach is Reach.OPEN, _rank(link)))
    shown = ranked[:LISTED_LINKS]
    table = Table(title=f"the slowest {len(shown)} of {len(ranked)}", title_justify="left")
    for name in ("from", "to"):
        table.add_column(name)
    for name in ("MB/s", "ms there and back"):
        table.add_column(name, justify="right")
    for link in shown:
        ends = names.host[link.source], names.host[link.target]
        if link.reach is not Reach.OPEN:
            table.add_row(*ends, Text(_CLOSED[link.reach], style=STYLES["error"]), "")
        else:
            rate, trip = _cell(link, same=False).plain.split(", ")
            table.add_row(*ends, rate, trip)
    return table


def _rank(link: Link) -> float:
    return float("inf") if link.bytes_per_s is None else link.bytes_per_s
