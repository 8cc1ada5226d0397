"""Step costs beyond layers: copies and a replay by hand, and synchronised batch norms."""

from dataclasses import replace

import pytest

from convoy.layout.layout import Layout, OnOne, Replicated, Split
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import LocalSize, Unpack, local_size
from convoy.plan.exchange_program import is_block
from convoy.plan.steps import ComputeStep, Move, StepList, SumGradients, Value
from convoy.planner.analytic import CostModel
from convoy.simulate.compute import Grid, LayerTimes, MeasuredTimes
from convoy.simulate.costs import FRESH_BYTES, Costs, Handling, Overheads
from convoy.simulate.simulator import simulate
from tests.simulate.test_simulate import GRAPH, Table, hosts, spans, work
from tests.support.described_fleets import asked
from tests.support.device_programs import handled, messages, program_of

EVERYONE = Replicated((0, 1))
SHAPE = (5, 3, 2, 2)


def move(src: Layout, dst: Layout, phase: str = "forward") -> Move:
    return Move(0, phase, Value("a", SHAPE, src), Value("b", SHAPE, dst), "ring")  # type: ignore[arg-type]


def test_channel_gather_copies_non_contiguous_blocks() -> None:
    """Device 0 holds 2 of 3 channels, 40 of 60 entries, sent unchanged. The other 20 are received separately."""
    step = move(Split(1, (2, 1)), EVERYONE)
    assert handled(step, 0) == [(Handling(), Handling(copied=40 + 20, made=(60, 20)))]
    assert handled(step, 1) == [(Handling(), Handling(copied=20 + 40, made=(60, 40)))]
    assert messages(step, 0) == [2]


def test_backward_slices_adds_and_zero_fills() -> None:
    """Each device has a summand of all 60 entries and keeps its own channels."""
    step = move(EVERYONE, Split(1, (2, 1)), "backward")
    before, after = handled(step, 0)[0]
    assert before == Handling(copied=20, made=(20,))
    assert after == Handling(copied=40, added=40 + 40, made=(40, 40))
    before, after = handled(step, 1)[0]
    assert (before.copied, after.added) == (40, 20 + 20)


@pytest.mark.parametrize(
    ("part", "block"),
    [
        (((0, 5), (0, 3)), True), (((1, 3), (0, 3)), True), (((0, 5), (0, 2)), False), (((1, 2), (0, 2)), True),
        (((4, 5), (1, 2)), True),
    ],
)  # fmt: skip
def test_contiguous_blocks_are_recognised(part: tuple[tuple[int, int], ...], block: bool) -> None:
    assert is_block(part, ((0, 5), (0, 3))) is block


SUM = SumGradients(1, ("a", "b"), (60, 40), 0, (0, 1), "ring")


def given_memory(step: SumGradients, device: int) -> list[tuple[int, ...]]:
    """Return the gradients that get new memory at the end of the step."""
    return [op.sizes for op in program_of(step, device).backward if isinstance(op, Unpack) and op.copied]


def test_a_ring_of_two_joins_adds_a_half_and_gives_each_gradient_its_own_memory() -> None:
    joined = Handling(copied=100, made=(100,))
    # The half that arrives lands where that of the last training step did.
    assert handled(SUM, 0) == [(joined, Handling(added=50)), (Handling(), Handling())]
    assert messages(SUM, 0) == [2, 2]
    assert given_memory(SUM, 1) == [(60, 40)]
    assert given_memory(replace(SUM, keys=("a",), sizes=(100,)), 0) == []
    assert given_memory(SUM, 2) == []


