"""The study: closed forms against the replay, sweeps, fleets, the published figures, traces and pictures."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.graph import Graph, Layer, Parameter
from convoy.model.nets import graph_of
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS as NAMED
from convoy.plan.presets import Speeds, named_plan
from convoy.report import timeline as pictures
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.events import Event, Timeline, play
from convoy.simulate.memory import memory_of
from convoy.simulate.network import network_of
from convoy.simulate.simulator import programs, simulate
from studies import figures, figures_fleets, fleets, published
from studies.__main__ import main
from studies.catalogue import fleet_of
from studies.closed_form import plan_times
from studies.envelope import costs_at, enveloped
from studies.fleets import layer_speeds
from studies.points import Points
from studies.roofline import roofline_costs
from studies.sweep import BASE, PLANS, along, crossover, points_at, rows_of, sweep, write_csv
from tests.support.described_fleets import asked
from tests.support.slow import most_slow

FLOP_PER_S, MEMORY, LINK, LATENCY_S = 100e9, 20e9, 125e6, 1e-4
GIGABIT = Nic(LINK, LINK, LATENCY_S)


def residual() -> Graph:
    """3x8x8 -> conv 6 -> batch norm -> ReLU -> conv 6 -> sum with ReLU -> pool to 1x1 -> flatten -> Linear 4."""

    def of(name: str, **shapes: tuple[int, ...]) -> dict[str, Parameter]:
        return {key: Parameter(f"{name}.{key}", shape, key in ("weight", "bias")) for key, shape in shapes.items()}

    norm = {"weight": (6,), "bias": (6,), "running_mean": (6,), "running_var": (6,)}
    layers = [
        Layer("x", "input", (), (3, 8, 8)),
        Layer("conv1", "conv", ("x",), (6, 8, 8), of("conv1", weight=(6, 3, 3, 3)), flop=2 * 6 * 27 * 64),
        Layer("bn", "batch_norm", ("conv1",), (6, 8, 8), of("bn", **norm), statistics=True),
        Layer("relu", "elementwise", ("bn",), (6, 8, 8)),
        Layer("conv2", "conv", ("relu",), (6, 8, 8), of("conv2", weight=(6, 6, 3, 3)), flop=2 * 6 * 54 * 64),
        Layer("add", "join", ("conv2", "relu"), (6, 8, 8)),
        Layer("pool", "pool", ("add",), (6, 1, 1)),
        Layer("flat", "flatten", ("pool",), (6,)),
        Layer("fc", "linear", ("flat",), (4,), of("fc", weight=(4, 6), bias=(4,)), flop=2 * 24),
    ]
    return Graph("Residual", {layer.name: layer for layer in layers}, ("fc",))


NETS = {
    "two-conv": graph_of("two-conv:20:33"),
    "alexnet": graph_of("alexnet:64"),
    "residual": residual(),
}


def equal_fleet(devices: int, card: Nic = GIGABIT) -> Fleet:
    return Fleet(
        tuple(Host(f"h{i}") for i in range(devices)),
        tuple(
            Device(f"d{i}", f"h{i}", "cpu", peak_flop_per_s=FLOP_PER_S, memory_bytes_per_s=MEMORY)
            for i in range(devices)
        ),
        card,
    )


def replayed(graph: Graph, plan: str, devices: int, batch: int, reduce=None) -> Timeline:
    steps = lower(named_plan(plan, graph, batch, Speeds((1.0,) * devices), reduce), graph)
    update = (5 * 4 / MEMORY,) * devices
    times = Roofline((Rate(FLOP_PER_S, MEMORY),) * devices)
    return simulate(steps, graph, Costs(times, network_of(equal_fleet(devices)), 4, update), overlap=False)


def closed(graph: Graph, plan: str, devices, batch, **options):
    points = Points.of(
        devices=devices, batch=batch, flop_per_s=FLOP_PER_S, memory_bytes_per_s=MEMORY, link_bytes_per_s=LINK,
        latency_s=LATENCY_S,
    )  # fmt: skip
    return plan_times(plan, graph, points, **options)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", ["two-conv", "alexnet", "residual"])
def test_closed_form_matches_the_replay(net, plan):
    """Even shares and ragged ones; the same to a few hundredths of a percent: chunks of a ring that are not quite equal."""
    for devices, batch in ((1, 16), (2, 16), (4, 16), (5, 13), (8, 16))[: 4 if net == "alexnet" else 5]:
        expected_s = replayed(NETS[net], plan, devices, batch).step_s
        assert closed(NETS[net], plan, devices, batch).step_s[0] == pytest.approx(expected_s, rel=1e-3)


@pytest.mark.parametrize("reduce", ["ring", "butterfly", "direct", "star"])
def test_closed_form_matches_every_collective(reduce):
    for devices in (2, 3, 4, 6):
        expected_s = replayed(NETS["two-conv"], "data", devices, 24, reduce).step_s
        found_s = closed(NETS["two-conv"], "data", devices, 24, reduce=reduce).step_s[0]
        assert found_s == pytest.approx(expected_s, rel=1e-3)


def test_overlapped_all_reduce_costs_its_uncovered_time():
    graph = NETS["alexnet"]
    shown, hidden = (closed(graph, "data", [1, 4], 8, overlap=overlap) for overlap in (False, True))
    assert hidden.compute_s == pytest.approx(shown.compute_s)
    (_, sums_s), (_, compute_s) = shown.sums_s, shown.compute_s
    # Backward is two of the three parts of the arithmetic here: every layer costs twice its forward.
    assert hidden.sums_s == pytest.approx([0.0, sums_s - compute_s * 2 / 3])


# --- networks ---------------------------------------------------------------------------------------------------------


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_invalid_points_are_refused():
    good = {"devices": 2, "batch": 8, "flop_per_s": 1e9, "memory_bytes_per_s": 1e9, "link_bytes_per_s": 1e6}
    assert len(Points.of(**{**good, "devices": [1, 2, 3]})) == 3
    for name, value in (("devices", 1.5), ("batch", 0), ("link_bytes_per_s", 0.0), ("flop_per_s", np.inf)):
        with pytest.raises(InputError, match=name):
            Points.of(**{**good, name: value})
    with pytest.raises(InputError, match="the axes are batch"):
        along("colour")


def test_ten_thousand_points_are_evaluated():
    """All plans; every number is finite, and no plan beats as many devices as it has."""
    axes = {"devices": 2.0 ** np.arange(10), "batch": 2.0 ** np.arange(4, 14)}
    axes |= {"link_bytes_per_s": np.geomspace(1e7, 1e11, 10), "flop_per_s": np.geomspace(1e11, 1e13, 10)}
    points = Points.grid(**{**BASE, **axes})
    assert len(points) == 10_000
    for each in sweep(graph_of("alexnet:4096"), points):
        assert np.isfinite(each.times.step_s).all()
        assert (each.times.step_s > 0).all()
        # Split weights are updated by many: that alone may help a little beyond the number of devices.
        assert (each.speedup <= points.devices * 1.01).all()


def test_data_overtakes_model_at_the_crossover():
    graph, points = graph_of("alexnet:512"), along("batch")
    (batch,) = crossover(graph, points, "model", "data", "batch")
    below, above = (sweep(graph, points_at(BASE, batch=round(batch * f)), ("model", "data")) for f in (0.7, 1.4))
    assert below[0].times.step_s < below[1].times.step_s
    assert above[0].times.step_s > above[1].times.step_s
    assert crossover(graph, points, "data", "model", "batch").size == 0


def test_sweep_is_written_as_a_table(tmp_path):
    rows = rows_of(sweep(NETS["two-conv"], along("devices", [1, 2, 4]), ("data", "model")))
    with write_csv(tmp_path / "t.csv", rows).open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["plan"], row["devices"]) for row in read] == [(p, d) for p in ("data", "model") for d in "124"]
    parts = [float(read[4][key]) for key in ("compute_s", "moves_s", "sums_s", "update_s")]
    assert sum(parts) == pytest.approx(float(read[4]["step_s"]), rel=1e-4)
    with pytest.raises(InputError, match="cannot write"):
        write_csv(tmp_path / "none" / "t.csv", rows)
    with pytest.raises(InputError, match="one row"):
        write_csv(tmp_path / "t.csv", [])


# --- unequal devices --------------------------------------------------------------------------------------------------


def test_uniform_fleet_matches_the_closed_form():
    graph = NETS["two-conv"]
    for each, name in zip(fleets.compare(graph, equal_fleet(3), 24, PLANS), PLANS, strict=True):
        # The closed form awaits every move where it stands; the replay of the fleet overlaps what can be.
        costs = roofline_costs(equal_fleet(3))
        sequential_s = simulate(each.steps, graph, costs, overlap=False).step_s
        assert sequential_s == pytest.approx(closed(graph, name, 3, 24).step_s[0], rel=1e-3)
        overlapped_s = play(programs(each.steps, graph, costs), costs.network, held_bytes=0).step_s
        assert overlapped_s <= sequential_s * (1 + 1e-9)
        # Messages sent early share NICs with awaited ones, which may cost a little.
        assert each.timeline.step_s <= overlapped_s * 1.05


def test_mixed_fleet_is_simulated():
    fleet = fleet_of(["embedded-gpu", "laptop-cpu", "mobile-gpu"], GIGABIT)
    names = (*NAMED, "auto")
    results = dict(zip(names, fleets.compare(NETS["two-conv"], fleet, 64, names), strict=True))
    assert results["data-by-speed"].samples_per_s > results["data"].samples_per_s
    assert max(each.samples_per_s for each in results.values()) == pytest.approx(
        results["auto"].samples_per_s, rel=0.02
    )
    for each in results.values():
        assert 0 < each.efficiency < 1.05
        assert each.memory == memory_of(each.steps, NETS["two-conv"])
        assert each.energy is not None
        # Between all idle and all busy.
        assert 4 + 4 + 2 <= each.energy.step_j / each.energy.step_s <= 15 + 28 + 10
        assert fleets.too_large(each, fleet) == []
    rows = fleets.rows_of(list(results.values()), names)
    assert [row["plan"] for row in rows] == list(names)
    tight = replace(fleet, devices=tuple(replace(d, memory_bytes=1000) for d in fleet.devices))
    assert "mobile-gpu-2" in fleets.too_large(results["data"], tight)[2]


def test_fleet_without_a_roofline_is_refused_with_a_remedy():
    bare = Fleet((Host("h"),), (Device("d", "h", "cpu"),))
    with pytest.raises(InputError, match="peak_flop_per_s"):
        roofline_costs(bare)
    with pytest.raises(InputError, match="above 0 and at most 1"):
        roofline_costs(equal_fleet(1), efficiency=1.5)
    with pytest.raises(InputError, match="auto"):
        fleets.make_plan("best", NETS["two-conv"], 8, roofline_costs(equal_fleet(2)))


# --- the published figures --------------------------------------------------------------------------------------------

FREE = published.Assumption(flop_per_s=100e9, link_bytes_per_s=1e18, latency_s=0.0)


@pytest.mark.parametrize("spread", published.SPREADS)
@pytest.mark.parametrize("baseline", ["fastest", "slowest"])
def test_free_links_leave_amdahls_law(spread, baseline):
    """The facts' check by arithmetic: 3.28x on four equal devices needs a convolution part of 0.927, 2.45x on three 0.888."""
    given = replace(FREE, spread=spread, baseline=baseline)
    for figure in (published.CPUS, published.GPUS):
        # 500 and 1500 filters do not divide evenly by every spread.
        assert published.predicted(figure, given) == pytest.approx(published.bound(figure, given), rel=0.01)
    assert published.bound(published.CPUS, replace(FREE, convolution=0.927)) == pytest.approx(3.28, abs=0.01)
    assert published.bound(published.GPUS, replace(FREE, convolution=0.888)) == pytest.approx(2.45, abs=0.01)


