"""What every device of a run knows of all of them, to plan with when they change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from convoy.fleet import Card, Fleet
from convoy.layout.redistribute import Reduce
from convoy.model.graph import Graph
from convoy.plan.presets import Speeds
from convoy.simulate.costs import Costs
from convoy.simulate.regrouped import GIGABIT, CorrectedTimes, of_devices, with_device
from convoy.simulate.table import Measurement


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the devices of a run: what their plans are made of. The same on every device.

    Attributes:
        name: of the plan that the run was begun with: "auto", or one of `PLANS`. None: a plan of its own, from a file.
        ids: of the devices, in the order of what follows.
        speeds: of each alone.
        measured: of each; None where nothing was measured but speeds.
        optimizer: by what it keeps; see `convoy.simulate.memory.OPTIMIZERS`.
        reduce: how any plan makes sums; None: as each plan is known for.
        passes: so many make a step.
        slower: how many times as long as it was measured to, a device turned out to compute, by its id.
    """

    name: str | None
    ids: tuple[int, ...]
    speeds: Speeds
    measured: Measurement | None = None
    optimizer: str = "sgd-momentum"
    reduce: Reduce | None = None
    passes: int = 1
    slower: Mapping[int, float] = field(default_factory=dict)

    def corrected(self, slower: Mapping[int, float]) -> Self:
        """With what rebalancing has found out since."""
        return replace(self, slower={**self.slower, **slower})

    def with_device(
        self, device: int, speeds: Speeds, measured: Measurement | None = None, card: Card = GIGABIT
    ) -> Self:
        """With a device that has come; of one that had been lost, what it measured then is forgotten.

        Args:
            device: its id.
            speeds: of this one device.
            measured: of this one device. None: nothing is measured of the fleet any more, where that was.
            card: see `convoy.simulate.regrouped.with_device`.

        Raises:
            MismatchError: it was measured with another model.
        """
        kept = [i for i, each in enumerate(self.ids) if each != device]
        common = set(self.speeds.layers) & set(speeds.layers)
        layers = {name: (*_of(self.speeds.layers[name], kept), *speeds.layers[name]) for name in sorted(common)}
        both = None
        if self.measured is not None and measured is not None:
            both = with_device(of_devices(self.measured, kept), measured, card) if kept else measured
        return replace(
            self, ids=(*_of(self.ids, kept), device), measured=both,
            speeds=Speeds((*_of(self.speeds.devices, kept), *speeds.devices), layers, self.speeds.measured),
            slower={d: times for d, times in self.slower.items() if d != device},
        )  # fmt: skip

    def speeds_of(self, devices: Sequence[int]) -> Speeds | None:
        """Of some devices, by their ids; None where one is not known."""
        if any(d not in self.ids for d in devices):
            return None
        rows = [self.ids.index(d) for d in devices]
        layers = {name: _of(each, rows) for name, each in self.speeds.layers.items()}
        return Speeds(_of(self.speeds.devices, rows), layers, self.speeds.measured)

    def costs_of(self, devices: Sequence[int], graph: Graph) -> tuple[Costs, Fleet] | None:
        """Of some devices, by their ids, as corrected, and these as a fleet; None where one is not known."""
        if self.measured is None or any(d not in self.ids for d in devices):
            return None
        measured = of_devices(self.measured, [self.ids.index(d) for d in devices])
        costs = measured.costs(graph)
        return replace(
            costs, times=CorrectedTimes(costs.times, [self.slower.get(d, 1.0) for d in devices])
        ), measured.fleet

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold; `from_json` gives an equal value back."""
        return {
            "name": self.name, "ids": self.ids, "speeds": self.speeds.devices, "layers": self.speeds.layers,
            "timed": self.speeds.measured, "measured": None if self.measured is None else self.measured.to_toml(),
            "optimizer": self.optimizer, "reduce": self.reduce, "passes": self.passes, "slower": self.slower,
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """What another device of the same version told, over a connection that only devices of the job have.

        Raises:
            InputError: its measurement cannot be used.
        """
        text = row["measured"]
        layers = {name: tuple(each) for name, each in row["layers"].items()}
        return cls(
            row["name"], tuple(row["ids"]), Speeds(tuple(row["speeds"]), layers, row["timed"]),
            None if text is None else Measurement.from_toml(text, "what another device measured"), row["optimizer"],
            row["reduce"], row["passes"], {int(d): times for d, times in row["slower"].items()},
        )  # fmt: skip


def _of(values: Sequence[Any], indices: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[i] for i in indices)
