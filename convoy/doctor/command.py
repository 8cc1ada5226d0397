"""`convoy doctor`: its three ways in, and its exit status."""

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from convoy.comm.environment import ProcessEnv, imposed_slowdown, read_process_env
from convoy.comm.processes import watch_parent
from convoy.doctor.examine import examine_alone, examine_fleet, examine_job, read_context
from convoy.doctor.findings import diagnose
from convoy.doctor.probes import check_up
from convoy.doctor.report import show, tell, verdict
from convoy.doctor.schema import CONTEXT, Context, Examination, Finding, Pace, from_text
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.launch.exit_status import ERROR_STATUS
from convoy.report.screen import FILE_WIDTH, Screen

FOUND_ERRORS = 1
LINGER_S = 15.0
"""A launcher ends all devices once one has failed: one that cannot meet device 0 stays until that has reported the others."""


def run_doctor(fleet_file: Path | None, json_file: Path | None, wait_s: float, context_text: str | None = None) -> int:
    """Examine, print, and say by the exit status whether training can begin.

    Args:
        context_text: the context of an examination that was started over ssh; then `fleet_file` stays where it began.

    Returns:
        0 without errors, 1 with. In a job device 0 prints and knows; of the others only one that cannot meet it tells.
        Started over ssh, errors are 2: what its launcher takes for "told already".

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
    context = read_context(fleet_file)
    if env is not None or fleet_file is None:
        return _run(env, context, json_file, wait_s, start_s)
    # What examines a machine alone should need little.
    from convoy.launch.fleet import startable

    if startable(fleet_file) is None or context.fleet is None:
        raise InputError(
            f"--fleet {fleet_file}: its hosts have no address. Give each one to be examined over ssh; or start convoy "
            "doctor once for each device, with torchrun or convoy rehearse"
        )
    status, findings = examine_fleet(context.fleet, context, json_file, wait_s)
    if findings:
        console = Screen(visible=True).console
        tell(findings, console)
        console.print("\n", verdict(findings, time.monotonic() - start_s), sep="")
    return FOUND_ERRORS if status == ERROR_STATUS else status


def _run(env: ProcessEnv | None, context: Context, json_file: Path | None, wait_s: float, start_s: float) -> int:
    if env is None or env.devices == 1:
        examination = examine_alone(context)
    else:
        own = check_up(env)
        slowdown = imposed_slowdown()
        with Screen(visible=env.device == 0).working(f"Examining {env.devices} devices"):
            outcome = examine_job(env, own, context, wait_s, slowdown=slowdown)
        if outcome is None:
            return 0
        if isinstance(outcome, Finding) and env.device != 0:
            # Device 0 does not hear of it, so it goes where this device's output goes.
            tell([outcome], Console(stderr=True, width=FILE_WIDTH, highlight=False, markup=False, emoji=False))
            time.sleep(LINGER_S)
            return FOUND_ERRORS
        if isinstance(outcome, Finding):
            # Nobody can come to it, so all it can tell is about itself.
            outcome = Examination(1, (own,), {0: Pace(0.0)}, reports=(*context.reports, outcome))
        examination = outcome
    findings = diagnose(examination)
    took_s = time.monotonic() - start_s
    show(examination, findings, took_s, Screen(visible=True).console)
    if json_file is not None:
        write_whole(json_file, as_json(examination, findings, took_s))
    return FOUND_ERRORS if any(finding.severity == "error" for finding in findings) else 0


def as_json(examination: Examination, findings: Sequence[Finding], took_s: float) -> str:
    """All facts and findings as JSON. Units are in the names."""
    facts = TypeAdapter(Examination).dump_python(examination, mode="json")
    told = TypeAdapter(list[Finding]).dump_python(list(findings), mode="json")
    return json.dumps({"findings": told, "took_s": took_s, "examination": facts}, indent=2) + "\n"
