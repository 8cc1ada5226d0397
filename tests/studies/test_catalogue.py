"""Fleets of device classes."""

import pytest

from convoy.errors import InputError
from convoy.fleet import Fleet, Nic
from convoy.fleet.catalogue import device_class
from convoy.simulate.events import Timeline
from studies.catalogue import KINDS, fleet_of, power_of_class
from studies.power import Power, energy_of, power_of

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


def test_energy_by_hand() -> None:
    # 10 s: 5 W * 10 s + 45 W * 4 s = 230 J; 2 W * 10 s + 8 W * 10 s = 100 J.
    energy = energy_of(Timeline((), 10.0, (4.0, 10.0), (6.0, 0.0)), (Power(5, 50), Power(2, 10)), batch=20)
    assert energy.devices_j == (230.0, 100.0)
    assert (energy.step_j, energy.image_j, energy.step_j / energy.step_s) == (330.0, 16.5, 33.0)
