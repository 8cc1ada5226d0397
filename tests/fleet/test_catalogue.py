"""The catalogue of device classes: every figure has a source and a plausible size."""

import tomllib

import pytest

from convoy.errors import InputError
from convoy.fleet import Fleet
from convoy.fleet.catalogue import Figure, device_class, device_classes
from tests.support.processes import ROOT

CLASSES = list(device_classes().values())
SOURCES = tomllib.loads((ROOT / "convoy" / "fleet" / "catalogue.toml").read_text())["source"]

RANGES = {
    "peak_flop_per_s": (50e9, 250e12),
    "tf32_flop_per_s": (10e12, 1e15),
    "memory_bytes_per_s": (10e9, 10e12),
    "memory_bytes": (4e9, 400e9),
    "idle_w": (0.1, 150),
    "busy_w": (2, 1000),
}


def test_there_are_classes_of_every_kind():
    assert len(CLASSES) >= 40
    assert {each.kind for each in CLASSES} == {"cpu", "cuda", "mps", "xpu"}
    for family in [
        "gtx",
        "rtx",
        "a100",
        "h100",
        "rx",
        "mi",
        "arc",
        "apple",
        "jetson",
        "raspberry",
        "core-",
        "ryzen",
        "epyc",
    ]:
        assert any(each.name.startswith(family) for each in CLASSES), family
    names = [name for each in CLASSES for name in (each.name, *each.aliases)]
    assert len({name.replace("-", "") for name in names}) == len(names)


@pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.name)
def test_every_figure_has_a_source_and_a_likely_size(known):
    figures = {name: value for name in known.__slots__ if isinstance(value := getattr(known, name), Figure)}
    for name, figure in figures.items():
        least, most = RANGES[name]
        assert least <= figure.value <= most, name
        assert figure.source.partition(":")[0] in SOURCES or (name == "idle_w" and figure.estimate), figure.source
    assert known.idle_w.value < known.busy_w.value
    assert known.about
    # Between 1 and 150 FLOP for each byte of its memory: a slip by a factor of a thousand shows here.
    assert 1 < known.peak_flop_per_s.value / known.memory_bytes_per_s.value < 150
    assert (known.kind == "cpu") == (known.cores is not None)


def test_class_is_found_by_any_of_its_names():
    assert device_class("RTX 3060") is device_class("desktop-gpu") is device_classes()["rtx3060"]
    with pytest.raises(InputError, match=r"unknown device class 'rtx3061'.* rtx3060"):
        device_class("rtx3061")


def test_part_of_a_processor_scales_its_class():
    whole = device_class("epyc-7763")
    quarter, few = whole.with_cores(16), whole.with_cores(4)
    assert quarter.peak_flop_per_s.value == whole.peak_flop_per_s.value / 4
    assert quarter.memory_bytes_per_s == whole.memory_bytes_per_s
    assert few.memory_bytes_per_s.value == whole.memory_bytes_per_s.value / 4
    assert whole.with_cores(100) is whole


FLEET = """
[network]
send_bytes_per_s = "1 Gbit/s"
receive_bytes_per_s = "110 MB/s"
latency_s = "50 us"

[[host]]
name = "a"

[[host]]
name = "b"

[[device]]
name = "gpu"
host = "a"
class = "RTX 3090"
memory_bytes = "20 GB"

[[device]]
name = "cpu"
host = "b"
class = "laptop-cpu"
cores = 2
"""


def test_a_fleet_file_names_classes_and_writes_units():
    """Regression: `memory_bytes = 12e9` was refused, and fleet files could not name a class."""
    fleet = Fleet.from_toml(FLEET)
    gpu, cpu = fleet.devices
    assert (gpu.kind, gpu.class_name, gpu.memory_bytes) == ("cuda", "rtx3090", 20_000_000_000)
    assert gpu.memory_bytes_per_s == device_class("rtx3090").memory_bytes_per_s.value
    assert cpu.peak_flop_per_s == device_class("laptop-cpu").peak_flop_per_s.value / 2
    assert fleet.network is not None
    assert (fleet.network.send_bytes_per_s, fleet.network.latency_s) == (125e6, pytest.approx(5e-5))
    assert Fleet.from_toml(fleet.to_toml()) == fleet
    assert Fleet.from_toml(FLEET.replace('"20 GB"', "20e9")) == fleet


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"RTX 3090"', '"RTX 3099"', r"device\[0\]\.class: unknown device class 'RTX 3099'"),
        ('"20 GB"', '"20 Gx"', r"device\[0\]\.memory_bytes = '20 Gx': 'Gx' is no unit.*write e\.g\. 12 GB"),
        ('"20 GB"', '"-20 GB"', r"memory_bytes = -20000000000 of device 'gpu': must be"),
        ('"50 us"', '"50 W"', r"network\.latency_s = '50 W'"),
        ("cores = 2", "core = 2", r"core = 2: unknown key; .*, class$"),
    ],
)
def test_fleet_file_class_errors_are_reported(old, new, message):
    assert old in FLEET
    with pytest.raises(InputError, match=message):
        Fleet.from_toml(FLEET.replace(old, new))
