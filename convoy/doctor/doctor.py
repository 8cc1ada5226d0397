"""The command `convoy doctor`: runs an examination, prints tables and findings, and returns the exit status."""

import math
import os
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from convoy.comm.environment import ProcessEnv, imposed_slowdown, read_process_env
from convoy.doctor.examine import examine_alone, examine_fleet, examine_job
from convoy.doctor.facts import CONTEXT, Context, Examination, Finding, Pace, Reach, collect_facts, from_text
from convoy.doctor.findings import diagnose
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.fleet import read_fleet
from convoy.launch.exit_status import ERROR_STATUS
from convoy.launch.fleet import startable
from convoy.machine.process import watch_parent
from convoy.report.numbers import in_bytes
from convoy.report.screen import FILE_WIDTH, Screen, Wait

LISTED_LINKS = 12
_INDENT = "    "
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(found: Examination, findings: Sequence[Finding], took_s: float, console: Console) -> None:
    """Print tables, findings and the verdict."""
    console.print(_devices(found))
    versions = {name: sorted({getattr(each.info, name) for each in found.facts}) for name in ("convoy", "torch")}
    console.print(", ".join(f"{name} {' and '.join(those)}" for name, those in versions.items()), soft_wrap=True)
    if found.ways:
        console.print("\n".join(["", "Links, the slowest first:", *_links(found)]), soft_wrap=True)
    show_findings(findings, console)
    console.print()
    console.print(verdict(findings, took_s))


def show_findings(findings: Iterable[Finding], console: Console) -> None:
    """Print the severity, the problem and the remedy of each finding."""
    for finding in findings:
        what, cure = (text if text.endswith(".") else f"{text}." for text in (finding.what, finding.cure))
        console.print()
        # Not wrapped by rich: it pads lines with blanks, which appear in logs and mails.
        first, *rest = textwrap.wrap(f"{finding.severity.upper()}: {what}", console.width)
        word, _, start = first.partition(" ")
        console.print(Text.assemble((word, STYLES[finding.severity]), " ", start))
        for line in [*rest, *(_INDENT + each for each in textwrap.wrap(cure, console.width - len(_INDENT)))]:
            console.print(Text(line))


def verdict(findings: Sequence[Finding], took_s: float) -> Text:
    """Return the last line: ready to train or not, with the numbers of findings."""
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
    """Return a line for each pair of hosts without a connection, then lines for the slowest connections."""
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


FOUND_ERRORS = 1
LINGER_S = 15.0  # delay before a device that cannot reach device 0 ends: its exit makes the launcher end all devices


def run_doctor(fleet_file: Path | None, json_file: Path | None, wait_s: float, context_text: str | None = None) -> int:
    """Examine and print. Return 0 if training can begin, 1 if there are errors.

    In a job device 0 prints. Another device prints only if it cannot reach device 0. An examination that was started over ssh
    has a `context_text`; it returns 2 instead of 1, so that its launcher does not print the errors again.

    Raises:
        InputError: an option, file or environment variable that cannot be used.
    """
    start_s = time.monotonic()
    if not 0 < wait_s < math.inf:
        raise InputError(f"--wait {wait_s:g}: give a number of seconds above 0")
    watch_parent()
    env = read_process_env(os.environ)
    if context_text is not None:
        status = _run(env, from_text(CONTEXT, context_text, "--case"), json_file, wait_s, start_s)
        return ERROR_STATUS if status == FOUND_ERRORS else status
    path = fleet_file or (Path(named) if (named := os.environ.get("CONVOY_FLEET")) else None)
    fleet = None if path is None else read_fleet(path)
    if env is not None or fleet_file is None or fleet is None:
        return _run(env, Context(fleet), json_file, wait_s, start_s)
    if startable(fleet_file) is None:
        raise InputError(
            f"--fleet {fleet_file}: its hosts have no address. Give each one to be examined over ssh; or start convoy "
            "doctor once for each device, with torchrun or convoy emulate"
        )
    status, findings = examine_fleet(fleet, json_file, wait_s)
    if findings:
        console = Screen(visible=True).console
        show_findings(findings, console)
        console.print("\n", verdict(findings, time.monotonic() - start_s), sep="")
    return FOUND_ERRORS if status == ERROR_STATUS else status


def _run(env: ProcessEnv | None, context: Context, json_file: Path | None, wait_s: float, start_s: float) -> int:
    if env is None or env.devices == 1:
        found = examine_alone(context)
    else:
        own = collect_facts(env)
        with Wait(Screen(visible=env.device == 0).console, f"Examining {env.devices} devices"):
            outcome = examine_job(env, own, context, wait_s, imposed_slowdown())
        if outcome is None:
            return 0
        if isinstance(outcome, Finding):
            # Device 0 may be unreachable, so print the finding here.
            console = Console(stderr=True, width=FILE_WIDTH, highlight=False, markup=False, emoji=False)
            show_findings([*context.reports, outcome] if env.device == 0 else [outcome], console)
            time.sleep(LINGER_S if env.device != 0 else 0.0)
            return FOUND_ERRORS
        found = outcome
    findings = diagnose(found)
    took_s = time.monotonic() - start_s
    show(found, findings, took_s, Screen(visible=True).console)
    if json_file is not None:
        report = {"findings": findings, "took_s": took_s, "examination": found}
        write_whole(json_file, TypeAdapter(dict[str, Any]).dump_json(report, indent=2).decode() + "\n")
    return FOUND_ERRORS if any(finding.severity == "error" for finding in findings) else 0
