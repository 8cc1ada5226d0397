"""The command: its three ways in, and its exit status."""

import math
import os
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console

from convoy.comm.environment import ProcessEnv, imposed_slowdown, read_process_env
from convoy.doctor.examine import examine_alone, examine_fleet, examine_job
from convoy.doctor.facts import CONTEXT, Context, Finding, collect_facts, from_text
from convoy.doctor.findings import diagnose
from convoy.doctor.report import show, show_findings, verdict
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.fleet import read_fleet
from convoy.launch.exit_status import ERROR_STATUS
from convoy.launch.fleet import startable
from convoy.machine.process import watch_parent
from convoy.report.screen import FILE_WIDTH, Screen, Wait

FOUND_ERRORS = 1
LINGER_S = 15.0  # for a device that cannot meet device 0: a launcher ends all devices once one has failed


def run_doctor(fleet_file: Path | None, json_file: Path | None, wait_s: float, context_text: str | None = None) -> int:
    """Examine, print, and return whether training can begin: 0, or 1 if there are errors.

    In a job device 0 prints; of the others only one that cannot meet it does. An examination that was started over ssh has
    a `context_text`; it returns 2 for errors, which its launcher takes for "printed already".

    Raises:
        InputError: an option or file that cannot be used, half of a job's environment.
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
            # Device 0 may not get it, so it goes to this device's own output.
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
