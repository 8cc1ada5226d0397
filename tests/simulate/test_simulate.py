"""The replay against timelines calculated by hand; comments show the numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

import convoy.plan.steps
from convoy.fleet import Device, Fleet, Host, NetworkSegment, Nic
from convoy.layout.layout import Layout, OnOne, Replicated, Split
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep, Move, Part, Phase, StepList, SumGradients, Value
from convoy.simulate.costs import Costs
from convoy.simulate.events import Event, Timeline
from convoy.simulate.network import Network, network_of, rates
from convoy.simulate.simulator import simulate
from tests.support.stacks import Stack

LAYER = Layer("work", "elementwise", (), (1,))
GRAPH = Graph("Hand", {"work": LAYER}, ("work",))


@dataclass(frozen=True)
class Table:
    """Seconds of a layer's whole part on a device, by device and phase."""

    seconds_of: Mapping[tuple[int, Phase], float]

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:  # noqa: ARG002
        return self.seconds_of[device, phase] / (1 if part == "all" else 2)

    def alike(self, device: int) -> int:
        return device


def hosts(count: int, bytes_per_s: float = 100.0, latency_s: float = 0.5, processor_s_per_byte: float = 0.0) -> Network:
    """Return one device per host, with equal NICs."""
    card = Nic(bytes_per_s, bytes_per_s, latency_s)
    fleet = Fleet(
        tuple(Host(f"h{i}") for i in range(count)),
        tuple(Device(f"d{i}", f"h{i}", "cpu") for i in range(count)),
        card,
    )
    return network_of(fleet, (processor_s_per_byte,) * count)


def work(number: int, devices: tuple[int, ...], phase: Phase = "forward", after: tuple[int, ...] = ()) -> ComputeStep:
    value = Value(f"v{number}", (1, 1), Replicated(devices))
    return ComputeStep(number, phase, "work", (value,), value, (True,), after=after)


def move(number: int, src: Layout, dst: Layout, entries: int) -> Move:
    """Return a move of a vector of `entries` one-byte numbers."""
    return Move(number, "forward", Value("a", (entries,), src), Value("b", (entries,), dst), "ring")


def replay(steps: list, devices: int, network: Network, seconds: Mapping[tuple[int, Phase], float]) -> Timeline:
    listed = StepList(1, devices, (), (), tuple(steps))
    return simulate(listed, GRAPH, Costs(Table(seconds), network, itemsize=1))


def spans(timeline: Timeline, device: int, activity: str) -> list[tuple[float, float]]:
    found = [e for e in timeline.events if (e.device, e.activity) == (device, activity)]
    return [(pytest.approx(e.start_s), pytest.approx(e.end_s)) for e in sorted(found, key=lambda e: e.start_s)]


def test_one_device_computes_sequentially():
    # forward 2 s, forward 2 s, backward 3 s.
    steps = [work(0, (0,)), work(1, (0,)), work(2, (0,), "backward")]
    timeline = replay(steps, 1, hosts(1), {(0, "forward"): 2.0, (0, "backward"): 3.0})
    assert spans(timeline, 0, "compute") == [(0, 2), (2, 4), (4, 7)]
    assert (timeline.step_s, timeline.compute_s, timeline.exchange_s) == (7.0, (7.0,), (0.0,))
    assert [e.label for e in timeline.events] == ["work forward", "work forward", "work backward"]


def test_one_message_waits_for_its_latency():
    # 200 bytes at 100 bytes/s after 0.5 s: under way from 0.5 to 2.5. The sender's kernel has them.
    timeline = replay([move(0, OnOne(0), OnOne(1), 200)], 2, hosts(2), {})
    assert timeline.events == (
        Event(0, "send", "Move 0", 0.5, 2.5, 0, peer=1, size_bytes=200),
        Event(1, "receive", "Move 0", 0.5, 2.5, 0, peer=0, size_bytes=200),
        Event(1, "wait", "end of forward", 0.0, 2.5, 1),
    )
    assert (timeline.step_s, timeline.exchange_s) == (2.5, (0.0, 2.5))


def test_sender_waits_when_the_send_buffer_is_full(monkeypatch):
    monkeypatch.setattr("convoy.simulate.simulator.HELD_BYTES", 199)
    timeline = replay([move(0, OnOne(0), OnOne(1), 200)], 2, hosts(2), {})
    assert timeline.exchange_s == (2.5, 2.5)


