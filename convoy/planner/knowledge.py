"""Holds the planner's knowledge of a fleet's devices (`FleetKnowledge`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from convoy.errors import InputError, MismatchError
from convoy.fleet import Fleet, Nic
from convoy.model.graph import Graph
from convoy.plan.presets import Speeds
from convoy.simulate.compute import CachedTimes
from convoy.simulate.costs import Costs, described_costs
from convoy.simulate.table import GIGABIT, Measurement, read_fleet_file


@dataclass(frozen=True, slots=True)
class FleetKnowledge:
    """The knowledge of a fleet: a description, a measurement, or solo speeds only.

    In a running job it is the same on every device.

    Attributes:
        described: the described fleet; None if the fleet is measured, or if only speeds are known.
        measured: the measured layer times, links and overheads, with the measured fleet.
        given: costs that override `described` and `measured`.
        ids: device ids of a running job, in the order of `measured` and `speeds`.
        speeds: solo speed of each device; None before a measurement.
        slower: device id -> factor by which the device now is slower than in `measured`.
    """

    described: Fleet | None = None
    measured: Measurement | None = None
    given: Costs | None = None
    ids: tuple[int, ...] = ()
    speeds: Speeds | None = None
    slower: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a fleet file, which may contain a measurement.

        Raises:
            InputError: the file cannot be used.
        """
        return cls(*read_fleet_file(path))

    @classmethod
    def of_job(cls, path: Path, graph: Graph, devices: int, precision: str) -> Self:
        """Read a fleet file, which may contain a measurement, and check that it matches a job.

        Raises:
            InputError: the file cannot be used, or has another number of devices.
            MismatchError: it was measured with another model or precision.
        """
        known = cls.from_file(path)
        count = 0 if known.described is None else len(known.described.devices)
        if count != devices:
            raise InputError(
                f"--fleet {path} has {count} devices, this job has {devices}: start {count} devices, or give the fleet file "
                "of this job"
            )
        if known.measured is not None:
            known.measured.costs(graph)
            if known.measured.precision != precision:
                raise MismatchError(
                    f"--fleet {path} was measured in {known.measured.precision}, this job computes in {precision}, with other "
                    f"times: measure with --precision {precision}, or leave --fleet out"
                )
        return known

    @property
    def fleet(self) -> Fleet | None:
        return self.described if self.measured is None else self.measured.fleet

    def costs(self, graph: Graph, optimizer: str = "sgd-momentum") -> Costs:
        """Return the best costs known for a model: measured or described.

        Raises:
            InputError: nothing is known about a device.
            MismatchError: the devices were measured with another model.
        """
        if self.given is not None:
            return self.given
        if self.fleet is None:
            raise InputError(
                "only the speeds of these devices are known: measure them (convoy measure), or describe the fleet"
            )
        if self.measured is None:
            return described_costs(self.fleet, optimizer=optimizer)
        costs = self.measured.costs(graph)
        if not self.slower:
            return costs
        return replace(costs, times=CachedTimes(costs.times, [self.slower.get(d, 1.0) for d in self.ids]))

    def of(self, ids: Sequence[int]) -> Self | None:
        """Return the knowledge of these devices, in this order; None if one of them is unknown."""
        if any(device not in self.ids for device in ids):
            return None
        rows = [self.ids.index(device) for device in ids]
        measured = None if self.measured is None else self.measured.of_devices(rows)
        speeds = None if self.speeds is None else _rows(self.speeds, rows)
        return replace(self, given=None, ids=tuple(ids), measured=measured, speeds=speeds)

    def corrected(self, slower: Mapping[int, float]) -> Self:
        """Return the knowledge with newer slowdowns, as observed by rebalancing."""
        return replace(self, slower={**self.slower, **slower})

    def with_device(self, device: int, joining: Self, nic: Nic = GIGABIT) -> Self:
        """Return the knowledge including a joining device. Drop its times from an earlier membership.

        Args:
            device: id of the joining device.
            joining: knowledge of this device only. Without a measurement in it, the result has none either.
            nic: see `Measurement.with_device`.

        Raises:
            MismatchError: the device was measured with another model.
        """
        assert self.speeds is not None
        assert joining.speeds is not None
        kept = [i for i, each in enumerate(self.ids) if each != device]
        own, theirs = _rows(self.speeds, kept), joining.speeds
        layers = {name: (*own.layers[name], *theirs.layers[name]) for name in sorted({*own.layers} & {*theirs.layers})}
        both = None
        if self.measured is not None and joining.measured is not None:
            both = self.measured.of_devices(kept).with_device(joining.measured, nic) if kept else joining.measured
        return replace(
            self,
            ids=(*(self.ids[i] for i in kept), device),
            measured=both,
            speeds=Speeds((*own.devices, *theirs.devices), layers, own.measured),
            slower={d: factor for d, factor in self.slower.items() if d != device},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the knowledge, except `given`, as JSON values for `from_json`."""
        speeds = self.speeds
        return {
            "described": None if self.described is None else self.described.to_toml(),
            "ids": self.ids,
            "speeds": None if speeds is None else [speeds.devices, speeds.layers, speeds.measured],
            "measured": None if self.measured is None else self.measured.to_toml(),
            "slower": self.slower,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Read `to_json` of another device with the same version, received over an authenticated connection.

        Raises:
            InputError: the measurement cannot be used.
        """
        text, fleet, speeds = row["measured"], row.get("described"), None
        if row["speeds"] is not None:
            devices, layers, measured = row["speeds"]
            speeds = Speeds(tuple(devices), {name: tuple(each) for name, each in layers.items()}, measured)
        return cls(
            described=None if fleet is None else Fleet.from_toml(fleet, "another device's fleet"),
            measured=None if text is None else Measurement.from_toml(text, "what another device measured"),
            ids=tuple(row["ids"]),
            speeds=speeds,
            slower={int(d): factor for d, factor in row["slower"].items()},
        )


def _rows(speeds: Speeds, rows: Sequence[int]) -> Speeds:
    def some(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[i] for i in rows)

    layers = {name: some(each) for name, each in speeds.layers.items()}
    return Speeds(some(speeds.devices), layers, speeds.measured)
