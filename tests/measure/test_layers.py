"""Layer times of a device: a layer at one size computes its shard, and a synthetic device's times are recovered."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.measure.layer_timer import LayerTimer, SharedStatistics, workload
from convoy.measure.timed_sizes import ENDS_SLICES, Axes, choose_axes, first_allowance_s, full_axes, granule, timing_s
from convoy.measure.timing import SLICE_S, RoundTimer, Timing
from convoy.model.graph import Layer
from convoy.model.tracing import TracedModel, disable_in_place, trace
from convoy.plan.device_program import LocalSize, whole_size
from convoy.runtime.clock import Clock
from convoy.simulate.compute import shape_s
from convoy.simulate.table import LayerPoint, layer_times
from tests.support import layer_nets, nets
from tests.support.layer_nets import FILTERED, KEPT

CPU = torch.device("cpu")
QUICK_S = 1e-4


def traced_net(name: str) -> tuple[nn.Module, TracedModel]:
    model = nets.NETS[name]()
    return model, trace(model, torch.randn(4, *getattr(model, "shape", (3, 8, 8))))


def quick_timer(model: nn.Module, traced: TracedModel) -> LayerTimer:
    return LayerTimer(traced, model, 8, RoundTimer(Clock(CPU), slice_s=QUICK_S, cold=True))


@pytest.mark.parametrize(
    "name", ["two-conv", "resnet", "frozen", "tied", "opaque-whole", "shuffle", "bare", "auxiliary"]
)
def test_every_layer_of_a_net_gets_a_table(name: str) -> None:
    model, traced = traced_net(name)
    before = copy.deepcopy(model.state_dict())
    timer = quick_timer(model, traced)
    assert set(timer.alike) == {layer.name for layer in traced.graph.layers.values() if layer.kind != "input"}
    for first in dict.fromkeys(timer.alike.values()):
        timer.turn(first, allowance_s=100.0)
    for first, rows in timer.rows().items():
        layer, points = traced.graph[first], [LayerPoint("d", first, *row) for row in rows]
        # The whole layer with the whole batch is a point, so nothing is extrapolated.
        whole = whole_size(layer, 8 if layer.batched else 1)
        largest = max(points, key=lambda p: (p.samples, p.outputs, p.inputs))
        assert (largest.samples, largest.outputs, largest.inputs) == (whole.samples, whole.outputs, whole.inputs)
        assert all(p.forward_s > 0 for p in points)
        assert all((p.backward_s > 0) == (first in timer.trained) for p in points)
        times = layer_times(points)
        assert times.seconds(layer, "forward", whole) > 0
        assert (times.forward_shared is not None) == (times.backward_shared is not None) == layer.statistics
        assert (times.forward_inputs is not None) == (
            layer.sums_channels and not layer.shared and layer.channels_in > 1
        )
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in before.items())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [*KEPT, *FILTERED])
def test_every_kind_of_layer_runs_at_every_size(name: str) -> None:
    torch.manual_seed(0)
    model = layer_nets.build(name)
    traced = trace(model, torch.zeros(2, 3, 8, 8))
    local = copy.deepcopy(model)
    before = {key: t.clone() for key, t in local.state_dict().items()}
    for layer in traced.graph.layers.values():
        if layer.kind in ("input", "pick") or not layer.batched or not layer.differentiable:
            continue
        whole = whole_size(layer, 2)
        unit = granule(traced.graph, layer)
        sizes = full_axes(traced.graph, layer, 2).sizes(whole)
        for size in (*sizes, LocalSize(2, unit or whole.outputs, whole.inputs)):
            wants = [traced.graph[i].kind != "input" and traced.graph[i].differentiable for i in layer.inputs]
            with torch.no_grad(), workload(local, traced, layer, size, wants, backward=True) as work:
                y, saved = work.run.forward(work.inputs, work.samples, True, wants)
                axis = layer.feature_axis
                assert y.shape[axis] * whole.outputs == size.outputs * layer.batch_shape(2)[axis]
                work.run.backward(saved, work.gradient, wants)
    for key, held in local.state_dict().items():
        if not any(word in key for word in ("_u", "_v", "running", "num_batches")):
            assert torch.equal(held, before[key]), "the model is left as it was"


@pytest.mark.parametrize("name", ["two-conv", "resnet", "mobile", "convolutions", "signal", "concatenation"])
def test_a_layer_at_one_size_computes_its_shard_of_the_layer(name: str) -> None:
    """With the inputs cut to the shard, its output equals the cut of the whole output."""
    model, traced = traced_net(name)
    disable_in_place(model)
    for layer in traced.graph.layers.values():
        unit = granule(traced.graph, layer)
        whole = whole_size(layer, 4)
        if unit is None or whole.outputs == unit:
            continue
        size = replace(whole, outputs=unit)
        wants = (True,) * len(layer.inputs)
        with torch.no_grad(), workload(model, traced, layer, whole, wants, backward=True) as full:
            y = full.run.forward(full.inputs, 4, True, wants)[0]
        with torch.no_grad(), workload(model, traced, layer, size, wants, backward=True) as part:
            cut = [
                big[tuple(slice(n) for n in small.shape)] for big, small in zip(full.inputs, part.inputs, strict=True)
            ]
            y_part, saved = part.run.forward(cut, 4, True, wants)
            gx, _ = part.run.backward(saved, part.gradient, wants)
        axis = len(layer.shape) if layer.kind == "linear" else 1
        torch.testing.assert_close(y_part, y.narrow(axis, 0, unit), msg=layer.name)
        assert [g.shape for g in gx if g is not None] == [x.shape for x in part.inputs]


def test_synchronised_batch_norm_matches_torch_on_one_device() -> None:
    """With the global batch on one device, the steps around the exchange match torch's kernel."""
    model, traced = traced_net("resnet")
    layer = next(layer for layer in traced.graph.layers.values() if layer.statistics)
    size = whole_size(layer, 4)
    with torch.no_grad(), workload(model, traced, layer, size, (True,), backward=True) as part:
        shared = SharedStatistics(model, traced, layer)
        (y, saved), (y_shared, saved_shared) = (
            run.forward(part.inputs, 4, True, (True,)) for run in (part.run, shared)
        )
        torch.testing.assert_close(y_shared, y)
        (gx,), own = part.run.backward(saved, part.gradient, (True,))
        (gx_shared,), own_shared = shared.backward(saved_shared, part.gradient, (True,))
    torch.testing.assert_close(gx_shared, gx)
    torch.testing.assert_close(own_shared["weight"], own["weight"])
    torch.testing.assert_close(own_shared["bias"], own["bias"])


