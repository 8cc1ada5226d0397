"""Measuring: what is timed, that a synthetic fleet is found again, and a real one across processes."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.app.measure import MeasureJob, run_measure
from convoy.comm.group import AloneGroup, Arrived, Group, Message, Pending
from convoy.comm.threads import run_on_threads
from convoy.config.run_file import resolve_settings
from convoy.cost.table import LayerPoint, Measurement, layer_times, read_fleet_file
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.fleet import Card, Device, Fleet, Host
from convoy.model.graph import Layer
from convoy.model.tracing import TracedModel, disable_in_place, trace
from convoy.plan.lower import lower
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.size import LocalSize, whole_size
from convoy.profile import overheads, timing
from convoy.profile.axes import Axes, Guess, allowances, choose_axes, cost_s, full_axes, granule
from convoy.profile.describe import Own, fit, fleet_of, host_indices, spreads, with_wire
from convoy.profile.job import Partial, measure_job
from convoy.profile.layers import Bench, Point, SharedStatistics, piece
from convoy.profile.links import WireTimes, measure_links, meetings, processor_share
from convoy.profile.speeds import measure_speeds
from convoy.profile.timing import Piece, Times, time_piece
from convoy.report.measured import show
from convoy.runtime.clock import Clock
from convoy.simulator.simulate import simulate
from tests.support import nets
from tests.support.processes import on_processes

CPU = torch.device("cpu")
QUICK_S = 1e-4


def traced_net(name: str) -> tuple[nn.Module, TracedModel]:
    model = nets.NETS[name]()
    return model, trace(model, torch.randn(4, *getattr(model, "shape", (3, 8, 8))))


def quick_bench(model: nn.Module, traced: TracedModel, batch: int = 8) -> Bench:
    return Bench(traced, model, batch, Clock(CPU), CPU, stretch_s=QUICK_S)


# --- pieces and tables -----------------------------------------------------------------------------------------------


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
        assert (times.forward_inputs is not None) == (layer.weighted and layer.groups == 1 and layer.channels_in > 1)
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

    def note(part: Piece, *_: Any) -> Times:
        timed.append((type(part.run).__name__, part.samples))
        return Times(1.0, 1.0, 0.0)

    monkeypatch.setattr("convoy.profile.layers.time_piece", note)
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
        assert cost_s(axes, whole, known) <= max(allowance_s, 1.4)
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


# --- repeats ---------------------------------------------------------------------------------------------------------


class Processor:
    """A clock that only computing moves on; under a quota it computes in bursts: so long in each period, then a pause."""

    def __init__(self, quota: float = 1.0, period_s: float = 0.01) -> None:
        self.used_s, self.quota, self.period_s = 0.0037, quota, period_s

    def now(self) -> float:
        burst_s = self.quota * self.period_s
        periods = int(self.used_s / burst_s)
        return periods * self.period_s + (self.used_s - periods * burst_s)


class FakeRun:
    """Arithmetic that takes the time it is told."""

    def __init__(self, processor: Processor, forward_s: float, backward_s: float) -> None:
        self.processor, self.forward_s, self.backward_s = processor, forward_s, backward_s

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:  # noqa: ARG002
        self.processor.used_s += self.forward_s
        return None, None

    def backward(self, saved: Any, g: Any, wants: Sequence[bool]) -> Any:  # noqa: ARG002
        self.processor.used_s += self.backward_s


@pytest.mark.parametrize("forward_s", [1e-5, 3e-4, 2e-3, 0.07])
@pytest.mark.parametrize("times_backward", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("quota", [1.0, 0.5, 0.2])
def test_bursts_of_a_quota_are_averaged(quota: float, times_backward: float, forward_s: float) -> None:
    """Each phase meets its part of the pauses, also where it is much shorter than the other one."""
    processor = Processor(quota)
    run = FakeRun(processor, forward_s, times_backward * forward_s)
    times = time_piece(Piece("layer", run, [], 1, (), True, 0), Clock(CPU), processor.now)
    slack = 1e-9 if quota == 1.0 else 0.25
    assert times.forward_s == pytest.approx(forward_s / quota, rel=slack)
    assert times.backward_s == pytest.approx(times_backward * forward_s / quota, rel=slack)
    assert processor.used_s / quota > 0.1


def test_a_long_call_runs_twice_and_the_faster_counts() -> None:
    processor = Processor()
    run = FakeRun(processor, 1.0, 2.0)
    assert time_piece(Piece("layer", run, [], 1, (), True, 0), Clock(CPU), processor.now).both_s == pytest.approx(3.0)
    assert processor.used_s == pytest.approx(6.0, abs=0.01)


def test_no_backward_where_no_gradient_comes() -> None:
    processor = Processor()
    times = time_piece(Piece("l", FakeRun(processor, 1e-3, 5.0), [], 1, (), None, 0), Clock(CPU), processor.now)
    assert times.backward_s == 0
    assert times.forward_s == pytest.approx(1e-3)


def test_the_optimizer_takes_time_per_entry() -> None:
    per_entry_s, spread = timing.time_update(CPU, timing.device_now(CPU), 1e-3, entries=10_000)
    assert 0 < per_entry_s < 1e-3
    assert spread >= 0


def test_overheads_are_what_a_step_takes_beside_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose step takes 100 ms, and 10 for each activation; of these its arithmetic takes 4.

    Flatten takes 1 ms, the Linear 2, the optimizer 3 for each of its two tensors. A round takes 5 ms and 0.4 for each peer,
    of whom each sends and is sent a message; the processor takes 0.7 ms for one, of which a latency holds a half.
    """
    processor = Processor()

    def taking(seconds: Callable[[int], float]) -> Callable[..., Callable[[], None]]:
        def build(count: Any, *_: Any) -> Callable[[], None]:
            each_s = seconds(count if isinstance(count, int) else 0)

            def work() -> None:
                processor.used_s += each_s

            return work

        return build

    monkeypatch.setattr(overheads, "_training", taking(lambda n: 0.1 + 0.01 * n))
    monkeypatch.setattr(overheads, "_optimizer", taking(lambda n: 0.008 + 0.003 * n))
    monkeypatch.setattr(overheads, "_round", taking(lambda n: 0.005 + 0.0004 * n))
    monkeypatch.setattr(overheads, "_copy", taking(lambda _: 0.02))
    monkeypatch.setattr(overheads, "_add", taking(lambda _: 0.03))
    monkeypatch.setattr(overheads, "_fresh_s_per_byte", lambda *_: 0.5)
    layers = {"flatten": 0.001, "linear": 0.002, "elementwise": 0.004}
    monkeypatch.setattr(overheads, "_layer_s", lambda kind, *_: layers[kind])
    found = overheads.measure_overheads(CPU, processor.now, 0.02, message_s=0.0007, share=0.5)
    assert found.layer_s == pytest.approx(0.006)
    assert found.step_s == pytest.approx(0.1 - 0.001 - 0.002 - 2 * 0.006 - 2 * 0.003)
    assert found.update_s_per_tensor == pytest.approx(0.003)
    assert found.round_s == pytest.approx(0.005 + 0.0009 - 0.00035)
    assert found.message_s == pytest.approx(0.0007 + 0.0002)
    assert found.copy_s_per_byte == pytest.approx(0.02 / overheads.COPIED_BYTES)
    assert found.add_s_per_byte == pytest.approx(0.03 / overheads.COPIED_BYTES)
    assert found.fresh_s_per_byte == 0.5


