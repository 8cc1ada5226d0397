"""Run the requested cases fleet by fleet, each in its own emulation. The workers write the results."""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.configurations import Choice, Series, fleet_named
from benchmarks.hardware import Ground, ground
from benchmarks.results import FleetResult, newest, read_result
from benchmarks.worker import JOB, WorkerJob
from convoy.comm.job_key import TRUST
from convoy.data import load
from convoy.emulate.run import emulate
from convoy.errors import InputError
from convoy.files import write_whole

SHOWN_DATA = "D"


@dataclass(frozen=True, slots=True)
class Drive:
    """One call of a benchmark's driver. For seconds and rounds see `benchmarks.worker.WorkerJob`.

    Attributes:
        module: of the driver, as it stands after `python -m`.
        limit_s: seconds for one fleet, after which it is ended; what it finished stays.
        again: measure anew what was measured before.
        encrypted: what Convoy sends; else it goes in the open, as DDP's.
    """

    module: str
    choice: Choice
    output: Path
    data_dir: Path | None
    rounds: int
    round_s: float
    budget_s: float
    links_budget_s: float
    alone_s: float
    tuning_s: float
    case_s: float
    limit_s: float
    measurements: Path | None = None
    again: bool = False
    encrypted: bool = False

    def check(self) -> None:
        """Raise errors that can be found before anything starts.

        Raises:
            InputError, DataError: with the value, the rule and the remedy.
        """
        self.choice.series()
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}: give 1 or more")
        for name in ("round_s", "budget_s", "links_budget_s", "alone_s", "tuning_s", "case_s", "limit_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} = {getattr(self, name):g}: give a number of seconds above 0")
        if self.data_dir is not None:
            load("cifar10", self.data_dir)

    def command(self) -> str:
        """Return the command to print, without the user's image folder."""
        choice = self.choice
        words = ["python", "-m", self.module, *(["--set", choice.set] if choice.set is not None else [])]
        for option, values in (
            ("fleet", choice.fleets),
            ("net", choice.nets),
            ("batch", choice.batches),
            ("plan", choice.plans),
        ):
            words += [word for value in values for word in (f"--{option}", str(value))]
        words += ["--data-dir", SHOWN_DATA] if self.data_dir is not None else []
        numbers = {
            "rounds": self.rounds,
            "round": self.round_s,
            "budget": self.budget_s,
            "links-budget": self.links_budget_s,
            "alone": self.alone_s,
            "tuning": self.tuning_s,
            "case-limit": self.case_s,
        }
        words += ["--encrypted"] if self.encrypted else []
        return " ".join([*words, *(f"--{name} {value:g}" for name, value in numbers.items())])


def run(drive: Drive) -> int:
    """Run every requested fleet; return the first nonzero status after all have run.

    Raises:
        InputError: see `Drive.check` and `convoy.emulate.run.emulate`.
    """
    drive.check()
    drive.output.mkdir(parents=True, exist_ok=True)
    if drive.measurements is not None:
        drive.measurements.mkdir(parents=True, exist_ok=True)
    here = ground()
    series = drive.choice.series()
    jobs = [_job(drive, fleet, series, here) for fleet in dict.fromkeys(each.fleet for each in series)]
    for job in jobs:
        _refuse_to_lose(job)
    jobs = _announced(jobs)
    if not drive.encrypted:
        os.environ[TRUST] = "1"  # here: emulating would give a key to every device
    first_failure = 0
    for job in jobs:
        print(f"fleet {job.fleet}", flush=True)
        status = _emulated(job, drive.limit_s)
        first_failure = first_failure or status
        if status:
            print(
                f"fleet {job.fleet} ended with status {status}; what was finished is in {job.output}", file=sys.stderr
            )
        if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # somebody asked for the end
            break
    return first_failure


def _job(drive: Drive, fleet: str, series: Sequence[Series], here: Ground) -> WorkerJob:
    return WorkerJob(
        set=drive.choice.set or "", fleet=fleet, series=tuple(each for each in series if each.fleet == fleet),
        output=drive.output.resolve(),
        measurements=None if drive.measurements is None else drive.measurements.resolve(),
        data_dir=None if drive.data_dir is None else drive.data_dir.resolve(),
        rounds=drive.rounds, round_s=drive.round_s, alone_s=drive.alone_s, budget_s=drive.budget_s,
        links_budget_s=drive.links_budget_s, tuning_s=drive.tuning_s, case_s=drive.case_s, ground=here,
        command=drive.command(), again=drive.again, encrypted=drive.encrypted,
    )  # fmt: skip


def _empty(job: WorkerJob, net: str) -> FleetResult:
    return job.empty_result([(device.name, device.cores) for device in fleet_named(job.fleet).devices], net)


def _refuse_to_lose(job: WorkerJob) -> None:
    """Refuse to overwrite hours of measurements because the code has changed since."""
    for case in (case for series in job.series for case in series.cases()):
        path = job.path(case)
        if not job.again and path.exists() and not _empty(job, case.net).continues(old := read_result(path)):
            raise InputError(
                f"{path} holds results of revision {old.ground.revision} with other code, settings, images or another "
                "machine than this run's: name another --output, or throw them away by --again"
            )


def _announced(jobs: Sequence[WorkerJob]) -> list[WorkerJob]:
    """Print the cases still to run and return the jobs that have any."""
    found = []
    for job in jobs:
        cases = [case for series in job.series for case in series.cases()]
        left = [case for case in cases if job.still_to_run(case, _empty(job, case.net))]
        if left:
            found.append(job)
            names = ", ".join(f"{case.net} batch {case.batch}" for case in left)
            print(f"fleet {job.fleet}: {len(left)} of {len(cases)} cases ({names})", flush=True)
    return found


def _emulated(job: WorkerJob, limit_s: float) -> int:
    fleet = fleet_named(job.fleet)
    with tempfile.TemporaryDirectory() as folder:
        order, described = Path(folder) / "job.json", Path(folder) / "fleet.toml"
        write_whole(order, JOB.dump_json(job).decode())
        write_whole(described, fleet.to_toml())
        command = [sys.executable, "-m", "benchmarks.worker", str(order)]
        return emulate(fleet, command, timeout_s=limit_s, fleet_path=described)


def results_in(folder: Path) -> list[FleetResult]:
    """Read all results in a folder; for a case measured twice, keep the later one.

    Raises:
        InputError: none is there, or one cannot be read.
    """
    found = newest(read_result(path) for path in sorted(folder.glob("*.json")))
    if not found:
        raise InputError(f"{folder} holds no finished results: run the benchmark first")
    return found
