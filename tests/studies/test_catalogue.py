"""Fleets of device classes."""

import pytest

from convoy.errors import InputError
from convoy.fleet import Fleet, Nic
from convoy.fleet.catalogue import device_class
from convoy.simulate.power import power_of
from studies.catalogue import KINDS, fleet_of, power_of_class

CARD = Nic(125e6, 125e6, 1e-4)


def test_fleet_of_classes_uses_catalogue_figures():
    fleet = fleet_of(["mobile-gpu", "laptop-cpu"], CARD)
    assert [device.name for device in fleet.devices] == ["mobile-gpu-0", "laptop-cpu-1"]
    assert power_of(fleet) == tuple(power_of_class(device_class(name)) for name in ("mobile-gpu", "laptop-cpu"))
    assert fleet.devices[0].memory_bytes == 4_000_000_000
    assert Fleet.from_toml(fleet.to_toml()) == fleet
    with pytest.raises(InputError, match="laptop-cpu"):
        fleet_of(["laptop"], CARD)
    assert len({device_class(name).name for name in KINDS}) == len(KINDS)
