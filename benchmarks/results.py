"""The results of a benchmark on one fleet: a value, and the JSON file that it is kept in.

A net's predictions are in the file before its first run; its runs are added when all of them are done.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from benchmarks.configurations import Configuration, Series
from benchmarks.hardware import Ground
from convoy.errors import InputError
from convoy.files import write_whole


@dataclass(frozen=True)
class Row:
    """One configuration: predicted, and measured.

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

    @property
    def at_measured_speed_s(self) -> float:
        """Median of the rounds, each at the speed that the machine had while the tables were measured."""
        drifts = self.drifts or (1.0,) * len(self.rounds_s)
        return statistics.median(s / d for s, d in zip(self.rounds_s, drifts, strict=True))

    @property
    def median_s(self) -> float:
        """Median of the rounds. It has to be measured first."""
        return statistics.median(self.rounds_s)


@dataclass(frozen=True)
class NetResult:
    """All configurations of one net on one fleet.

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
    """Everything that one fleet's file holds.

    Attributes:
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
        """The same with one net's result added or replaced."""
        return replace(self, nets={**self.nets, result.net: result})

    def continues(self, other: "FleetResult") -> bool:
        """Whether results of `other` may stand beside those of this run: same machine, code, images and settings."""
        return replace(self, nets={}, command="") == replace(other, nets={}, command="")

    def finished(self) -> tuple[str, ...]:
        """The nets whose runs are done."""
        return tuple(name for name, net in self.nets.items() if net.finished)

    def holds(self, series: Series) -> bool:
        """Whether the runs of exactly this series are done."""
        if series.net not in self.finished():
            return False
        configurations = [Configuration(r.fleet, r.net, r.batch, r.plan) for r in self.nets[series.net].rows]
        return set(configurations) == set(series.configurations())

    def measured_rows(self) -> tuple[Row, ...]:
        """Every row that was measured."""
        return tuple(row for net in self.nets.values() if net.finished for row in net.rows)


_FILE = TypeAdapter(FleetResult)


def write_result(path: Path, result: FleetResult) -> None:
    """Replace the file by this result.

    Raises:
        InputError: it cannot be written.
    """
    write_whole(path, _FILE.dump_json(result, indent=1).decode() + "\n")


def read_result(path: Path) -> FleetResult:
    """The result in a file.

    Raises:
        InputError: it cannot be read, or is no result of this version.
    """
    try:
        return _FILE.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path} cannot be read as a benchmark's result ({reason}): run the benchmark again"
        ) from error
