"""The table of a device: pieces of layers compute their part, and a synthetic device is found again."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.measure.axes import ENDS_STRETCHES, Axes, Guess, allowances, choose_axes, cost_s, full_axes, granule
from convoy.measure.layers import Bench, Point, SharedStatistics, piece
from convoy.measure.timing import STRETCH_S, Piece, Repetition, Sample, Times
from convoy.model.graph import Layer
from convoy.model.tracing import TracedModel, disable_in_place, trace
from convoy.plan.device_program import LocalSize, whole_size
from convoy.runtime.clock import Clock
from convoy.simulate.compute import shape_s
from convoy.simulate.table import LayerPoint, layer_times
from tests.support import nets

CPU = torch.device("cpu")
QUICK_S = 1e-4


def traced_net(name: str) -> tuple[nn.Module, TracedModel]:
    model = nets.NETS[name]()
    return model, trace(model, torch.randn(4, *getattr(model, "shape", (3, 8, 8))))


def quick_bench(model: nn.Module, traced: TracedModel, batch: int = 8) -> Bench:
    return Bench(traced, model, batch, Clock(CPU), CPU, stretch_s=QUICK_S)


@pytest.mark.parametrize("name", nets.NETS)
def test_every_layer_of_every_net_gets_a_table(name: str) -> None:
    model, traced = traced_net(name)
    before = copy.deepcopy(model.state_dict())
    bench = quick_bench(model, traced)
    first = bench.alike()
    assert set(bench.layers) == {layer.name for layer in traced.graph.layers.values() if layer.kind != "input"}
    for layer in (traced.graph[name] for name in bench.layers if first[name] == name):
        points = bench.measure(layer.name, allowance_s=100.0)
        # Whole layer, whole batch: the largest point is there, so nothing is extrapolated.
        whole = whole_size(layer, 8 if layer.batched else 1)
        assert max(points, key=lambda p: (p.size.samples, p.size.outputs, p.size.inputs)).size == whole
        assert all(p.times.forward_s > 0 for p in points)
        assert all((p.times.backward_s > 0) == (layer.name in bench.trained) for p in points)
        times = layer_times([as_layer_point(layer.name, p) for p in points])
        assert times.seconds(layer, "forward", whole) > 0
        assert (times.forward_shared is not None) == (times.backward_shared is not None) == layer.statistics
        assert (times.forward_inputs is not None) == (
            layer.sums_channels and not layer.shared and layer.channels_in > 1
        )
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in before.items())


def as_layer_point(layer: str, p: Point, device: str = "d") -> LayerPoint:
    size, times = p.size, p.times
    return LayerPoint(
        device, layer, size.samples, size.outputs, size.inputs, times.forward_s, times.backward_s, times.spread,
        size.shares_statistics,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["two-conv", "resnet", "mobile", "convolutions", "signal", "concatenation"])
def test_a_piece_computes_its_part_of_the_layer(name: str) -> None:
    """With the inputs of the whole layer cut to the piece, its output is the cut of the whole output."""
    model, traced = traced_net(name)
    disable_in_place(model)
    for layer in traced.graph.layers.values():
        unit = granule(traced.graph, layer)
        whole = whole_size(layer, 4)
        if unit is None or whole.outputs == unit:
            continue
        size = replace(whole, outputs=unit)
        wants = (True,) * len(layer.inputs)
        state = model.state_dict()
        with torch.no_grad(), piece(model, traced, layer, whole, wants, backward=True) as full:
            y = full.run.forward(full.inputs, 4, True, wants)[0]
        with torch.no_grad(), piece(model, traced, layer, size, wants, backward=True) as part:
            cut = [
                big[tuple(slice(n) for n in small.shape)] for big, small in zip(full.inputs, part.inputs, strict=True)
            ]
            y_part, saved = part.run.forward(cut, 4, True, wants)
            gx, _ = part.run.backward(saved, part.gradient, wants)
        axis = len(layer.shape) if layer.kind == "linear" else 1
        torch.testing.assert_close(y_part, y.narrow(axis, 0, unit), msg=layer.name)
        assert [g.shape for g in gx if g is not None] == [x.shape for x in part.inputs]
        assert all(model.state_dict()[key] is not None for key in state)


def test_a_batch_norm_that_shares_its_statistics_computes_the_same_alone() -> None:
    """Where the whole batch is here, the steps around the exchange give what torch's own kernel gives."""
    model, traced = traced_net("resnet")
    layer = next(layer for layer in traced.graph.layers.values() if layer.statistics)
    size = whole_size(layer, 4)
    with torch.no_grad(), piece(model, traced, layer, size, (True,), backward=True) as part:
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