def test_a_message_arrives_while_its_receiver_computes():
    """100 bytes from 0 to 1 start at 1 + 0.5 and arrive at 2.5; device 1 computes until 4, then has them at once."""
    steps = [work(0, (0, 1)), move(1, OnOne(0), OnOne(1), 100), work(2, (1,), after=(1,))]
    timeline = replay(steps, 2, hosts(2), {(0, "forward"): 1.0, (1, "forward"): 4.0})
    assert spans(timeline, 1, "receive") == [(1.5, 2.5)]
    assert spans(timeline, 1, "compute") == [(0, 4), (4, 8)]
    assert timeline.exchange_s == (0.0, 0.0)


def test_two_senders_share_the_receivers_nic():
    """100 and 200 bytes into one NIC of 100 bytes/s, on the way from 0.5.

    Both at 50 bytes/s until the first has its 100 at 2.5; the other has 100 left, alone: 3.5. All 300 bytes in 3 s.
    """
    timeline = replay([move(0, Split(0, (0, 100, 200)), OnOne(0), 300)], 3, hosts(3), {})
    assert spans(timeline, 1, "send") == [(0.5, 2.5)]
    assert spans(timeline, 2, "send") == [(0.5, 3.5)]
    assert spans(timeline, 0, "receive") == [(0.5, 2.5), (0.5, 3.5)]
    assert timeline.exchange_s == pytest.approx((3.5, 0.0, 0.0))


def test_local_losses_are_combined_before_backward():
    """Forward takes 1 and 3 s; 16 bytes each way from 3.5 on, at 100 bytes/s: 3.66; then backward, 1 s. Not where none runs."""
    steps = [work(0, (0, 1)), work(1, (0, 1), "backward")]
    seconds = {(0, "forward"): 1.0, (1, "forward"): 3.0, (0, "backward"): 1.0, (1, "backward"): 1.0}
    costs = Costs(Table(seconds), hosts(2), itemsize=1)
    for layout, ends in (
        (Split(0, (1, 1)), 4.66),
        (OnOne(0), 4.66),
        (Replicated((0, 1)), 4.0),
        (Split(1, (1, 1)), 4.0),
    ):
        listed = StepList(2, 2, (), (Value("y", (2, 2), layout),), tuple(steps))
        assert simulate(listed, GRAPH, costs).step_s == pytest.approx(ends)
    timeline = simulate(replace(listed, outputs=(Value("y", (2,), Split(0, (1, 1))),), steps=(steps[0],)), GRAPH, costs)
    assert timeline.step_s == pytest.approx(3.0)


def test_ring_of_three_by_hand():
    """300 bytes: 2(p-1) = 4 rounds, each of 0.5 s latency and 100 bytes."""
    timeline = replay([SumGradients(0, ("w",), (300,), 0, (0, 1, 2), "ring")], 3, hosts(3), {})
    assert timeline.step_s == pytest.approx(4 * 1.5)
    for device in range(3):
        assert spans(timeline, device, "send") == [(at, at + 1) for at in (0.5, 2, 3.5, 5)]


def test_the_fast_device_waits_for_the_slow_one():
    """Device 0 computes 1 s, device 1 4 s. 100 bytes from 1 to 0 start when 1 is ready: 4.5 to 5.5; 1 goes on at once."""
    steps = [work(0, (0, 1)), move(1, OnOne(1), OnOne(0), 100), work(2, (0, 1), after=(1,))]
    timeline = replay(steps, 2, hosts(2), {(0, "forward"): 1.0, (1, "forward"): 4.0})
    assert spans(timeline, 0, "compute") == [(0, 1), (5.5, 6.5)]
    assert spans(timeline, 1, "compute") == [(0, 4), (4, 8)]
    # Waiting counts as exchanging: device 0 from 1 to 5.5.
    assert timeline.exchange_s == pytest.approx((4.5, 0.0))
    assert timeline.step_s == pytest.approx(8.0)


def test_cpu_cost_of_traffic_limits_it():
    """0.02 s of processor per byte: 50 bytes/s for one message, though the NIC has 100: 100 bytes take 2 s.

    Two messages into one device share its processor too: 25 bytes/s each, 100 bytes take 4 s.
    """
    network = hosts(3, processor_s_per_byte=0.02)
    one = replay([move(0, OnOne(0), OnOne(1), 100)], 3, network, {})
    assert one.step_s == pytest.approx(0.5 + 2)
    two = replay([move(0, Split(0, (0, 100, 100)), OnOne(0), 200)], 3, network, {})
    assert two.step_s == pytest.approx(0.5 + 4)


