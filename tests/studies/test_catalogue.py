"""Device classes: figures with their sources, and files of one's own with their faults named."""

import pytest

from convoy.errors import InputError
from convoy.fleet import Card, Fleet
from convoy.simulator.energy import power_of
from studies.catalogue import fleet_of, read_catalogue

CARD = Card(125e6, 125e6, 1e-4)


def test_the_catalogue_has_every_class_with_sources():
    classes = read_catalogue()
    assert {"server-cpu", "laptop-cpu", "desktop-gpu", "datacentre-gpu", "embedded-gpu", "mobile-gpu"} <= set(classes)
    for each in classes.values():
        # No vendor publishes what an idle device draws.
        assert "idle_w" in each.estimates
        assert each.power.busy_w > each.power.idle_w
    assert classes["datacentre-gpu"].rate(0.5).flop_per_s == classes["datacentre-gpu"].peak_flop_per_s.value


def test_a_fleet_of_classes_has_their_figures():
    fleet = fleet_of(["mobile-gpu", "laptop-cpu"], CARD)
    assert [device.name for device in fleet.devices] == ["mobile-gpu-0", "laptop-cpu-1"]
    assert power_of(fleet) == (read_catalogue()["mobile-gpu"].power, read_catalogue()["laptop-cpu"].power)
    assert fleet.devices[0].memory_bytes == 4_000_000_000
    assert Fleet.from_toml(fleet.to_toml()) == fleet
    with pytest.raises(InputError, match="laptop-cpu"):
        fleet_of(["laptop"], CARD)


GOOD = """
[[class]]
name = "board"
kind = "cuda"
about = "a board"
peak_flop_per_s = { value = 1e12, source = "its page" }
memory_bytes_per_s = { value = 1e10, source = "its page" }
memory_bytes = { value = 4e9, source = "its page" }
idle_w = { value = 1.0, source = "a guess", estimate = true }
busy_w = { value = 9.0, source = "its page" }
"""

FAULTS = [
    ("about =", "price = 3\nabout =", r"class\[0\]\.price = 3: unknown key"),
    ('1e12, source = "its page"', "1e12", r"class\[0\]\.peak_flop_per_s\.source is missing"),
    ("value = 1e10", "value = 0.0", r"memory_bytes_per_s\.value = 0\.0"),
    ("value = 9.0", "value = 0.5", r"'board'.*correct the watts"),
    ("[[class]]", "[[class]", "not TOML"),
    ('"board"', '"a board"', r"class\[0\]\.name"),
]


def test_a_catalogue_of_ones_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(GOOD)
    assert list(read_catalogue(path)) == ["board"]
    path.write_text(GOOD + GOOD)
    with pytest.raises(InputError, match="'board' is there 2 times"):
        read_catalogue(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_catalogue(tmp_path / "none.toml")


@pytest.mark.parametrize(("old", "new", "message"), FAULTS)
def test_faults_of_a_catalogue_are_named(tmp_path, old, new, message):
    path = tmp_path / "own.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        read_catalogue(path)
