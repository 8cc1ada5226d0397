"""Cost-model inputs other than the step list: compute times, network, optimizer, host overheads."""

from dataclasses import dataclass, field

from convoy.simulate.compute import ComputeTimes
from convoy.simulate.interval import Errors
from convoy.simulate.network import Network
from convoy.simulate.overhead import Overheads

_NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Costs:
    """What the simulator and the analytic cost model need besides the steps.

    Attributes:
        times: seconds of layers.
        network: the wire.
        itemsize: bytes of one number.
        update_s_per_entry: seconds of each device's optimizer for each parameter entry it keeps.
        overheads: what else each device's processor does; none where nothing was measured.
        errors: how far all this may err.
        process_bytes: memory of each device's process before it trains; none where nothing was measured.
    """

    times: ComputeTimes
    network: Network
    itemsize: int = 4
    update_s_per_entry: tuple[float, ...] = ()
    overheads: tuple[Overheads, ...] = ()
    errors: Errors = field(default_factory=Errors)
    process_bytes: tuple[int, ...] = ()

    def update_s(self, device: int) -> float:
        return self.update_s_per_entry[device] if self.update_s_per_entry else 0.0

    def overhead(self, device: int) -> Overheads:
        return self.overheads[device] if self.overheads else _NO_OVERHEADS
