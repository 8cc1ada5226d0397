"""Costs of a fleet from its devices' peaks and the fraction of them that kernels reach."""

from convoy.errors import InputError
from convoy.fleet import Fleet
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.memory import optimizer_named
from convoy.simulate.network import network_of


def roofline_costs(fleet: Fleet, *, efficiency: float = 1.0, optimizer: str = "sgd-momentum") -> Costs:
    """Return the costs of a described fleet: roofline times of its devices, and its network.

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
        rates.append(Rate(device.peak_flop_per_s / slowed * efficiency, device.memory_bytes_per_s / slowed))
    update = tuple(optimizer_named(optimizer).moved * 4 / rate.bytes_per_s for rate in rates)
    return Costs(Roofline(tuple(rates)), network_of(fleet), update_s_per_entry=update)