def test_traffic_within_a_host_does_not_use_the_nic():
    """Devices 0 and 1 on one host, 2 on another: 200 bytes at 400 bytes/s after 0.1 s."""
    network = replace(hosts(3), host=(0, 0, 1), within_bytes_per_s=(400.0,) * 2, pair_bytes_per_s=((400.0,) * 3,) * 3)
    network = replace(network, latency_s=((0.1,) * 3,) * 3)
    timeline = replay([move(0, OnOne(0), OnOne(1), 200)], 3, network, {})
    assert timeline.step_s == pytest.approx(0.1 + 0.5)


def test_slow_link_leaves_nic_bandwidth_to_others():
    """Device 0 sends to 1 at 20 bytes/s and to 2: the NIC's other 80 bytes/s go to 2 (max-min fairness)."""
    slow = hosts(3)
    pair = [list(row) for row in slow.pair_bytes_per_s]
    pair[0][1] = 20.0
    network = replace(slow, pair_bytes_per_s=tuple(map(tuple, pair)))
    assert rates(network, [(0, 1), (0, 2)]) == pytest.approx([20.0, 80.0])
    # 80 bytes each: device 2 has its own at 1.5; device 1 after 4 s.
    timeline = replay([move(0, OnOne(0), Replicated((1, 2)), 80)], 3, network, {})
    assert spans(timeline, 2, "receive") == [(0.5, 1.5)]
    assert spans(timeline, 1, "receive") == [(0.5, 4.5)]


def two_segments() -> Network:
    """Hosts 0 and 1 in a segment whose uplink carries 40 bytes/s out and 80 in after 1 s more; host 2 in another of 50 out and
    60 in; host 3 where both uplinks end. Cards of 100 bytes/s, 0.5 s."""
    card = Nic(100.0, 100.0, 0.5)
    names = ("h0", "h1", "h2", "h3")
    segments = (
        NetworkSegment("a", ("h0", "h1"), Nic(40.0, 80.0, 1.0)),
        NetworkSegment("b", ("h2",), Nic(50.0, 60.0, 0.0)),
    )
    devices = tuple(Device(f"d{name}", name, "cpu") for name in names)
    return network_of(Fleet(tuple(map(Host, names)), devices, card, segments=segments))


def test_messages_that_cross_an_uplink_share_it():
    """Within a segment the cards count. Two messages that leave segment a have 20 bytes/s each; one from b to the host outside
    shares no uplink with them, but the NIC there."""
    network = two_segments()
    assert rates(network, [(0, 1)]) == pytest.approx([100.0])
    assert rates(network, [(0, 2), (1, 3)]) == pytest.approx([20.0, 20.0])
    assert rates(network, [(0, 3), (1, 3), (2, 3)]) == pytest.approx([20.0, 20.0, 50.0])
    assert rates(network, [(2, 0), (2, 1), (3, 1)]) == pytest.approx([25.0, 25.0, 30.0])
    assert network.latency_s[0][2] == pytest.approx(1.5)
    assert network.pair_bytes_per_s[3][2] == 60.0
    timeline = replay([move(0, Split(0, (100, 100, 0, 0)), OnOne(3), 200)], 4, network, {})
    assert timeline.step_s == pytest.approx(1.5 + 200 / 40)


def test_filter_split_of_unequal_devices_by_hand():
    """1x2x2 images, one convolution of 3 filters, two on device 0 and one on device 1; ReLU; batch 5, master plan.

    Seconds per part: convolution forward 2 (device 0) and 3 (device 1), backward 4 and 6; ReLU, on device 0 only, 1 and 1.
    Bytes of one: filter outputs of device 1, 5*1*4 = 20, at 100 bytes/s: 0.2 s after 0.5 s.

    0-2 | 0-3   convolutions; device 0 waits
    3-3.7       the outputs of device 1 to device 0
    3.7-4.7     ReLU
    4.7-5.8     the outputs to device 1, as copies: 5*3*4 = 60 bytes, 0.6 s after 0.5 s
    4.7-5.7     ReLU backward beside it (the loss takes no time, and device 0 has all outputs)
    5.7-6.4     the gradient of device 1's filters: 20 bytes behind the outputs, which have left by then
    5.7-9.7 | 6.4-12.4    convolutions backward
    9.7-9.9 | 12.4-12.5   the optimizer, 0.01 s an entry: 2*9 + 2 = 20 entries, and 10
    """
    graph = Stack((1, 2, 2)).conv(3, 3).graph()

    @dataclass(frozen=True)
    class Times:
        def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
            assert part == "all"
            if layer.kind == "conv":
                assert size == LocalSize(5, (2, 1)[device], 1)
                return {"forward": (2.0, 3.0), "backward": (4.0, 6.0)}[phase][device]
            assert (device, size.outputs) == (0, 3)
            return 1.0

        def alike(self, device: int) -> int:
            return device

    plan = named_plan("master", graph, 5, Speeds((3.0, 2.0)))
    costs = Costs(Times(), hosts(2), itemsize=1, update_s_per_entry=(0.01, 0.01))
    timeline = simulate(lower(plan, graph), graph, costs)
    assert spans(timeline, 0, "compute") == [(0, 2), (3.7, 4.7), (4.7, 5.7), (5.7, 9.7), (9.7, 9.9)]
    assert spans(timeline, 1, "compute") == [(0, 3), (6.4, 12.4), (12.4, 12.5)]
    assert spans(timeline, 1, "send") == [(3.5, 3.7)]
    assert spans(timeline, 0, "send") == [(5.2, 5.8), (6.2, 6.4)]
    assert timeline.step_s == pytest.approx(12.5)
    assert timeline.compute_s == pytest.approx((8.2, 9.1))
    # Device 0 waits 2 to 3.7; device 1 waits 3 to 5.8 for the outputs, and to 6.4 for the gradient.
    assert timeline.exchange_s == pytest.approx((1.7, 3.4))


