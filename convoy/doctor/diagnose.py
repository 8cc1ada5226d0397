"""From facts to findings, without touching anything."""

from collections.abc import Iterable
from dataclasses import replace

from convoy.doctor.diagnose_hosts import host_findings
from convoy.doctor.diagnose_job import job_findings
from convoy.doctor.diagnose_links import link_findings
from convoy.doctor.diagnose_paces import pace_findings
from convoy.doctor.facts import Examination, Finding
from convoy.doctor.names import ABOUT, listed, names_of

_ORDER = ("error", "warning", "note")


def diagnose(examination: Examination) -> tuple[Finding, ...]:
    """What is worth telling: errors first, then warnings, then notes."""
    names = names_of(examination)
    findings = [
        *examination.reports,
        *job_findings(examination, names),
        *link_findings(examination, names),
        *host_findings(examination, names),
        *pace_findings(examination, names),
    ]
    return tuple(sorted(merged(findings), key=lambda finding: _ORDER.index(finding.severity)))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say the same of several hosts or devices become one, which lists them in place of `ABOUT`."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        shared = ABOUT in finding.what
        groups.setdefault(replace(finding, about=()) if shared else finding, []).extend(finding.about)
    return [
        replace(finding, what=finding.what.replace(ABOUT, listed(about)), about=tuple(about))
        for finding, about in groups.items()
    ]