def test_a_batch_norm_is_timed_as_it_runs_alone_and_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traced = traced_net("resnet")
    timed: list[tuple[str, int]] = []

    def note(part: Piece, *_: Any) -> Sample:
        timed.append((type(part.run).__name__, part.samples))
        return Sample(Repetition(1, [1.0]), Repetition(1, [1.0]))

    monkeypatch.setattr("convoy.measure.layers.sampled", note)
    bench = quick_bench(model, traced)
    layer = next(layer for layer in traced.graph.layers.values() if layer.statistics)
    points = bench.measure(layer.name, allowance_s=100.0, point_limit_s=1e9)
    shared = [p.size.samples for p in points if p.size.shares_statistics]
    assert shared == sorted({p.size.samples for p in points})
    assert [samples for name, samples in timed if name == "SharedStatistics"] == shared
    assert len([p for p in points if not p.size.shares_statistics]) > len(shared)


def test_a_piece_with_fewer_inputs_has_the_weights_of_those() -> None:
    model, traced = traced_net("two-conv")
    layer = traced.graph["conv2"]
    with torch.no_grad(), piece(model, traced, layer, LocalSize(2, 7, 3), (True,), backward=True) as part:
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
    model, traced = traced_net("two-conv")
    bench = quick_bench(model, traced)
    assert bench.wants["conv1"] == (False,)
    assert bench.wants["conv2"] == (True,)
    frozen, traced = traced_net("frozen")
    assert "net.conv1" not in quick_bench(frozen, traced).trained


def test_layers_alike_are_timed_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=p) for p in (1, 1, 1, 1)), nn.Conv2d(4, 4, 5, padding=2))
    traced = trace(model, torch.randn(2, 4, 8, 8))
    # The first one computes no gradient of its input, the last one has larger kernels.
    assert list(quick_bench(model, traced).alike().values()) == ["0", "1", "1", "1", "4"]


class Ideal(Bench):
    """A bench on which a layer takes 1 us, and 1 ns for each sample, filter and input; half of it forward."""

    def _time(self, layer: Layer, size: LocalSize) -> Times:  # noqa: ARG002
        self.asked = [*getattr(self, "asked", []), size]
        both_s = 1e-6 + 1e-9 * size.samples * size.outputs * size.inputs * self.slower
        return Times(both_s / 2, both_s / 2, 0.0)

    slower = 1.0


def ideal(slower: float) -> tuple[Ideal, Layer]:
    model = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 256, 3, padding=1))
    traced = trace(model, torch.randn(2, 64, 8, 8))
    bench = Ideal(traced, model, 64, Clock(CPU), CPU)
    bench.slower = slower
    return bench, traced.graph["1"]


@pytest.mark.parametrize(("slower", "largest_s"), [(1.0, 1.5), (1e2, 1.5), (1e4, 1.5), (1e4, 0.1)])
def test_a_table_gives_back_the_times_of_a_synthetic_device(slower: float, largest_s: float) -> None:
    """Where the whole layer would take too long, it lies on the line through smaller sizes."""
    bench, layer = ideal(slower)
    points = bench.measure("1", allowance_s=60.0, point_limit_s=largest_s)
    times = layer_times([as_layer_point("1", p) for p in points])
    for size in (LocalSize(64, 256, 128), LocalSize(7, 256, 128), LocalSize(64, 19, 128), LocalSize(64, 256, 10)):
        expected = (1e-6 + 1e-9 * size.samples * size.outputs * size.inputs * slower) / 2
        assert times.seconds(layer, "forward", size) == pytest.approx(expected, rel=0.02)
    assert all(p.times.both_s <= largest_s for p in points)
    assert len(bench.asked) == len(set(bench.asked))


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


