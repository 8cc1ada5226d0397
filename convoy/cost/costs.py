"""Cost-model inputs other than the step list: compute times, network, optimizer, host overheads."""

from dataclasses import dataclass, field

from convoy.cost.compute import ComputeTimes, Rate, Roofline
from convoy.cost.interval import Errors
from convoy.cost.memory import update_s_per_entry
from convoy.cost.network import Network, network_of
from convoy.cost.overhead import Overheads
from convoy.errors import InputError
from convoy.fleet import Fleet

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
    """

    times: ComputeTimes
    network: Network
    itemsize: int = 4
    update_s_per_entry: tuple[float, ...] = ()
    overheads: tuple[Overheads, ...] = ()
    errors: Errors = field(default_factory=Errors)

    def update_s(self, device: int) -> float:
        return self.update_s_per_entry[device] if self.update_s_per_entry else 0.0

    def overhead(self, device: int) -> Overheads:
        return self.overheads[device] if self.overheads else _NO_OVERHEADS


def roofline_costs(
    fleet: Fleet, *, efficiency: float = 1.0, optimizer: str = "sgd-momentum", itemsize: int = 4
) -> Costs:
    """The costs of a fleet that is only described: roofline times of its devices, and its network.

    Args:
        efficiency: the part of the peak that dense kernels reach, for every device.

    Raises:
        InputError: a device without a peak or a memory bandwidth, an efficiency outside (0, 1], an unknown optimizer.
    """
    if not 0 < efficiency <= 1:
        raise InputError(f"an efficiency of {efficiency}: the part of the peak is above 0 and at most 1; correct it")
    rates = []
    for device in fleet.devices:
        if device.peak_flop_per_s is None or device.memory_bytes_per_s is None:
            raise InputError(
                f"device {device.name!r} gives no roofline: add peak_flop_per_s and memory_bytes_per_s to the "
                "fleet file, or measure the device"
            )
        slowed = device.slowdown
        rates.append(Rate(device.peak_flop_per_s / slowed, device.memory_bytes_per_s / slowed, efficiency))
    update = tuple(update_s_per_entry(optimizer, rate.bytes_per_s, itemsize) for rate in rates)
    return Costs(Roofline(tuple(rates), itemsize), network_of(fleet), itemsize, update)
