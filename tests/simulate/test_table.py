"""A measurement as a value and as a file, and what a replay makes of it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import InputError, MismatchError
from convoy.fleet import Device, Fleet, Host, Link, Nic, read_fleet
from convoy.model.tracing import trace
from convoy.plan.device_program import LocalSize
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.report.measured import remarks
from convoy.simulate.costs import Overheads
from convoy.simulate.interval import OF_REPEATS
from convoy.simulate.simulator import simulate
from convoy.simulate.table import (
    DeviceCosts,
    LayerPoint,
    LinkSpread,
    Measurement,
    layer_times,
    read_fleet_file,
)
from tests.support.nets import TwoConv

GRAPH = trace(TwoConv(6), torch.zeros(2, 3, 8, 8)).graph
FLEETS = Path(__file__).parent.parent.parent / "benchmarks" / "fleets"

seconds = st.floats(min_value=0, max_value=1e6)
above_zero = st.floats(min_value=1e-12, max_value=1e12)
texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    """Of one to three hosts with a device or two each; layers with and without a grid over inputs."""
    hosts = [f"h{i}" for i in range(draw(st.integers(1, 3)))]
    devices = [f"{host}-{i}" for host in hosts for i in range(draw(st.integers(1, 2)))]
    cards = st.builds(Nic, above_zero, above_zero, seconds)
    fleet = Fleet(
        tuple(Host(name, card=draw(cards)) for name in hosts),
        tuple(Device(name, name.split("-")[0], "cpu", cores=draw(st.none() | above_zero)) for name in devices),
        links=tuple(Link(a, b, draw(above_zero), draw(seconds)) for a in hosts for b in hosts if a != b),
    )
    layers = draw(st.lists(texts, min_size=1, max_size=3, unique=True))
    points = []
    for device in devices:
        for layer in layers:
            samples, outputs = draw(axes), draw(axes)
            inputs = draw(st.lists(st.integers(1, 63), max_size=2, unique=True))
            sizes = [(s, o, 64) for s in samples for o in outputs] + [
                (s, max(outputs), i) for s in samples for i in inputs
            ]
            points += [LayerPoint(device, layer, *size, draw(seconds), draw(seconds), draw(seconds)) for size in sizes]
            if draw(st.booleans()):
                points += [
                    replace(p, shared=True, forward_s=draw(seconds)) for p in points[-len(sizes) :] if p.inputs == 64
                ]
    return Measurement(
        fleet, draw(texts), draw(texts), draw(st.integers(1, 1024)), draw(texts), draw(texts), draw(texts),
        tuple(DeviceCosts(name, *(draw(seconds) for _ in range(13))) for name in devices),
        tuple(points),
        tuple(LinkSpread(link.source, link.target, draw(seconds), draw(seconds)) for link in fleet.links),
    )  # fmt: skip


axes = st.lists(st.integers(1, 64), min_size=1, max_size=2, unique=True)


@settings(max_examples=25, deadline=None)
@given(measurements())
def test_measured_file_round_trips(measured: Measurement) -> None:
    text = measured.to_toml()
    assert Measurement.from_toml(text) == measured
    assert Measurement.from_toml(text).to_toml() == text


def point(
    layer: str = "conv1", samples: int = 4, outputs: int = 6, inputs: int = 3, **other: float | None
) -> LayerPoint:
    values = {"forward_s": 1e-3, "backward_s": 2e-3, "spread": 0.1} | other
    return LayerPoint("a-cpu", layer, samples, outputs, inputs, **values)


def measured_by(*points: LayerPoint, fingerprint: str = "f" * 16, **overheads: float) -> Measurement:
    """One device, and these points; no overheads but those given."""
    fleet = Fleet((Host("a"),), (Device("a-cpu", "a", "cpu"),))
    nothing = asdict(Overheads())
    costs = DeviceCosts(
        "a-cpu",
        send_s_per_byte=2e-10,
        receive_s_per_byte=6e-10,
        update_s_per_entry=1e-9,
        **nothing | overheads,
    )
    return Measurement(fleet, "net", fingerprint, 8, "0", "2", "2026-01-01", (costs,), points)


def test_jitter_reaches_the_replay_and_an_older_file_has_none() -> None:
    text = measured_by(point(), fingerprint=GRAPH.fingerprint, jitter_s=0.25).to_toml()
    assert Measurement.from_toml(text).costs(GRAPH).network.jitter_s == (0.25,)
    older = Measurement.from_toml(text.replace("jitter_s = 0.25, ", ""))
    assert older.costs(GRAPH).network.jitter_s == (0.0,)
    with pytest.raises(InputError, match=r"jitter_s = -0\.25: .*greater than or equal to 0"):
        Measurement.from_toml(text.replace("jitter_s = 0.25", "jitter_s = -0.25"))


def test_plain_fleet_file_is_unmeasured() -> None:
    fleet, measured = read_fleet_file(FLEETS / "mixed4.toml")
    assert measured is None
    assert [device.name for device in fleet.devices] == ["a-cpu", "b-cpu", "c-cpu", "d-cpu"]


def test_measured_file_reads_as_a_fleet(tmp_path: Path) -> None:
    measured = measured_by(point())
    path = tmp_path / "fleet.toml"
    path.write_text(measured.to_toml())
    assert read_fleet_file(path) == (measured.fleet, measured)
    assert read_fleet(path) == measured.fleet


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml"):
        read_fleet_file(tmp_path / "none.toml")


GOOD = measured_by(point()).to_toml()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("samples = 4", 'samples = "4"', r"measured\.layer\[0\]\.samples = '4'"),
        ("samples = 4", "samples = 4.5", r"measured\.layer\[0\]\.samples = 4\.5"),
        ("samples = 4", "samples = 0", r"measured\.layer\[0\]\.samples = 0: .*greater than or equal to 1; measure again"),
        ("samples = 4, ", "", r"measured\.layer\[0\]\.samples is missing"),
        ("samples = 4", "samples = 4, filters = 2", r"measured\.layer\[0\]\.filters = 2: unknown key.*samples"),
        ("forward_s = 0.001", "forward_s = -0.001", r"measured\.layer\[0\]\.forward_s = -0\.001: .*greater than or equal to 0"),
        ("forward_s = 0.001", "forward_s = nan", r"forward_s = nan"),
        ("forward_s = 0.001", "forward_s = inf", r"forward_s = inf"),
        ("update_s_per_entry = 1e-09", "update_s_per_entry = true", r"measured\.device\[0\]\.update_s_per_entry = True"),
        ('fingerprint = "', 'fingerprints = "', r"measured\.fingerprints.*unknown key"),
        ("batch = 8", "batch = 0", r"measured\.batch = 0"),
        ("format = 2", "format = 1", r"measured\.format = 1: this version reads 2; measure again"),
        ("format = 2\n", "", r"measured\.format = None"),
        ("samples = 4", "samples = 4, shared = 1", r"measured\.layer\[0\]\.shared = 1"),
        ("step_s = 0.0, ", "", r"measured\.device\[0\]\.step_s is missing"),
        ("copy_s_per_byte = 0.0", "copy_s_per_byte = -1.0", r"copy_s_per_byte = -1\.0: .*greater than or equal to 0"),
        ('device = "a-cpu", layer', 'device = "b-cpu", layer', r"measured\.layer\[0\]\.device: unknown device 'b-cpu'"),
        ('device = "a-cpu", send', 'device = "b-cpu", send', r"measured\.device\[0\]\.device: unknown device 'b-cpu'"),
        ("[measured]", "[measure]", r"measure\b.*unknown key"),
        ("[measured]", "[measured", "not TOML"),
        ('kind = "cpu"', 'kind = "cup"', r"device\[0\]\.kind = 'cup'"),
        (GOOD[GOOD.index("[measured]") :], "", r"no \[measured\] table.*convoy measure"),
        (GOOD[GOOD.index("[measured]") :], "measured = 1\n", r"measured"),
    ],
)  # fmt: skip
def test_unusable_file_says_where_and_why(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(InputError, match=message) as caught:
        Measurement.from_toml(GOOD.replace(old, new, 1), "lab.toml")
    assert "lab.toml" in str(caught.value)


def test_grid_points_must_fill_rectangles() -> None:
    corners = [point(samples=s, outputs=o) for s in (2, 4) for o in (1, 6)]
    measured_by(*corners)
    with pytest.raises(InputError, match="no point at 4 samples and 1"):
        measured_by(*(p for p in corners if (p.samples, p.outputs) != (4, 1)))
    with pytest.raises(InputError, match="there twice"):
        measured_by(*corners, corners[0])
    with pytest.raises(InputError, match="fewer inputs have all outputs"):
        measured_by(*corners, point(samples=2, inputs=1), point(samples=4, inputs=1, outputs=1))


def test_every_device_has_every_layer_and_its_costs() -> None:
    fleet = Fleet((Host("a"),), (Device("a-cpu", "a", "cpu"), Device("b-cpu", "a", "cpu")))
    one = measured_by(point())
    with pytest.raises(InputError, match="one row for each device"):
        replace(one, fleet=fleet)
    both = (*one.device, replace(one.device[0], device="b-cpu"))
    with pytest.raises(InputError, match="'conv1' is measured on some devices"):
        replace(one, fleet=fleet, device=both)


def test_times_are_interpolated_over_filters_and_over_inputs() -> None:
    points = [point(samples=s, outputs=o, forward_s=1.0 + s * o, backward_s=0.0) for s in (2, 4) for o in (2, 6)]
    points += [point(samples=s, inputs=1, forward_s=1.0 + s * 2, backward_s=0.0) for s in (2, 4)]
    times = layer_times(points)
    at = lambda *size: times.seconds(GRAPH["conv1"], "forward", LocalSize(*size))  # noqa: E731
    assert at(2, 6, 3) == pytest.approx(13.0)
    assert at(3, 4, 3) == pytest.approx(13.0)
    assert at(8, 6, 3) == pytest.approx(2 * 25.0)  # beyond the largest, in proportion to FLOP, which bound this layer
    # Six filters from one input: measured; from two: half way to the grid with all three, which shares its column.
    assert at(4, 6, 1) == pytest.approx(9.0)
    assert at(4, 6, 2) == pytest.approx((9.0 + 25.0) / 2)


def test_times_of_tiles_are_interpolated() -> None:
    """Half of an image takes a quarter of its time here, not a half."""
    tiles = [(None, 8.0), (0.5, 2.0), (0.25, 1.0)]
    points = [point(samples=1, tile=tile, forward_s=forward_s) for tile, forward_s in tiles]
    measured = measured_by(*points)
    assert Measurement.from_toml(measured.to_toml()) == measured
    times = layer_times(points)
    at = lambda images: times.seconds(GRAPH["conv1"], "forward", LocalSize(1, 6, 3).with_images(images))  # noqa: E731
    assert [at(images) for images in (1, 0.75, 0.5, 0.375)] == pytest.approx([8.0, 5.0, 2.0, 1.5])
    assert at(4) == pytest.approx(4 * 8.0)
    # Two images, a quarter of each.
    assert times.seconds(GRAPH["conv1"], "forward", LocalSize(2, 6, 3, tile=0.25)) == pytest.approx(2.0)


def test_single_device_replay_sums_layers_and_optimizer() -> None:
    points = []
    for index, layer in enumerate(name for name in GRAPH.layers if GRAPH[name].kind != "input"):
        whole = GRAPH[layer]
        size = (whole.channels_out, whole.channels_in) if whole.weighted else (whole.shape[0], whole.shape[0])
        points.append(point(layer, 8, *size, forward_s=1.0 + index, backward_s=0.5))
    measured = measured_by(*points, fingerprint=GRAPH.fingerprint)
    costs = measured.costs(GRAPH)
    timeline = simulate(lower(named_plan("data", GRAPH, 8, Speeds((1.0,))), GRAPH), GRAPH, costs)
    entries = sum(p.numel() for p in TwoConv(6).parameters())
    layers = len(points)
    expected_s = layers * (layers + 1) / 2 + 0.5 * layers + 1e-9 * entries
    assert timeline.step_s == pytest.approx(expected_s)
    assert costs.network.processor_s_per_byte == (pytest.approx(4e-10),)


def test_replay_includes_overheads_and_synchronised_statistics() -> None:
    measured = measured_by(point(), fingerprint=GRAPH.fingerprint, step_s=0.5, copy_s_per_byte=0.25)
    assert Measurement.from_toml(measured.to_toml()).costs(GRAPH).overheads == (
        Overheads(step_s=0.5, copy_s_per_byte=0.25),
    )
    rows = [point(samples=s, forward_s=s * 1.0) for s in (2, 4)]
    rows += [point(samples=s, forward_s=s * 3.0, backward_s=s * 5.0, shared=True) for s in (2, 4)]
    text = measured_by(*rows).to_toml()
    assert text.count("shared = true") == 2
    assert "false" not in text
    times = layer_times(Measurement.from_toml(text).points_of("a-cpu")["conv1"])
    assert times.forward.at(4, 6) == pytest.approx(4.0)
    assert times.forward_shared is not None
    assert times.backward_shared is not None
    assert times.forward_shared.at(4, 6) == pytest.approx(12.0)
    assert times.backward_shared.at(2, 6) == pytest.approx(10.0)
    assert layer_times(rows[:2]).forward_shared is None


def test_times_of_another_model_are_refused() -> None:
    with pytest.raises(MismatchError, match="measure this model"):
        measured_by(point()).costs(GRAPH)


def test_unsteady_times_are_reported_and_widen_the_interval() -> None:
    """Regression: `measure` saw 118 % and did not report it."""
    calm, wild = (measured_by(point(spread=spread)) for spread in (0.1, 2.36))
    assert remarks(calm) == []
    (text,) = remarks(wild)
    assert "did not repeat" in text
    assert "100% of its step" in text
    low, high = (each.errors.devices[0] for each in (calm, wild))
    assert 1 < low < 1 + 0.1 * OF_REPEATS + 1e-9
    assert high > 1 + 5 * (low - 1)


def test_other_programs_are_reported_and_widen_the_interval() -> None:
    busy = measured_by(point(), other_load=1.5)
    text = " ".join(remarks(busy))
    assert "Other programs ran during the measurement" in text
    assert "up to 2.5 times as long" in text
    assert busy.errors.devices[0] >= 2.5
    assert busy.errors.step([0.9]) > measured_by(point()).errors.step([0.9])
