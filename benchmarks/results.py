"""Benchmark results: a value per case, and its JSON file.

A case's predictions are in its file before its first run; its runs are added when all of them are done.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from benchmarks.configurations import Case
from benchmarks.hardware import Ground
from benchmarks.tuning import Considered
from convoy.errors import InputError
from convoy.files import write_whole

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Where:
    """Seconds of a step by cause, for each device.

    Attributes:
        compute_s: its layers, and what traffic takes of its processor meanwhile.
        exchange_s: its own lane waits for messages and sums; what is hidden behind computing is not in it.
    """

    compute_s: tuple[float, ...]
    exchange_s: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One configuration, predicted and measured.

    Attributes:
        batch: global batch, in samples.
        plan: its name; `one-device` has a row for each device.
        device: index of the device that trains alone; None: all train together.
        predicted_s: seconds of a step, written before anything ran; None for what Convoy does not predict.
        strategies: what each layer does, such as `filter(4,3,1)`; for DDP its shares and options.
        rounds_s: seconds of a step in each round.
        steps: how many steps one round takes.
        drifts: before each round, how many times slower the machine was than while the tables were measured; empty
            where that was not asked (see `benchmarks.reference`).
        loss: of the first step of every round, on device 0 (`one-device`: on that device); None for DDP, which
            knows only its own part.
        foreseen, seen: where the time goes, predicted, and by the devices' clocks (medians of the rounds).
        card_s: predicted seconds that the busiest NIC sends or receives in a step.
        bound: what the step waits for most, by the simulator, as `convoy plan` tells it.
        tried: of `auto`: of each plan in the trial, the planner's choice first, seconds of a step, predicted and in the trial.
        least_s: of `auto`: what no exact plan can be predicted to take less than.
        considered: of DDP: the settings that its search came to.
    """

    fleet: str
    net: str
    batch: int
    plan: str
    device: int | None
    predicted_s: float | None
    strategies: Mapping[str, str]
    steps: int
    rounds_s: tuple[float, ...] = ()
    loss: float | None = None
    drifts: tuple[float, ...] = ()
    foreseen: Where | None = None
    seen: Where | None = None
    card_s: float | None = None
    bound: str = ""
    tried: tuple[tuple[float, float], ...] = ()
    least_s: float | None = None
    considered: tuple[Considered, ...] = ()

    @property
    def at_measured_speed_s(self) -> float:
        """Return the median of the rounds, each scaled to the machine's speed during measuring."""
        drifts = self.drifts or (1.0,) * len(self.rounds_s)
        return statistics.median(s / d for s, d in zip(self.rounds_s, drifts, strict=True))

    @property
    def median_s(self) -> float:
        """Return the median of the rounds, which must be measured."""
        return statistics.median(self.rounds_s)


@dataclass(frozen=True)
class NetResult:
    """All configurations of one net on one fleet, at one or more batches.

    Attributes:
        measured, predicted, finished: dates (ISO 8601); finished is "" until the runs are done.
        plan_s: seconds that predicting all plans took on device 0, the planner included, by batch.
        solo_s: predicted seconds of a step of each device alone, by batch.
        others: part of the machine's processors that other programs took during the runs; None until they are done.
    """

    net: str
    measured: str
    predicted: str
    finished: str
    plan_s: Mapping[int, float]
    solo_s: Mapping[int, tuple[float, ...]]
    rows: tuple[Row, ...]
    others: float | None = None


@dataclass(frozen=True)
class FleetResult:
    """The content of one file: a case, its fleet and the machine it was measured on.

    Attributes:
        set: that was run; "" where the case was asked for by itself.
        command: that makes this file, for people.
        data: which images.
        devices: name and cores of each.
        settings: rounds, budgets and such, by name.
    """

    set: str
    fleet: str
    devices: tuple[tuple[str, float | None], ...]
    ground: Ground
    command: str
    data: str
    settings: Mapping[str, float]
    nets: Mapping[str, NetResult] = field(default_factory=dict)
    format: Literal[1] = 1

    def with_net(self, result: NetResult) -> "FleetResult":
        """Return a copy with one net's result added or replaced."""
        return replace(self, nets={**self.nets, result.net: result})

    def continues(self, other: "FleetResult") -> bool:
        """Return whether results of `other` can be combined with this run: same machine, code, images and settings."""
        own, others = (replace(each, nets={}, command="", set="") for each in (self, other))
        return own == others

    def measured_rows(self) -> tuple[Row, ...]:
        """Return every measured row."""
        return tuple(row for net in self.nets.values() if net.finished for row in net.rows)

    def lacks(self, case: Case) -> bool:
        """Return whether a plan of this case was not measured."""
        held = {row.plan for row in self.measured_rows() if (row.net, row.batch) == (case.net, case.batch)}
        return not held.issuperset(case.plans)


def still_to_run(path: Path, empty: FleetResult, case: Case) -> Case | None:
    """Return the part of a case that its file lacks; None if it is complete.

    A case is measured as a whole, because its plans take turns: where one is missing, those that are there run again.

    Args:
        empty: a result of this run.

    Raises:
        InputError: the file cannot be read.
    """
    old = read_result(path) if path.exists() else None
    if old is None or not empty.continues(old):
        return case
    held = [row.plan for row in old.measured_rows()]
    return replace(case, plans=tuple(dict.fromkeys((*case.plans, *held)))) if old.lacks(case) else None


def newest(results: Iterable[FleetResult]) -> list[FleetResult]:
    """Drop cases that a later result measured again, and results left empty by that."""
    found = list(results)
    last: dict[tuple[str, str, int], str] = {}
    for _, net in _finished(found):
        for row in net.rows:
            key = (row.fleet, row.net, row.batch)
            last[key] = max(last.get(key, ""), net.finished)
    kept = []
    for result in found:
        for _, net in _finished([result]):
            rows = tuple(row for row in net.rows if last[row.fleet, row.net, row.batch] == net.finished)
            result = result.with_net(replace(net, rows=rows))
        if result.measured_rows():
            kept.append(result)
    return kept


def _finished(results: Sequence[FleetResult]) -> list[tuple[FleetResult, NetResult]]:
    return [(result, net) for result in results for net in result.nets.values() if net.finished]


_FILE = TypeAdapter(FleetResult)


def write_result(path: Path, result: FleetResult) -> None:
    """Replace the file with this result.

    Raises:
        InputError: it cannot be written.
    """
    write_whole(path, _FILE.dump_json(result, indent=1).decode() + "\n")


def read_result(path: Path) -> FleetResult:
    """Read the result in a file.

    Raises:
        InputError: it cannot be read, or is no result of this version.
    """
    return read_kept(path, _FILE, "the benchmark")


def read_kept(path: Path, adapter: TypeAdapter[Kept], made_by: str) -> Kept:
    """Read a benchmark's JSON file.

    Args:
        made_by: what is run to make the file again.

    Raises:
        InputError: it cannot be read, or is not what this version writes.
    """
    try:
        return adapter.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} cannot be read ({reason}): run {made_by} again") from error


def read_if_kept(path: Path, adapter: TypeAdapter[Kept], module: str) -> Kept | None:
    """Do as `read_kept`, or return None if the file does not exist.

    Args:
        module: the benchmark, as Python runs it with -m.
    """
    return read_kept(path, adapter, f"python -m {module}") if path.exists() else None