def test_batch_norm_is_timed_alone_and_synchronised() -> None:
    model, traced = traced_net("resnet")
    layer = next(layer for layer in traced.graph.layers.values() if layer.statistics)
    timer = Ideal(traced, model, 8, RoundTimer(Clock(CPU)))
    timer.turn(layer.name, allowance_s=100.0)
    sizes = timer.grids[layer.name]
    shared = [size.samples for size in sizes if size.shares_statistics]
    assert shared == sorted({size.samples for size in sizes})
    with torch.no_grad(), workload(model, traced, layer, sizes[-1], (True,), backward=True) as work:
        assert isinstance(work.run, SharedStatistics)


def test_layer_with_fewer_inputs_has_fewer_weights() -> None:
    model, traced = traced_net("two-conv")
    layer = traced.graph["conv2"]
    with torch.no_grad(), workload(model, traced, layer, LocalSize(2, 7, 3), (True,), backward=True) as part:
        assert part.inputs[0].shape == (2, 3, 4, 4)
        weight = model.get_submodule("conv2").weight
        assert weight.shape == (7, 3, 3, 3)
        _, saved = part.run.forward(part.inputs, 2, True, part.wants)
        (gx,), own = part.run.backward(saved, part.gradient, part.wants)
        assert gx is not None
        assert gx.shape == (2, 3, 4, 4)
        assert own["weight"].shape == weight.shape
    assert model.get_submodule("conv2").weight.shape == (7, 5, 3, 3)


def test_the_first_layer_computes_no_gradient_of_the_images() -> None:
    timer = quick_timer(*traced_net("two-conv"))
    assert timer.wants["conv1"] == (False,)
    assert timer.wants["conv2"] == (True,)
    assert "net.conv1" not in quick_timer(*traced_net("frozen")).trained