def test_a_prediction_by_hand():
    """Four equal CPUs of 50 GFLOP/s, 1 Gbit/s, kernels 5x5, convolutions 95 % of the time, per image:

    FLOP of the convolutions 2*1024*500*75 + 2*256*1500*12500 = 9.6768e9, three times that with backward: 29.0304e9,
    0.580608 s alone, 0.611166 s with the rest, 0.030558 s. On four: 0.145152 s of convolutions.
    Through the master's NIC: outputs of conv 1, 3/4 of 500*32*32, and of conv 2, 3/4 of 1500*16*16, in;
    inputs of conv 2, 500*16*16 three times, out; 1,056,000 numbers; backward the same: 8,448,000 bytes, 0.067584 s.
    The scores of 10 classes to three others: 120 bytes. Speedup 0.611166 / 0.243295 = 2.512.
    """
    given = published.Assumption(50e9, 125e6, latency_s=0.0)
    assert published.predicted(published.CPUS, given) == pytest.approx(2.512, abs=0.002)


# --- traces and pictures ----------------------------------------------------------------------------------------------


def hand_timeline() -> Timeline:
    """Device 0 computes, then receives two messages that overlap, then a third."""
    events = (
        Event(0, "compute", "conv forward", 0.0, 0.001, 0),
        Event(0, "receive", "Move 1", 0.001, 0.003, 1, peer=1, size_bytes=2000),
        Event(0, "receive", "Move 1", 0.002, 0.004, 1, peer=2, size_bytes=4000),
        Event(0, "receive", "Move 2", 0.003, 0.005, 2, peer=1, size_bytes=10),
        Event(1, "send", "Move 1", 0.001, 0.003, 1, peer=0, size_bytes=2000),
        Event(1, "send", "Move 2", 0.003, 0.005, 2, peer=0, size_bytes=10),
        Event(2, "send", "Move 1", 0.002, 0.004, 1, peer=0, size_bytes=4000),
    )
    return Timeline(events, 0.005, (0.001, 0.0, 0.0), (0.004, 0.005, 0.004))


