"""`convoy doctor`: its three ways in, and its exit status."""

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from convoy.comm.environment import Place, read_place
from convoy.comm.processes import watch_parent
from convoy.config.files import write_whole
from convoy.doctor.case import CASE, Case, case_of
from convoy.doctor.diagnose import diagnose
from convoy.doctor.facts import Examination, Finding, Pace, from_text
from convoy.doctor.job import examine_alone, examine_job
from convoy.doctor.own import check_up
from convoy.doctor.report import show, tell, verdict
from convoy.errors import InputError
from convoy.launch.exit_status import ERROR_STATUS
from convoy.report.screen import FILE_WIDTH, Screen

FOUND_ERRORS = 1
LINGER_S = 15.0
"""A launcher ends everybody once one device has failed: a stranded one stays until device 0 has told of all the others."""


def run_doctor(fleet_file: Path | None, json_file: Path | None, wait_s: float, case_text: str | None = None) -> int:
    """Examine, print, and say by the exit status whether training can begin.

    Args:
        case_text: what an examination that was started over ssh was given along; then `fleet_file` stays where it began.

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
    place = read_place(os.environ)
    if case_text is not None:
        status = _run(place, from_text(CASE, case_text, "--case"), json_file, wait_s, start_s)
        return ERROR_STATUS if status == FOUND_ERRORS else status
    case = case_of(fleet_file)
    if place is None and fleet_file is not None:
        # What examines a machine alone should need little.
        from convoy.doctor.remote import examine_fleet
        from convoy.launch.fleet import startable

        if startable(fleet_file) is None or case.fleet is None:
            raise InputError(
                f"--fleet {fleet_file}: its hosts have no address. Give each one to be examined over ssh; or start convoy "
                "doctor once for each device, with torchrun or convoy rehearse"
            )
        status, findings = examine_fleet(case.fleet, case, json_file, wait_s)
        if findings:
            console = Screen(visible=True).console
            tell(findings, console)
            console.print("\n", verdict(findings, time.monotonic() - start_s), sep="")
        return FOUND_ERRORS if status == ERROR_STATUS else status
    return _run(place, case, json_file, wait_s, start_s)


def _run(place: Place | None, case: Case, json_file: Path | None, wait_s: float, start_s: float) -> int:
    if place is None or place.devices == 1:
        return _conclude(examine_alone(case), json_file, start_s)
    own = check_up(place)
    slowdown = float(os.environ.get("CONVOY_SLOWDOWN", "1"))
    with Screen(visible=place.device == 0).working(f"Examining {place.devices} devices"):
        outcome = examine_job(place, own, case, wait_s, slowdown=slowdown)
    if isinstance(outcome, Finding):
        if place.device != 0:
            return _stranded(outcome)
        # Nobody can come to it, so all it can tell is about itself.
        outcome = Examination(1, (own,), {0: Pace(0.0)}, reports=(*case.reports, outcome))
    return 0 if outcome is None else _conclude(outcome, json_file, start_s)


def _conclude(examination: Examination, json_file: Path | None, start_s: float) -> int:
    findings = diagnose(examination)
    took_s = time.monotonic() - start_s
    show(examination, findings, took_s, Screen(visible=True).console)
    if json_file is not None:
        write_whole(json_file, as_json(examination, findings, took_s))
    return FOUND_ERRORS if any(finding.severity == "error" for finding in findings) else 0


def _stranded(finding: Finding) -> int:
    """A device that could not meet the others tells it itself, where its output goes."""
    tell([finding], Console(stderr=True, width=FILE_WIDTH, highlight=False, markup=False, emoji=False))
    time.sleep(LINGER_S)
    return FOUND_ERRORS


def as_json(examination: Examination, findings: Sequence[Finding], took_s: float) -> str:
    """All facts and findings, for programs. Units are in the names."""
    facts = TypeAdapter(Examination).dump_python(examination, mode="json")
    told = TypeAdapter(list[Finding]).dump_python(list(findings), mode="json")
    return json.dumps({"findings": told, "took_s": took_s, "examination": facts}, indent=2) + "\n"