def test_identical_layers_are_timed_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=p) for p in (1, 1, 1, 1)), nn.Conv2d(4, 4, 5, padding=2))
    traced = trace(model, torch.randn(2, 4, 8, 8))
    # The first one computes no gradient of its input, the last one has larger kernels.
    assert list(quick_timer(model, traced).alike.values()) == ["0", "1", "1", "1", "4"]


class Ideal(LayerTimer):
    """A device on which a layer takes 1 us, and 1 ns per sample, filter and input; half of it forward."""

    slower = 1.0

    def time(self, name: str, size: LocalSize) -> float:
        both_s = 1e-6 + 1e-9 * size.samples * size.outputs * size.inputs * self.slower
        assert (name, size) not in self.timings, "a size is timed once a turn"
        self.timings[name, size] = Timing([both_s / 2], [both_s / 2])
        return both_s


@pytest.mark.parametrize("slower", [1.0, 1e2, 1e4])
def test_table_reproduces_a_synthetic_device(slower: float) -> None:
    """If the whole layer would take too long, it is extrapolated linearly from smaller sizes."""
    model = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 256, 3, padding=1))
    traced = trace(model, torch.randn(2, 64, 8, 8))
    timer, layer = Ideal(traced, model, 64, RoundTimer(Clock(CPU))), traced.graph["1"]
    timer.slower = slower
    timer.turn("1", allowance_s=60.0)
    points = [LayerPoint("d", "1", *row) for row in timer.rows()["1"]]
    times = layer_times(points)
    for size in (LocalSize(64, 256, 128), LocalSize(7, 256, 128), LocalSize(64, 19, 128), LocalSize(64, 256, 10)):
        expected = (1e-6 + 1e-9 * size.samples * size.outputs * size.inputs * slower) / 2
        assert times.seconds(layer, "forward", size) == pytest.approx(expected, rel=0.02)
    assert all(p.forward_s + p.backward_s <= 1.5 for p in points)


class Expected:
    """Expected seconds of a size, from those of a known one."""

    def __init__(self, layer: Layer, known: LocalSize, known_s: float) -> None:
        self.layer, self.known, self.known_s = layer, known, known_s

    def __call__(self, size: LocalSize) -> float:
        return self.known_s * shape_s(self.layer, size) / shape_s(self.layer, self.known)


def test_axes_follow_the_layer() -> None:
    _, traced = traced_net("mobile")
    axes = {layer.name: full_axes(traced.graph, layer, 64) for layer in traced.graph.layers.values()}
    assert axes["stem"] == Axes((4, 8, 16, 32, 64), (1, 2, 4), (1, 3))
    # A depthwise convolution keeps whole groups, here of two filters, and has no grid over inputs.
    assert axes["depthwise.0"] == Axes((4, 8, 16, 32, 64), (2, 6, 12))
    assert axes["depthwise.1"].samples == (4, 16, 64)
    _, traced = traced_net("signal")
    assert full_axes(traced.graph, traced.graph["bn1"], 16).samples[0] == 2  # of one sample there is no variance
    _, traced = traced_net("bare")
    assert full_axes(traced.graph, traced.graph["scale"], 64) == Axes((1,), (6,))


def test_axes_shrink_to_the_available_time() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(128, 256, 3)), torch.zeros(1, 128, 18, 18)).graph
    full, whole = Axes((4, 8, 16, 32, 64), (16, 32, 64, 128, 256), (8, 16, 32, 64, 128)), LocalSize(64, 256, 128)

    def expected(known_s: float) -> Expected:
        return Expected(graph["0"], LocalSize(4, 16, 128), known_s)

    seen = []
    for allowance_s in (1000.0, 10.0, 5.0, 2.0, 0.0):
        axes = choose_axes(full, whole, expected(1e-3), allowance_s)
        seen.append(len(axes.sizes(whole)))
        cost_s = sum(timing_s(expected(1e-3)(size), SLICE_S) for size in axes.sizes(whole))
        assert cost_s <= max(allowance_s, ENDS_SLICES * SLICE_S)
        assert allowance_s < 2.0 or (axes.samples[-1], axes.outputs[-1]) == (64, 256)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 2
    # What would take 22 s whole is timed up to a sixteenth, in both directions.
    axes = choose_axes(full, whole, expected(0.088), 60.0)
    assert (axes.samples[-1], axes.outputs[-1], axes.inputs[-1]) == (16, 64, 32)
    assert choose_axes(full, whole, expected(10.0), 60.0) == Axes((4,), (16,))


