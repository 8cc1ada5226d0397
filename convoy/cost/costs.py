"""Everything that the price of a step depends on, beside the steps."""

from dataclasses import dataclass

from convoy.cost.compute import ComputeTimes
from convoy.cost.network import Network
from convoy.cost.overhead import Overheads

_NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything a replay needs besides the steps.

    Attributes:
        times: seconds of layers.
        network: the wire.
        itemsize: bytes of one number.
        update_s_per_entry: seconds of each device's optimizer for each parameter entry it keeps.
        overheads: what else each device's processor does; none where nothing was measured.
    """

    times: ComputeTimes
    network: Network
    itemsize: int = 4
    update_s_per_entry: tuple[float, ...] = ()
    overheads: tuple[Overheads, ...] = ()

    def update_s(self, device: int) -> float:
        return self.update_s_per_entry[device] if self.update_s_per_entry else 0.0

    def overhead(self, device: int) -> Overheads:
        return self.overheads[device] if self.overheads else _NO_OVERHEADS