def test_a_chrome_trace_by_hand(tmp_path):
    path = pictures.write_chrome_trace(hand_timeline(), tmp_path / "t.json", ["attic", "cellar", "shed"])
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "attic", 1: "cellar", 2: "shed"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {rows[0, row] for row in range(4)} == {"compute", "send", "receive", "receive 2"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(hand_timeline().events)
    received = [e for e in complete if e["pid"] == 0 and rows[0, e["tid"]].startswith("receive")]
    received.sort(key=lambda e: (rows[0, e["tid"]], e["ts"]))
    # Microseconds; the second message overlaps the first, the third begins as the first ends.
    assert [(rows[0, e["tid"]], e["ts"], e["dur"]) for e in received] == [
        ("receive", pytest.approx(1000), pytest.approx(2000)),
        ("receive", pytest.approx(3000), pytest.approx(2000)),
        ("receive 2", pytest.approx(2000), pytest.approx(2000)),
    ]
    assert received[2]["args"] == {"step": 1, "peer": "shed", "bytes": 4000, "bytes_per_s": pytest.approx(2e6)}


PNG = b"\x89PNG\r\n\x1a\n"


def test_all_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    graph, link = NETS["two-conv"], (1.25e9,)
    rows = figures_fleets.energy_rows(graph, batch=32, counts=(1, 4))
    assert {row["class"] for row in rows} >= {"server-cpu", "mobile-gpu"}
    replays = fleets.compare(graph, fleet_of(["laptop-cpu", "mobile-gpu"], GIGABIT), 16, ("data", "master"))
    table = published.table(published.GPUS, {"flop_per_s": (1e12,), "link_bytes_per_s": (1.25e9,)})
    drawn = [
        figures.devices_figure(graph, tmp_path / "a.png", links=link, samples_per_device=8),
        figures.batch_figure(graph, tmp_path / "b.png", links=link),
        figures.five_axes_figure(graph, tmp_path / "c.png"),
        figures.fastest_figure(graph, tmp_path / "d.png", devices=(4,)),
        figures.parts_figure(sweep(graph, points_at(BASE)), tmp_path / "e.png"),
        figures_fleets.energy_figure(rows, tmp_path / "f.png"),
        figures_fleets.fleet_figure(replays, ("data", "master"), tmp_path / "g.png"),
        figures_fleets.published_figure([(published.GPUS, table)], tmp_path / "h.png"),
    ]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


SLOWER = {**BASE, "devices": 3, "batch": 32, "link_bytes_per_s": 125e6}


@pytest.mark.parametrize(
    ("axis", "values"),
    most_slow(
        2, [("batch", (8,)), ("link_bytes_per_s", (12.5e6,)), ("flop_per_s", (1e13,)), ("memory_bytes_per_s", (5e9,))]
    ),
)
def test_auto_is_the_envelope_of_all_curves(axis, values):
    """Of the closed forms, and of the same plans replayed."""
    graph = NETS["two-conv"]
    for each in enveloped(graph, axis, values, SLOWER):
        assert each.over_best <= 1 + 1e-9
        point = {name: float(column[0]) for name, column in points_at({**SLOWER, axis: each.value}).columns().items()}
        costs, batch = costs_at(point), int(each.batch)
        plans = (named_plan(name, graph, batch, layer_speeds(asked(graph, batch, costs))) for name in NAMED)
        assert each.step_s <= min(simulate(lower(plan, graph), graph, costs).step_s for plan in plans) * (1 + 1e-9)


def test_study_runs_without_plots(tmp_path, capsys):
    assert main([str(tmp_path / "new"), "two-conv:4:6", "--no-figures", "--no-published", "--no-auto"]) == 0
    paths = [*(tmp_path / "new").iterdir()]
    assert {path.name for path in paths} >= {"axis-batch.csv", "devices-by-link.csv", "energy.csv", "mixed-fleet.csv"}
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"wrote {path}" for path in paths)
    with (tmp_path / "new" / "mixed-fleet.csv").open(newline="") as file:
        assert [row["plan"] for row in csv.DictReader(file)] == [*NAMED, "auto"]