def test_cheap_extra_samples_are_timed() -> None:
    """A Linear of 4096 mostly reads its weights: 64 samples take little longer than 4, and a slow device times them too."""
    graph = trace(nn.Sequential(nn.Linear(4096, 4096)), torch.zeros(1, 4096)).graph
    full = full_axes(graph, graph["0"], 64)
    axes = choose_axes(full, whole_size(graph["0"], 64), Expected(graph["0"], LocalSize(4, 256, 4096), 0.01), 4.0)
    assert axes.samples[-1] == 64
    assert axes.outputs[-1] == 4096


def test_allowances_sum_to_the_budget() -> None:
    _, traced = traced_net("two-conv")
    names = [name for name in traced.graph.layers if name != "x"]
    left_s, shares = 60.0, {}
    for index, name in enumerate(names):
        shares[name] = first_allowance_s(traced.graph, names[index:], left_s)
        left_s -= shares[name]
    assert left_s == pytest.approx(0.0)
    assert max(shares, key=lambda name: shares[name]) in ("conv1", "conv2")


def test_the_ends_of_each_axis_are_timed_if_no_time_is_left() -> None:
    """Otherwise the largest size is extrapolated from 4 samples of 4 filters, eight times too long."""
    _, traced = traced_net("two-conv")
    layer = traced.graph["conv2"]
    whole = whole_size(layer, 64)
    full = full_axes(traced.graph, layer, 64)
    for largest_s in (3e-3, 9e-3):
        axes = choose_axes(full, whole, Expected(layer, whole, largest_s), allowance_s=0.0, slice_s=1e-3)
        assert (axes.samples[-1], axes.outputs[-1]) == (64, whole.outputs), largest_s


def test_a_disturbed_small_size_does_not_stop_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and smallest size seems to take 0.1 s, all others take 1 ms. A step of 0.15 s was predicted to take 75 s by
    such a size alone."""
    layers = quick_timer(*traced_net("two-conv"))
    layers.timer.slice_s = SLICE_S
    found: list[LocalSize] = []

    def timed(_: str, size: LocalSize) -> float:
        found.append(size)
        return 0.1 if len(found) == 1 else 1e-3

    monkeypatch.setattr(layers, "time", timed)
    assert whole_size(layers.traced.graph["conv2"], 8) in layers._choose_grid("conv2", 0.1)


def test_large_images_are_timed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole image may fit in no device's memory."""
    pixels = (nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4))
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), *pixels, nn.AdaptiveMaxPool2d(1))
    traced = trace(model, torch.zeros(2, 3, 512, 8))
    monkeypatch.setattr("convoy.measure.timed_sizes.LARGE_BYTES", 10_000)
    largest = {name: full_axes(traced.graph, traced.graph[name], 2).samples[-1] for name in "012345"}
    assert largest == {"0": 1 / 8, **dict.fromkeys("1234", 1 / 4), "5": 2}  # of 65,536 and 32,768 bytes
    monkeypatch.setattr("convoy.measure.timed_sizes.LARGE_BYTES", 1_000)
    assert full_axes(traced.graph, traced.graph["0"], 2).samples == (8 / 512,)


def test_tiles_of_images_are_timed() -> None:
    """Small tensors stay in caches: a ninth of the rows took a twentieth of the time."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 9))
    traced = trace(model, torch.zeros(2, 3, 160, 32))
    axes = [full_axes(traced.graph, traced.graph[name], 1).samples for name in ("0", "1", "2")]
    assert axes == [(1 / 16, 1 / 8, 1 / 4, 1 / 2, 1), (1 / 8, 1 / 4, 1 / 2, 1), (1 / 8, 1 / 4, 1 / 2, 1)]
    timer, size = quick_timer(model, traced), whole_size(traced.graph["2"], 1).with_images(0.13)
    with torch.no_grad(), workload(model, traced, traced.graph["2"], size, (True,), backward=True) as work:
        assert work.inputs[0].shape == (1, 4, 10, 16)
    timer.timings["2", size] = Timing([1.0], [3.0])
    assert timer._times("2", size)[:2] == (pytest.approx(1.04), pytest.approx(3.12))