def test_overheads_of_this_machine_are_small_and_there() -> None:
    found = overheads.measure_overheads(CPU, timing.device_now(CPU), QUICK_S, message_s=1e-4)
    assert 1e-5 < found.step_s < 0.5
    assert 1e-4 <= found.message_s < 0.1
    for name in ("layer_s", "round_s", "update_s_per_tensor", "fresh_s_per_byte"):
        assert 0 <= getattr(found, name) < 0.1
    assert 0 < found.copy_s_per_byte < 1e-6
    assert 0 < found.add_s_per_byte < 1e-6


@pytest.mark.parametrize("quota", [1.0, 0.2])
def test_what_is_repeated_meets_its_part_of_the_pauses(quota: float) -> None:
    processor = Processor(quota)

    def work() -> None:
        processor.used_s += 3e-4

    found = timing.repeated(work, processor.now)
    assert timing.typical(found.each_s) == pytest.approx(3e-4 / quota, rel=1e-9 if quota == 1.0 else 0.25)
    assert found.total_s >= 0.1


def test_under_a_quota_seconds_are_processor_time_over_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a processor: 3 s of it take 12 s. Other devices, and slept slow-downs, are timed by the clock."""
    monkeypatch.setattr(timing.time, "process_time", lambda: 3.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 7.0)
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: 1)
    assert timing.quota_now(CPU, 0.25)() == 12.0
    assert timing.quota_now(CPU, 0.25, slowdown=2.0)() == 7.0
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: 2)
    assert timing.quota_now(CPU, 0.25)() == 7.0


def test_a_processor_has_a_share_of_itself() -> None:
    assert 0 < processor_share(0.01) <= 1


# --- links -----------------------------------------------------------------------------------------------------------


class Net:
    """The wire of a synthetic fleet: cards of hosts, a rate within hosts, a latency, processor time per byte."""

    def __init__(self, host: Sequence[int], send: Sequence[float], receive: Sequence[float]) -> None:
        self.host, self.send, self.receive = host, send, receive
        self.within = 1e9
        self.out_s_per_byte = [1e-10 * (d + 1) for d in range(len(host))]
        self.in_s_per_byte = [3e-10 * (d + 1) for d in range(len(host))]

    def latency_s(self, a: int, b: int) -> float:
        return 1e-5 if self.host[a] == self.host[b] else 1e-4 * (1 + self.host[a] + self.host[b])


class TimedGroup:
    """A group whose exchanges take computed time: both ends ready, the latency, then the fullest of pair and cards."""

    def __init__(self, inner: Group, net: Net) -> None:
        self.inner, self.net = inner, net
        self.device, self.devices, self.torch_device = inner.device, inner.devices, inner.torch_device
        self.timeout_s = inner.timeout_s
        self.time_s = self.processor_s = 0.0

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:  # noqa: ARG002
        net, me = self.net, self.device
        out = sum(size_of(m) for m in sends if net.host[m.peer] != net.host[me]) / net.send[net.host[me]]
        into = sum(size_of(m) for m in receives if net.host[m.peer] != net.host[me]) / net.receive[net.host[me]]
        note = torch.tensor([self.time_s, out, into], dtype=torch.float64)
        peers = sorted({message.peer for message in (*sends, *receives)})
        notes = {peer: torch.zeros(3, dtype=torch.float64) for peer in peers}
        self.inner.exchange([Message(p, note) for p in peers], [Message(p, n) for p, n in notes.items()])
        ends = [self.time_s]
        for message, leaves in [*((m, True) for m in sends), *((m, False) for m in receives)]:
            ready_s, their_out, their_in = notes[message.peer].tolist()
            ways = (out, their_in) if leaves else (their_out, into)
            alone = size_of(message) / net.within if net.host[message.peer] == net.host[me] else 0.0
            ends.append(max(self.time_s, ready_s) + net.latency_s(me, message.peer) + max(alone, *ways))
            cost = (net.out_s_per_byte if leaves else net.in_s_per_byte)[me]
            self.processor_s += cost * size_of(message)
        self.inner.exchange(sends, receives)
        self.time_s = max(ends)
        return Arrived()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.start(sends, receives).wait()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        return self.inner.agree(topic, text)


def size_of(message: Message) -> int:
    return message.tensor.numel() * message.tensor.element_size()


def measured_wire(net: Net, share: float = 1.0, budget_s: float = 20.0) -> WireTimes:
    def work(group: Group) -> WireTimes:
        timed = TimedGroup(group, net)
        now: Callable[[], float] = lambda: timed.time_s  # noqa: E731
        return measure_links(timed, net.host, share, budget_s=budget_s, now=now, processor=lambda: timed.processor_s)  # type: ignore[arg-type]

    answers = run_on_threads(len(net.host), work, timeout_s=60.0)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


class SlowToAnswer(Net):
    """A fast wire with a long latency, such as devices under a quota have."""

    def latency_s(self, a: int, b: int) -> float:
        return 0.02 * (a != b)


def test_a_link_that_answers_late_is_not_taken_for_a_slow_one() -> None:
    """Story: on eight devices a message of 1 KB took longer than the time for one link allowed, and larger ones were left out;
    by that one message a link of 120 MB/s had 0.14 MB/s, and a step of 2.3 s was predicted to take 209 s."""
    net = SlowToAnswer(host=[0, 1, 2], send=[50e6] * 3, receive=[50e6] * 3)

    wire = measured_wire(net, budget_s=4.0)
    assert [pair.bytes_per_s for pair in wire.pairs] == pytest.approx([50e6] * 6, rel=0.01)
    assert [pair.latency_s for pair in wire.pairs] == pytest.approx([0.02] * 6, rel=0.01)


class Pausing(Net):
    """A fast wire between devices that pause: every message but the third meets 0.03 s in which its device may not compute."""

    def __init__(self, host: Sequence[int], send: Sequence[float], receive: Sequence[float]) -> None:
        super().__init__(host, send, receive)
        self.messages = dict.fromkeys(range(len(host)), 0)

    def latency_s(self, a: int, b: int) -> float:
        if a == b:
            return 0.0
        self.messages[a] += 1
        return 1e-4 if self.messages[a] % 3 == 0 else 0.03


def test_the_pauses_of_a_small_quota_are_not_taken_for_bytes() -> None:
    """Story: eight devices, the slowest with 0.08 of a core, 0.14 s for each link: 2.2 s a step were predicted to take 281 s.
    The likely cause is played here: between two small sizes the median of a few messages catches a pause, the link seems slow,
    and no larger message is sent."""
    net = Pausing(host=list(range(8)), send=[100e6] * 8, receive=[100e6] * 8)

    wire = measured_wire(net, budget_s=8.0)
    assert min(pair.bytes_per_s for pair in wire.pairs) > 20e6


def test_a_synthetic_wire_is_found_again() -> None:
    """Three hosts, the last one with a slow card; the first one has two devices."""
    net = Net(host=[0, 0, 1, 2], send=[100e6, 80e6, 10e6], receive=[100e6, 90e6, 20e6])
    wire = measured_wire(net, share=0.5)
    found = {(pair.source, pair.target): pair for pair in wire.pairs}
    assert set(found) == {(0, 2), (2, 0), (0, 3), (3, 0), (2, 3), (3, 2), (0, 1), (1, 0)}
    for (a, b), pair in found.items():
        between = min(net.send[net.host[a]], net.receive[net.host[b]])
        assert pair.bytes_per_s == pytest.approx(net.within if net.host[a] == net.host[b] else between, rel=1e-6)
        assert pair.latency_s == pytest.approx(net.latency_s(a, b), rel=1e-6)
        assert pair.bandwidth_spread == pytest.approx(0, abs=1e-6)
    # Alone, each link carries a whole card; all at once, they share it. The slow card's peers do not hide the fast ones.
    for card in wire.cards:
        feeding = sum(net.send[h] for h in range(3) if h != card.host)
        assert card.send_bytes_per_s == pytest.approx(net.send[card.host], rel=0.02)
        assert card.receive_bytes_per_s == pytest.approx(min(net.receive[card.host], feeding), rel=0.02)
    assert wire.cards[2].ring_bytes_per_s == pytest.approx(10e6, rel=0.02)
    for device, traffic in enumerate(wire.traffic):
        assert traffic.send_s_per_byte == pytest.approx(net.out_s_per_byte[device] / 0.5, rel=1e-4)
        assert traffic.receive_s_per_byte == pytest.approx(net.in_s_per_byte[device] / 0.5, rel=1e-4)
        # A message of 1 KiB and its answer of 8 bytes are two; this device is now at one end, now at the other.
        ends = (net.out_s_per_byte[device], net.in_s_per_byte[device])
        low, high = ((each * 1024 + other * 8) / 2 / 0.5 for each, other in (ends, ends[::-1]))
        assert low < traffic.message_s < high


def test_links_without_a_shared_card_show_as_a_faster_card() -> None:
    """Two slow hosts behind a fast card: what it sends to both at once is more than either link alone."""
    wire = measured_wire(Net(host=[0, 1, 2], send=[50e6, 10e6, 10e6], receive=[50e6, 10e6, 10e6]))
    assert max(pair.bytes_per_s for pair in wire.pairs) == pytest.approx(10e6, rel=1e-6)
    assert wire.cards[0].send_bytes_per_s == pytest.approx(20e6, rel=0.02)
    fleet = with_wire(Fleet(tuple(map(Host, "abc")), tuple(Device(n, n, "cpu") for n in "abc"), Card(1, 1, 0)), wire)
    assert fleet.card("a").send_bytes_per_s == pytest.approx(20e6, rel=0.02)
    assert fleet.path("a", "b").bandwidth_bytes_per_s == pytest.approx(10e6, rel=1e-6)


def test_a_slow_link_is_not_measured_for_long() -> None:
    net = Net(host=[0, 1], send=[2e4, 2e4], receive=[2e4, 2e4])
    clocks: list[float] = []

    def work(group: Group) -> WireTimes:
        timed = TimedGroup(group, net)
        wire = measure_links(
            timed, net.host, 1.0, budget_s=4.0, now=lambda: timed.time_s, processor=lambda: timed.processor_s  # type: ignore[arg-type]
        )  # fmt: skip
        clocks.append(timed.time_s)
        return wire

    wire = run_on_threads(2, work, timeout_s=30.0)[0]
    assert wire.pairs[0].bytes_per_s == pytest.approx(2e4, rel=0.02)
    assert max(clocks) < 10


def test_everybody_meets_everybody_once() -> None:
    pairs, speakers = meetings([0, 1, 1, 2, 0])
    assert speakers == [0, 1, 3]
    assert pairs == [(0, 1), (0, 3), (1, 3), (1, 2), (0, 4)]
    assert meetings([0]) == ([], [0])


# --- the fleet of a job ----------------------------------------------------------------------------------------------

ROWS = [
    Own("attic.lan", "m1", "cpu", 4, 8_000_000_000, 1.0),
    Own("attic.lan", "m1", "cpu", 4, 8_000_000_000, 2.0),
    Own("attic.lan", "m1", "cuda", None, 6_000_000_000, 1.0),
    Own("attic", "m2", "cpu", 2, 4_000_000_000, 1.0),
    Own("-_-", "m3", "cpu", 2, 4_000_000_000, 1.0),
]


def test_devices_describe_their_fleet() -> None:
    fleet = fleet_of(ROWS)
    assert [host.name for host in fleet.hosts] == ["attic", "attic-1", "host"]
    assert [d.name for d in fleet.devices] == ["attic-cpu0", "attic-cpu1", "attic-cuda0", "attic-1-cpu0", "host-cpu0"]
    assert [d.memory_bytes for d in fleet.devices[:3]] == [4_000_000_000, 4_000_000_000, 6_000_000_000]
    assert fleet.devices[1].slowdown == 2.0
    assert host_indices(fleet) == (0, 0, 0, 1, 2)
    with pytest.raises(InputError, match="kind 'hpu'"):
        fleet_of([replace(ROWS[0], kind="hpu")])


def test_a_fleet_file_must_be_the_fleet_of_the_job() -> None:
    fleet = fleet_of(ROWS)
    assert fit(fleet, ROWS) == fleet
    assert fit(fleet, [replace(ROWS[0], slowdown=3.0), *ROWS[1:]]).devices[0].slowdown == 3.0
    with pytest.raises(InputError, match=r"5 devices, this job has 4"):
        fit(fleet, ROWS[:4])
    with pytest.raises(InputError, match=r"device 3 .* is cpu in the fleet file, but computes on cuda"):
        fit(fleet, [*ROWS[:3], replace(ROWS[3], kind="cuda"), ROWS[4]])
    with pytest.raises(InputError, match="on two hosts in the fleet file"):
        fit(fleet, [*ROWS[:4], replace(ROWS[4], machine="m1")])


# --- the whole job ---------------------------------------------------------------------------------------------------


def measure_alone(partial: Path | None, progress: Callable[[str, int, int], None] = lambda *_: None) -> Measurement:
    model, traced = traced_net("two-conv")
    with AloneGroup(CPU) as group:
        return measure_job(
            group, traced, model, 8, net="two-conv", partial=partial, progress=progress, budget_s=1.0, stretch_s=QUICK_S
        )


def test_a_replay_of_every_plan_runs_on_what_was_measured() -> None:
    measured = measure_alone(None)
    assert Measurement.from_toml(measured.to_toml()) == measured
    _, traced = traced_net("two-conv")
    costs = measured.costs(traced.graph)
    for plan in PLANS:
        steps = lower(named_plan(plan, traced.graph, 8, Speeds((1.0,))), traced.graph)
        assert 0 < simulate(steps, traced.graph, costs).step_s < 10
    console = Console(record=True, width=80, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(measured, console)
    shown = console.export_text()
    assert "conv2" in shown
    assert measured.fleet.devices[0].name in shown


class Types(TorchDispatchMode):
    """Remembers in which types a kernel was called."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.seen = names, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in self.names:
            self.seen.add(args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_layers_are_timed_in_the_precision_that_they_train_in(precision: str, dtype: torch.dtype) -> None:
    """A bf16 training was planned by times of float32, though devices differ in what they gain."""
    model, traced = traced_net("two-conv")
    kernels = ("convolution", "convolution_backward", "addmm", "mm")
    with AloneGroup(CPU) as group, Types(*kernels) as types:
        Bench(traced, model, 4, Clock(CPU), CPU, stretch_s=1e-5, precision=precision).measure("conv2", 0.1)
        assert types.seen == {dtype}
        measure_speeds(group, traced, model, 4, Clock(CPU), precision)
    assert types.seen == {dtype}


def test_the_file_says_the_precision_and_an_older_one_was_float32() -> None:
    model, traced = traced_net("two-conv")
    with AloneGroup(CPU) as group:
        measured = measure_job(
            group, traced, model, 4, net="two-conv", budget_s=0.1, stretch_s=1e-5, precision="bf16"
        )  # fmt: skip
    text = measured.to_toml()
    assert Measurement.from_toml(text).precision == "bf16"
    assert Measurement.from_toml(text.replace('precision = "bf16"\n', "")).precision == "float32"


def test_devices_with_different_precisions_are_refused() -> None:
    model, traced = traced_net("two-conv")
    with pytest.raises(MismatchError, match="float32 on device 0, but bf16 on device 1"):
        run_on_threads(
            2,
            lambda group: measure_speeds(group, traced, model, 4, Clock(CPU), ("float32", "bf16")[group.device]),
            timeout_s=30.0,
        )


def test_an_interrupted_measuring_goes_on_where_it_was(tmp_path: Path) -> None:
    partial = tmp_path / "fleet.toml.partial"

    def interrupt(_what: str, done: int, _total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_alone(partial, interrupt)
    kept = [json.loads(line) for line in partial.read_text().splitlines()][1:]
    assert len(kept) == 3
    # A run that was killed may leave a part of a line.
    partial.write_text(partial.read_text() + '["half a l')
    told: list[tuple[str, int]] = []
    measured = measure_alone(partial, lambda what, done, _: told.append((what, done)))
    assert told[0][1] == 3
    assert not {f"layer {layer}" for layer, _ in kept} & {what for what, _ in told}
    for layer, rows in kept:
        again = [p for p in measured.layer if p.layer == layer]
        found = [[p.samples, p.outputs, p.inputs, p.forward_s, p.backward_s, p.spread, p.shared] for p in again]
        assert found == rows[0]
    assert not partial.exists()


def test_tables_of_another_job_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "p"
    Partial(path, {"model": "a", "devices": [1, 2]}).add(
        "conv", [[[1, 2, 3, 0.1, 0.2, 0.0]], [[1, 2, 3, 0.1, 0.2, 0.0]]]
    )
    assert set(Partial(path, {"model": "a", "devices": [1, 2]}).tables) == {"conv"}
    assert Partial(path, {"model": "b", "devices": [1, 2]}).tables == {}
    with pytest.raises(InputError, match="cannot write"):
        Partial(tmp_path / "absent" / "p", {"devices": []})


def measure_on_threads(fleets: Sequence[Fleet | None]) -> list[Measurement]:
    def work(group: Group) -> Measurement:
        model, traced = traced_net("two-conv")
        return measure_job(
            group, traced, model, 4, net="two-conv", fleet=fleets[group.device], budget_s=0.1, links_budget_s=0.2,
            stretch_s=1e-5,
        )  # fmt: skip

    return run_on_threads(len(fleets), work, timeout_s=30.0)


def test_devices_with_different_fleet_files_are_refused() -> None:
    fleet = Fleet((Host("a"),), (Device("x", "a", "cpu"), Device("y", "a", "cpu")))
    with pytest.raises(MismatchError, match="another fleet than device 0"):
        measure_on_threads([fleet, None])


def job_of(output: Path, fleet: Path | None = None, **changes: Any) -> MeasureJob:
    given = {"net": "two-conv:1:1", "devices": "cpu,cpu", "batch": 1, "slowdown": "1,3", "budget_s": 1.0} | changes
    return MeasureJob(output, resolve_settings(None, given).settings, fleet)


def measure_command(_device: int, output: str) -> None:
    torch.set_num_threads(1)
    run_measure(job_of(Path(output)))


def test_two_processes_measure_themselves_and_write_a_file(tmp_path: Path) -> None:
    output = tmp_path / "fleet.toml"
    output.write_text("older")
    on_processes(2, "tests.profile.test_measure:measure_command", str(output), joined=False)
    fleet, measured = read_fleet_file(output)
    assert measured is not None
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.toml"]
    assert [device.slowdown for device in fleet.devices] == [1.0, 3.0]
    (link,) = fleet.links
    assert link.source == link.target
    assert 1e6 < link.bandwidth_bytes_per_s < 1e12
    assert 0 < link.latency_s < 5
    for costs in measured.device:
        assert 0 < costs.processor_s_per_byte < 1e-6
        assert 0 < costs.update_s_per_entry < 1e-6
    job_of(output, fleet=output).check_inputs()


def test_an_interruption_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> Measurement:
        raise KeyboardInterrupt

    output = tmp_path / "fleet.toml"
    output.write_text("older")
    monkeypatch.setattr("convoy.app.measure.measure_job", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_measure(job_of(output, devices="cpu", slowdown="1"))
    assert output.read_text() == "older"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceLostError(1, "device 1 was lost")])
def test_whoever_is_cut_off_learns_that_nothing_measured_is_lost(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "fleet.toml", devices="cpu", slowdown="1")
    kept: list[str] = []

    def cut_off(*_: Any, partial: Path, **__: Any) -> Measurement:
        rows = Partial(partial, {"devices": [1]})
        for layer in kept:
            rows.add(layer, [[[1, 2, 3, 0.1, 0.2, 0.0, 0]]])
        raise error

    monkeypatch.setattr("convoy.app.measure.measure_job", cut_off)
    for layers in ([], ["conv1", "conv2"]):
        kept[:] = layers
        with pytest.raises(type(error)):
            run_measure(job)
        said = capsys.readouterr().out
        assert ("goes on" in said) == bool(kept)
    assert "2 layers are measured and kept in" in said
    assert "fleet.toml.partial" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "mnist"}, "unknown data set 'mnist'"),
        ({"batch": 0}, "--batch 0"),
        ({"precision": "half"}, "--precision 'half': choose one of bf16, float32, fp16"),
        ({"precision": "fp16"}, "--precision fp16 on a CPU"),
        ({"image_size": 32}, "--image-size 32 with --data digits: only images of a folder are resized"),
        ({"budget_s": 0.0}, "--budget 0"),
        ({"timeout_s": float("inf")}, "--timeout inf"),
        ({"slowdown": "1"}, "--slowdown 1"),
        ({"slowdown": "1,0.5"}, "--slowdown 1,0.5"),
        ({"net": "two-cone"}, "unknown net 'two-cone'"),
        ({"output": Path("absent/fleet.toml")}, "does not exist"),
        ({"output": Path()}, "is a folder"),
        ({"fleet": Path("absent.toml")}, "absent.toml"),
        ({"devices": "cpu", "slowdown": "1", "fleet": Path("two.toml")}, "--devices 1, but the fleet file has 2"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_before_anything_starts(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Fleet((Host("a"),), (Device("x", "a", "cpu"), Device("y", "a", "cpu")))
    (tmp_path / "two.toml").write_text(two.to_toml())
    for name in ("output", "fleet"):
        if name in changes and changes[name] != Path():
            changes = changes | {name: tmp_path / changes[name]}
    monkeypatch.delenv("CONVOY_FLEET", raising=False)
    with pytest.raises(InputError, match=message):
        job_of(**{"output": tmp_path / "fleet.toml"} | changes).check_inputs()


def test_a_rehearsal_names_its_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Fleet((Host("a"),), (Device("x", "a", "cpu"), Device("y", "a", "cpu")))
    (tmp_path / "two.toml").write_text(two.to_toml())
    monkeypatch.setenv("CONVOY_FLEET", str(tmp_path / "two.toml"))
    assert job_of(tmp_path / "out.toml").read_fleet() == two
    monkeypatch.delenv("CONVOY_FLEET")
    assert job_of(tmp_path / "out.toml").read_fleet() is None


def test_cards_and_links_take_the_place_of_the_described_ones() -> None:
    wire = measured_wire(Net(host=[0, 1], send=[50e6, 20e6], receive=[40e6, 30e6]))
    described = Fleet(tuple(map(Host, "ab")), tuple(Device(n, n, "cpu") for n in "ab"), Card(1, 1, 0))
    fleet = with_wire(described, wire)
    assert fleet.network is None
    assert fleet.path("a", "b").bandwidth_bytes_per_s == pytest.approx(30e6)
    assert fleet.path("b", "a").bandwidth_bytes_per_s == pytest.approx(20e6)
    assert fleet.card("a").latency_s == pytest.approx(2e-4)
    links, hosts = spreads(fleet, wire)
    assert [(link.source, link.target) for link in links] == [("a", "b"), ("b", "a")]
    assert [host.host for host in hosts] == ["a", "b"]
