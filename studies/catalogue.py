"""Fleets of device classes, for studies of hypothetical machines."""

from collections.abc import Sequence

from convoy.fleet import Device, Fleet, Host, Nic
from convoy.fleet.catalogue import DeviceClass, device_class
from studies.power import Power

KINDS = ("server-cpu", "laptop-cpu", "desktop-gpu", "datacentre-gpu", "embedded-gpu", "mobile-gpu")
"""What the figures of the study show: one class of each kind."""


def power_of_class(known: DeviceClass) -> Power:
    """Return the watts of a device alone."""
    return Power(known.idle_w.value, known.busy_w.value)


def fleet_of(classes: Sequence[str], card: Nic) -> Fleet:
    """Return a fleet of one device per host, of the given classes, with identical NICs.

    Raises:
        InputError: no class, or a class that the catalogue does not have; near names are told.
    """
    devices = [
        Device.of_class(device_class(name), name=f"{name}-{index}", host=f"host-{index}")
        for index, name in enumerate(classes)
    ]
    hosts = tuple(Host(f"host-{index}") for index in range(len(devices)))
    return Fleet(hosts=hosts, devices=tuple(devices), network=card)
