"""Runs a set, fleet by fleet, each under a rehearsal of its own; the workers write the results."""

import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.configurations import FLEETS, fleets_of, series_of
from benchmarks.hardware import Ground, ground
from benchmarks.results import FleetResult, read_result
from benchmarks.worker import JOB, WorkerJob
from convoy.data import load
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.fleet import read_fleet
from convoy.rehearse import rehearse

SHOWN_DATA = "D"


@dataclass(frozen=True, slots=True)
class Drive:
    """One call of a benchmark's driver. Seconds and rounds: see `benchmarks.worker.WorkerJob`.

    Attributes:
        module: of the driver, as it stands after `python -m`.
        limit_s: seconds for one fleet, after which it is ended; what it finished stays.
    """

    module: str
    set: str
    fleets: tuple[str, ...]
    output: Path
    data_dir: Path | None
    rounds: int
    round_s: float
    budget_s: float
    links_budget_s: float
    alone_s: float
    tuning_s: float
    limit_s: float
    measurements: Path | None = None
    again: bool = False

    def check(self) -> None:
        """Refuse what can be refused before anything starts.

        Raises:
            InputError, DataError: with the value, the rule and the remedy.
        """
        for fleet in self.fleets:
            series_of(self.set, fleet)
        if self.rounds < 1:
            raise InputError(f"--rounds {self.rounds}: give 1 or more")
        for name in ("round_s", "budget_s", "links_budget_s", "alone_s", "tuning_s", "limit_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} = {getattr(self, name):g}: give a number of seconds above 0")
        if self.data_dir is not None:
            load("cifar10", self.data_dir)

    def command(self) -> str:
        """For people: the folder of the images is theirs."""
        words = ["python", "-m", self.module, "--set", self.set]
        words += [word for fleet in self.fleets for word in ("--fleet", fleet)]
        words += ["--data-dir", SHOWN_DATA] if self.data_dir is not None else []
        numbers = {
            "rounds": self.rounds,
            "round": self.round_s,
            "budget": self.budget_s,
            "links-budget": self.links_budget_s,
            "alone": self.alone_s,
            "tuning": self.tuning_s,
        }
        return " ".join([*words, *(f"--{name} {value:g}" for name, value in numbers.items())])


def run(drive: Drive) -> int:
    """Run every fleet of the set that is asked for; the status of the first that failed, after all had their turn.

    Raises:
        InputError: see `Drive.check` and `convoy.rehearse.rehearse`.
    """
    drive.check()
    drive.output.mkdir(parents=True, exist_ok=True)
    if drive.measurements is not None:
        drive.measurements.mkdir(parents=True, exist_ok=True)
    here = ground()
    jobs = [_job(drive, name, here) for name in drive.fleets or fleets_of(drive.set)]
    for job in jobs:
        if drive.again:
            job.output.unlink(missing_ok=True)
        _refuse_to_lose(job)
    first_failure = 0
    for job in jobs:
        print(f"fleet {job.fleet}", flush=True)
        status = _rehearsed(job, drive.limit_s)
        first_failure = first_failure or status
        if status:
            print(
                f"fleet {job.fleet} ended with status {status}; what was finished is in {job.output}", file=sys.stderr
            )
        if status in (128 + signal.SIGINT, 128 + signal.SIGTERM):  # somebody asked for the end
            break
    return first_failure


def _job(drive: Drive, fleet: str, here: Ground) -> WorkerJob:
    return WorkerJob(
        set=drive.set, fleet=fleet, output=(drive.output / f"{fleet}.json").resolve(),
        measurements=None if drive.measurements is None else drive.measurements.resolve(),
        data_dir=None if drive.data_dir is None else drive.data_dir.resolve(),
        rounds=drive.rounds, round_s=drive.round_s, alone_s=drive.alone_s, budget_s=drive.budget_s,
        links_budget_s=drive.links_budget_s, tuning_s=drive.tuning_s, ground=here, command=drive.command(),
    )  # fmt: skip


def _refuse_to_lose(job: WorkerJob) -> None:
    """Hours of measuring are not written over because a line of code has changed since."""
    devices = [(device.name, device.cores) for device in read_fleet(FLEETS / f"{job.fleet}.toml").devices]
    if job.output.exists() and not job.empty_result(devices).continues(old := read_result(job.output)):
        raise InputError(
            f"{job.output} holds results of revision {old.ground.revision} with other code, settings, images or another "
            "machine than this run's: name another --output, or throw them away by --again"
        )


def _rehearsed(job: WorkerJob, limit_s: float) -> int:
    path = FLEETS / f"{job.fleet}.toml"
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "job.json"
        write_whole(order, JOB.dump_json(job).decode())
        command = [sys.executable, "-m", "benchmarks.worker", str(order)]
        return rehearse(read_fleet(path), command, timeout_s=limit_s, fleet_path=path)


def results_in(folder: Path, names: Sequence[str]) -> list[FleetResult]:
    """The results that lie in a folder, in the order of these fleets.

    Raises:
        InputError: none is there, or one cannot be read.
    """
    found = [read_result(folder / f"{name}.json") for name in names if (folder / f"{name}.json").exists()]
    if not any(result.measured_rows() for result in found):
        raise InputError(f"{folder} holds no finished results of {', '.join(names)}: run the benchmark first")
    return found