def test_axes_shrink_to_the_time_there_is() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(128, 256, 3)), torch.zeros(1, 128, 18, 18)).graph
    full, whole = Axes((4, 8, 16, 32, 64), (16, 32, 64, 128, 256), (8, 16, 32, 64, 128)), LocalSize(64, 256, 128)
    known = Guess(graph["0"], LocalSize(4, 16, 128), 1e-3)
    seen = []
    for allowance_s in (1000.0, 10.0, 5.0, 2.0, 0.0):
        axes = choose_axes(full, whole, known, allowance_s, point_limit_s=1.5)
        seen.append(len(axes.sizes(whole)))
        assert cost_s(axes, whole, known) <= max(allowance_s, ENDS_STRETCHES * STRETCH_S)
        assert allowance_s < 2.0 or (axes.samples[-1], axes.outputs[-1]) == (64, 256)
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 2
    # What would take 25 s whole is timed up to a sixteenth, in both directions.
    axes = choose_axes(full, whole, replace(known, known_s=0.1), 60.0, point_limit_s=1.7)
    assert (axes.samples[-1], axes.outputs[-1], axes.inputs[-1]) == (16, 64, 32)
    assert choose_axes(full, whole, replace(known, known_s=10.0), 60.0, point_limit_s=1.5) == Axes((4,), (16,))


def test_samples_that_cost_next_to_nothing_are_timed() -> None:
    """A slow device timed a Linear of 4096 for 4 samples only, since 64 were thought to take sixteen times as long; the time
    went into reading the weights, and a small share of 64 samples was predicted twenty times too slow."""
    graph = trace(nn.Sequential(nn.Linear(4096, 4096)), torch.zeros(1, 4096)).graph
    full = full_axes(graph, graph["0"], 64)
    axes = choose_axes(full, whole_size(graph["0"], 64), Guess(graph["0"], LocalSize(4, 256, 4096), 0.01), 4.0)
    assert axes.samples[-1] == 64
    assert axes.outputs[-1] == 4096
    # By hand: reading 64 MB of weights against 4 MB, and 16 FLOP a byte of them at 64 samples do not count yet.
    guess = Guess(graph["0"], LocalSize(4, 256, 4096), 0.01)
    assert guess.seconds(LocalSize(4, 4096, 4096)) == pytest.approx(0.16, rel=0.05)
    assert guess.seconds(LocalSize(64, 4096, 4096)) < 0.6


def test_allowances_sum_to_the_budget() -> None:
    _, traced = traced_net("two-conv")
    names = [name for name in traced.graph.layers if name != "x"]
    shares = allowances(traced.graph, names, 60.0)
    assert sum(shares.values()) == pytest.approx(60.0)
    assert max(shares, key=lambda name: shares[name]) in ("conv1", "conv2")


def test_the_ends_of_each_axis_are_timed_where_no_time_is_left() -> None:
    """Beside other programs a layer seemed to take longer: its largest size was left away, and was concluded from 4 samples
    of 4 filters, eight times too long."""
    _, traced = traced_net("two-conv")
    layer = traced.graph["conv2"]
    whole = whole_size(layer, 64)
    full = full_axes(traced.graph, layer, 64)
    probe = LocalSize(full.samples[0], full.outputs[0], whole.inputs)
    part = shape_s(layer, probe) / shape_s(layer, whole)
    for largest_s in (3e-3, 9e-3):
        axes = choose_axes(full, whole, Guess(layer, probe, largest_s * part), allowance_s=0.0, stretch_s=1e-3)
        assert (axes.samples[-1], axes.outputs[-1]) == (64, whole.outputs), largest_s