def test_only_large_tensors_allocate_new_memory() -> None:
    overhead = Overheads(copy_s_per_byte=2.0, add_s_per_byte=3.0, fresh_s_per_byte=0.5)
    large = FRESH_BYTES // 4 + 1
    assert overhead.handling_s(Handling(copied=5, added=7), 4) == 4 * (5 * 2 + 7 * 3)
    assert overhead.handling_s(Handling(made=(large, FRESH_BYTES // 4)), 4) == 4 * large * 0.5


HAND = Overheads(
    step_s=3.0, layer_s=0.5, round_s=0.15, message_s=0.05, copy_s_per_byte=0.01, add_s_per_byte=0.02,
    update_s_per_tensor=0.125,
)  # fmt: skip


def timeline(steps: list, overhead: Overheads = HAND, graph: Graph = GRAPH):
    table = Table({(d, phase): 1.0 for d in (0, 1) for phase in ("forward", "backward")})
    costs = Costs(table, hosts(2), itemsize=1, overheads=(overhead,) * 2)
    return simulate(StepList(1, 2, (), (), tuple(steps)), graph, costs)


def test_a_sum_of_gradients_by_hand() -> None:
    """Bytes of one; 100 bytes/s after 0.5 s.

    0-1.25      the layer: 1 s and half of 0.5
    1.25-2.45   a round's 0.15, 0.05 for its second message, 100 bytes joined at 0.01
    2.45-3.45   50 bytes each way
    3.45-4.45   50 bytes added at 0.02
    4.45-4.65   the second round's calls
    4.65-5.65   50 bytes each way
    5.65-9.65   each gradient its own memory: 100 bytes at 0.01; 3 s of the step
    """
    found = timeline([work(0, (0, 1)), SUM])
    assert spans(found, 0, "compute") == [(0, 1.25), (1.25, 2.45), (3.45, 4.45), (4.45, 4.65), (5.65, 9.65)]
    assert spans(found, 0, "send") == [(2.95, 3.45), (5.15, 5.65)]
    assert found.step_s == pytest.approx(9.65)
    # The other lane calls, sends and adds; the device's own lane waits for all of it, 2.45 to 5.65.
    assert found.exchange_s == pytest.approx((3.2, 3.2))


@pytest.mark.parametrize(("queue_s", "step_s", "whole_s"), [(0.1, 1.5, 2.0), (0.6, 1.5, 2.7), (0.6, 0.0, 2.0)])
def test_host_and_device_of_an_accelerator_work_at_once(queue_s: float, step_s: float, whole_s: float) -> None:
    """Forward and backward take the device 1 s each, and its host `queue_s` each and `step_s`. Without a wait the longer sum
    counts, once: the predictions for an H200 were 17 to 29 % too long by the host's calls."""
    overhead = replace(HAND, step_s=step_s, layer_s=0.0, queue_s=queue_s)
    steps = [work(0, (0, 1)), work(1, (0, 1), "backward")]
    assert timeline(steps, overhead).step_s == pytest.approx(whole_s)


def test_host_of_an_accelerator_runs_ahead_into_the_next_step() -> None:
    """The host takes 6 s for both layers, 0.2 for calls before the wait for the sum, 1 after it; the device 2, 1 and 1 s.
    Its first layer waits 3.2 s. In the sum, another thread's calls take 0.2 s while the device adds for 1 s."""
    steps = [work(0, (0, 1)), work(2, (0, 1), "backward"), replace(SUM, id=3)]
    found = timeline(steps, replace(HAND, layer_s=0.0, queue_s=3.0, step_s=1.0))
    assert spans(found, 0, "compute")[:3] == [(0, 4.2), (4.2, 5.2), (5.2, 6.2)]
    assert found.step_s == pytest.approx(6.2 + 1 + 1 + 1 + 1)


def test_the_batch_is_loaded_and_every_parameter_updated() -> None:
    """40 bytes of the batch twice through memory at 0.01; two tensors of 0.125 s, 6 and 2 entries of 0.001 s."""
    from convoy.model.graph import Parameter

    owned = {"weight": Parameter("w", (6, 1), True), "bias": Parameter("b", (2,), True)}
    graph = Graph("Net", {"work": Layer("work", "elementwise", (), (1,), owned)}, ("work",))
    step = replace(work(0, (0, 1)), parameters={"weight": Replicated((0,)), "bias": Replicated((0, 1))})
    inputs = (Value("x", (10, 4), Split(0, (10, 0))),)
    costs = Costs(
        Table({(d, "forward"): 1.0 for d in (0, 1)}), hosts(2), 1, update_s_per_entry=(0.001,) * 2, overheads=(HAND,) * 2
    )  # fmt: skip
    found = simulate(StepList(10, 2, inputs, (), (step,)), graph, costs)
    assert spans(found, 0, "compute") == [(0, 1.25), (1.25, 1.25 + 0.258), (1.508, 1.508 + 3 + 0.8)]
    assert spans(found, 1, "compute") == [(0, 1.25), (1.25, 1.25 + 0.127), (1.377, 1.377 + 3)]


def test_loss_uses_local_outputs_between_forward_and_backward() -> None:
    """60 bytes at 0.02; where outputs stay, 36 of them and 24, and then two messages' calls and half a second of latency."""
    overhead = replace(HAND, step_s=0.0, loss_s_per_byte=0.02)
    table = Table({(d, phase): 1.0 for d in (0, 1) for phase in ("forward", "backward")})
    costs = Costs(table, hosts(2), itemsize=1, overheads=(overhead,) * 2)

    def replay(layout: Layout, *layers: ComputeStep) -> list[list[tuple[float, float]]]:
        steps = StepList(5, 2, (), (Value("v", SHAPE, layout),), layers)
        return [spans(simulate(steps, GRAPH, costs), d, "compute") for d in (0, 1)]

    forward, backward = work(0, (0,)), work(1, (0,), "backward")
    # Device 1 computes no layer, and the loss all the same.
    assert replay(EVERYONE, forward, backward) == [[(0, 1.25), (1.25, 2.45), (2.45, 3.7)], [(0, 1.2)]]
    assert replay(EVERYONE, forward) == [[(0, 1.25)], []]  # without backward there is no loss
    (first, own, calls, _), (other, _) = replay(Split(0, (3, 2)), forward, backward)
    assert (first, own, calls[0]) == ((0, 1.25), (1.25, 1.25 + 0.72), 1.97)
    assert other == (0, 0.48)


def test_gradient_of_two_readers_is_added_once() -> None:
    """Before the gradient is read, 8 entries are added at 0.02: 0.16 s."""
    value = Value("x", (2, 4), EVERYONE)
    readers = [ComputeStep(n, "backward", "work", (value,), Value(f"y{n}", (2, 4), EVERYONE), (True,)) for n in (0, 1)]
    unwanted = replace(readers[1], id=2, wants=(False,))
    made = ComputeStep(3, "backward", "work", (), value, ())
    found = timeline([*readers, unwanted, made], replace(HAND, step_s=0.0))
    assert spans(found, 0, "compute") == [(0, 1.25), (1.25, 2.5), (2.5, 3.75), (3.75, 3.91), (3.91, 5.16)]


# --- batch norm ------------------------------------------------------------------------------------------------------

NORM = Layer("bn", "batch_norm", ("x",), (3, 2, 2), statistics=True)


def normed(layout: Layout, layer: Layer = NORM) -> LocalSize | None:
    value = Value("bn", SHAPE, layout)
    return local_size(ComputeStep(0, "forward", "bn", (value,), value, (True,)), layer, 0)


def test_split_batches_synchronise_statistics() -> None:
    assert normed(Split(0, (3, 2))) == LocalSize(3, 3, 3, shares_statistics=True)
    assert normed(Split(0, (5, 0))) == LocalSize(5, 3, 3)
    assert normed(Split(1, (2, 1))) == LocalSize(5, 2, 3)
    assert normed(OnOne(0)) == normed(EVERYONE) == LocalSize(5, 3, 3)
    assert normed(Split(0, (3, 2)), replace(NORM, statistics=False)) == LocalSize(3, 3, 3)


def grid(seconds: float) -> Grid:
    """Return a grid with this many seconds per sample."""
    return Grid((1, 2), (3,), ((seconds,), (2 * seconds,)))


def test_synchronised_statistics_have_their_own_times() -> None:
    times = LayerTimes(grid(1.0), grid(2.0), forward_shared=grid(10.0), backward_shared=grid(20.0))
    shared, alone = LocalSize(2, 3, 3, shares_statistics=True), LocalSize(2, 3, 3)
    assert (times.seconds(NORM, "forward", shared), times.seconds(NORM, "backward", shared)) == (20.0, 40.0)
    assert (times.seconds(NORM, "forward", alone), times.seconds(NORM, "backward", alone)) == (2.0, 4.0)
    # A part of the samples means that others have the rest.
    graph = Graph("Norm", {"x": Layer("x", "input", (), (3, 2, 2)), "bn": NORM}, ("bn",))
    request = asked(graph, 4, Costs(MeasuredTimes(({"bn": times},)), hosts(1), overheads=(HAND,)))
    model = CostModel(request)
    assert model.layer_s(NORM, 0, LocalSize(4, 3, 3)) == pytest.approx(4 * 1.0 + 0.25)  # nothing in it is trained
    assert model.layer_s(NORM, 0, LocalSize(2, 3, 3)) == pytest.approx(2 * 10.0 + 0.25)
    assert request.alone_s(0) == pytest.approx(4 * 1.0 + 0.5 + 3.0), "alone, all layers are one segment"