# --- overlap ---------------------------------------------------------------------------------------------------------


def test_reader_waits_for_its_input():
    """The same with computations of 1 s: the reader starts when the message arrives, at 1.5."""
    steps = [move(0, OnOne(0), OnOne(1), 100), work(1, (0, 1)), work(2, (1,), after=(0,))]
    timeline = replay(steps, 2, hosts(2), {(0, "forward"): 1.0, (1, "forward"): 1.0})
    assert spans(timeline, 1, "compute") == [(0, 1), (1.5, 2.5)]
    assert spans(timeline, 1, "wait") == [(1, 1.5)]
    assert spans(timeline, 0, "wait") == []


def test_without_overlap_moves_are_awaited_in_place():
    steps = [move(0, OnOne(0), OnOne(1), 100), work(1, (0, 1)), work(2, (1,), after=(0,))]
    costs = Costs(Table({(0, "forward"): 4.0, (1, "forward"): 4.0}), hosts(2), itemsize=1)
    timeline = simulate(StepList(1, 2, (), (), tuple(steps)), GRAPH, costs, overlap=False)
    assert spans(timeline, 1, "compute") == [(1.5, 5.5), (5.5, 9.5)]


def test_all_reduce_overlaps_with_backward():
    """200 bytes on two devices: rounds 0.5-1.5 and 2-3 beside 10 s of backward; a second sum then has 10.5-11.5, 12-13."""
    sums = [SumGradients(i, (f"w{i}",), (200,), 0, (0, 1), "ring") for i in (0, 2)]
    steps = [sums[0], work(1, (0, 1), "backward"), sums[1]]
    timeline = replay(steps, 2, hosts(2), {(0, "backward"): 10.0, (1, "backward"): 10.0})
    assert spans(timeline, 0, "compute") == [(0, 10)]
    assert spans(timeline, 0, "send") == [(0.5, 1.5), (2, 3), (10.5, 11.5), (12, 13)]
    assert timeline.exchange_s == pytest.approx((3.0, 3.0))


def test_large_all_reduce_uses_two_segments(monkeypatch):
    """200 bytes on two devices, as two sums of 100 in turns: messages of 50 bytes, 0.5 s each, one behind the other.

    The second round of a segment begins when its first has arrived: at 1, and at 1.5; 0.5 s later its bytes flow.
    """
    monkeypatch.setattr(convoy.plan.steps, "SEGMENT_ENTRIES", 100)
    timeline = replay([SumGradients(0, ("w",), (200,), 0, (0, 1), "ring")], 2, hosts(2), {})
    for device in range(2):
        assert spans(timeline, device, "send") == [(0.5, 1), (1, 1.5), (1.5, 2), (2, 2.5)]


def test_messages_from_one_device_to_another_share_one_connection():
    """Two moves of 100 bytes from 0 to 1 at once: 0.5-1.5, then 1.5-2.5; the latencies of both are over by then."""
    steps = [move(0, OnOne(0), OnOne(1), 100), move(1, OnOne(0), OnOne(1), 100)]
    timeline = replay(steps, 2, hosts(2), {})
    assert spans(timeline, 1, "receive") == [(0.5, 1.5), (1.5, 2.5)]


def jittery(network: Network, *jitter_s: float) -> Network:
    return replace(network, jitter_s=jitter_s)


def test_a_device_that_computed_is_late_for_an_exchange():
    """Both compute 2 s; 100 bytes take 1 s behind 0.5 s of latency. Who is 0.75 s late sends from 3.25 to 4.25, who is 0.25 s
    late until 3.75; a receiver that comes 2 s late has them at 4."""
    steps = [work(0, (0, 1)), move(1, OnOne(0), OnOne(1), 100), work(2, (1,), after=(1,))]
    seconds = {(0, "forward"): 2.0, (1, "forward"): 2.0}
    for jitter_s, sent, begins_s in (((0.75, 0.25), (3.25, 4.25), 4.25), ((0.25, 2.0), (2.75, 3.75), 4.0)):
        timeline = replay(steps, 2, jittery(hosts(2), *jitter_s), seconds)
        assert spans(timeline, 0, "send") == [sent]
        assert spans(timeline, 1, "compute") == [(0, 2), (begins_s, begins_s + 2)]
    # Nobody is later than it computed: 0.5 s here, of a jitter of 9.
    short = replay(steps, 2, jittery(hosts(2), 9.0, 0.0), {(0, "forward"): 0.5, (1, "forward"): 0.5})
    assert spans(short, 0, "send") == [(1.5, 2.5)]


def test_only_the_first_round_after_computing_is_late():
    """2 s of computing, then a ring of two: two rounds of 1.5 s. Late by 0.25 once, since who waited is awake."""
    steps = [work(0, (0, 1), "backward"), SumGradients(1, ("w",), (200,), 0, (0, 1), "ring")]
    seconds = {(0, "backward"): 2.0, (1, "backward"): 2.0}
    timeline = replay(steps, 2, jittery(hosts(2), 0.25, 0.25), seconds)
    assert spans(timeline, 0, "send") == [(2.75, 3.75), (4.25, 5.25)]


def test_traffic_slows_computing():
    """0.004 s of processor per byte, 100 bytes/s: 0.4 of a processor, 1.25 s of computing take 0.5 + 1 + 0.15 s.

    0.5 s alone before the message; 1 s at 0.6 of the speed while it is under way; the last 0.15 s alone.
    """
    steps = [move(0, OnOne(0), OnOne(1), 100), work(1, (0, 1))]
    timeline = replay(steps, 2, hosts(2, processor_s_per_byte=0.004), {(0, "forward"): 1.25, (1, "forward"): 1.25})
    assert spans(timeline, 0, "compute") == [(0, 1.65)]
    assert spans(timeline, 0, "send") == [(0.5, 1.5)]


def test_traffic_uses_at_most_half_of_a_busy_processor():
    """0.02 s per byte would be twice a processor: it gets half, 25 bytes/s, until the computing is done at 0.5 + 2 * 1 s.

    By then 50 of 100 bytes are there; the others go at 50 bytes/s, 1 s.
    """
    steps = [move(0, OnOne(0), OnOne(1), 100), work(1, (0, 1))]
    timeline = replay(steps, 2, hosts(2, processor_s_per_byte=0.02), {(0, "forward"): 1.5, (1, "forward"): 1.5})
    assert spans(timeline, 0, "compute") == [(0, 2.5)]
    assert spans(timeline, 0, "send") == [(0.5, 3.5)]


def test_layer_starts_with_the_first_input_chunk():
    """4 samples of 100 bytes from 0 to both, in 2 pieces of 200: 0.5-2.5 and 2.5-4.5. A piece computes 3 s: 2.5-5.5-8.5."""
    moved = Move(
        0, "forward", Value("a", (4, 100), OnOne(0)), Value("b", (4, 100), Replicated((0, 1))), "ring", chunks=2
    )
    made = Value("y", (4, 1), Replicated((0, 1)))
    layer = ComputeStep(1, "forward", "work", (moved.writes,), made, (False,), after=(0,), chunks=2)
    timeline = replay([moved, layer], 2, hosts(2), {(0, "forward"): 3.0, (1, "forward"): 3.0})
    assert spans(timeline, 1, "receive") == [(0.5, 2.5), (2.5, 4.5)]
    assert spans(timeline, 1, "compute") == [(2.5, 5.5), (5.5, 8.5)]
    assert timeline.step_s == pytest.approx(8.5)


def test_long_step_ends_despite_float_resolution():
    """Story: with layers of millions of seconds a message of microseconds ended later than the clock could show, and never."""
    steps = [work(0, (0, 1)), *(move(i, OnOne(0), OnOne(1), 1) for i in (1, 2, 3)), work(4, (0, 1), after=(3,))]
    steps[1:4] = [replace(each, after=(0,)) for each in steps[1:4]]
    network = hosts(2, bytes_per_s=3e9, latency_s=1e-7, processor_s_per_byte=1e-11)
    timeline = replay(steps, 2, network, {(0, "forward"): 1e9 / 3, (1, "forward"): 1e9 / 7})
    assert timeline.step_s == pytest.approx(2e9 / 3)
