"""The lower bound: by hand, against every plan of small cases, and its distance to good plans."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Graph
from convoy.plan.device_program import whole_size
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Sharding, Strategy
from convoy.planner.planner import candidates
from convoy.simulate.compute import Correction, Grid, LayerTimes, MeasuredTimes, Rate, Roofline
from convoy.simulate.costs import Costs, Overheads
from convoy.simulate.network import Network
from convoy.simulate.simulator import simulate
from lab.lower_bound import lower_bound
from tests.support.described_fleets import asked
from tests.support.slow import most_slow
from tests.support.stacks import Stack


def network(devices: int, bytes_per_s: float, processor_s_per_byte: float = 0.0) -> Network:
    every = (bytes_per_s,) * devices
    return Network(
        tuple(range(devices)), every, every, every, ((1e-5,) * devices,) * devices, (every,) * devices,
        (processor_s_per_byte,) * devices,
    )  # fmt: skip


def of_rates(rates: list[float], bytes_per_s: float, processor_s_per_byte: float = 0.0) -> Costs:
    times = Roofline(tuple(Rate(rate, rate / 4) for rate in rates))
    overheads = tuple(Overheads(step_s=1e5 / rate, layer_s=1e3 / rate, loss_s_per_byte=100 / rate) for rate in rates)
    updates = tuple(10 / rate for rate in rates)
    return Costs(times, network(len(rates), bytes_per_s, processor_s_per_byte), 4, updates, overheads)


def measured(rng: random.Random, graph: Graph, batch: int, rates: list[float], bytes_per_s: float) -> Costs:
    """Return noisy tables, some of which end early, with extra timed sizes."""

    def table(rate: float) -> dict[str, LayerTimes]:
        roofline, rows = Roofline((Rate(rate, rate / 4),)), {}
        for layer in graph.layers.values():
            if layer.kind != "input":
                whole = whole_size(layer, batch)
                points = sorted({1, batch // rng.choice([1, 2]), max(1, batch // 4)})

                def grid(
                    phase: str, axis: str, total: int, samples: list[int] = points, layer=layer, whole=whole
                ) -> Grid:  # type: ignore[no-untyped-def]
                    others = tuple(sorted({1, max(1, total // 3), max(1, total // rng.choice([1, 2]))}))
                    rows = tuple(
                        tuple(
                            roofline.seconds(0, layer, phase, replace(whole, samples=n, **{axis: m}))
                            * rng.uniform(0.8, 1.3)  # type: ignore[arg-type]
                            for m in others
                        )
                        for n in samples
                    )
                    return Grid(tuple(samples), others, rows, axis)  # type: ignore[arg-type]

                def shared(phase: str, layer=layer, whole=whole) -> Grid:  # type: ignore[no-untyped-def]
                    counts = tuple(sorted({1, max(1, batch // 3), batch}))
                    sizes = (replace(whole, samples=n, shares_statistics=True) for n in counts)
                    seconds = (roofline.seconds(0, layer, phase, size) * rng.uniform(0.8, 1.3) for size in sizes)  # type: ignore[arg-type]
                    return Grid(counts, (whole.outputs,), tuple((each,) for each in seconds))

                sums = layer.weighted
                corrections = []
                if rng.random() < 0.5:
                    size = replace(whole, samples=rng.randint(1, batch))
                    seconds = [
                        roofline.seconds(0, layer, phase, size) * rng.uniform(0.7, 1.3)
                        for phase in ("forward", "backward")
                    ]  # type: ignore[arg-type]
                    corrections = [Correction(size, *seconds)]
                rows[layer.name] = LayerTimes(
                    grid("forward", "outputs", whole.outputs), grid("backward", "outputs", whole.outputs),
                    grid("forward", "inputs", whole.inputs) if sums else None,
                    grid("backward", "inputs", whole.inputs) if sums else None,
                    *(shared("forward"), shared("backward")) if layer.statistics and rng.random() < 0.7 else (None, None),
                    corrections=tuple(corrections),
                )  # fmt: skip
        return rows

    base = of_rates(rates, bytes_per_s)
    return replace(base, times=MeasuredTimes(tuple(table(rate) for rate in rates)))


def shares_of(rng: random.Random, total: int, speeds: list[float]) -> Shares:
    """Draw shares: by speed, or any, often with zeros."""
    if rng.random() < 0.4:
        return apportion(total, speeds)
    weights = [rng.choice([0.0, 0.1, 1.0, 3.0]) for _ in speeds]
    return apportion(total, weights if any(weights) else speeds)


def some_plans(rng: random.Random, graph: Graph, batch: int, speeds: list[float]) -> Iterator[Plan]:
    """Yield every combination of strategies, with random shares, collectives, chunks and sharding."""
    devices = len(speeds)
    for kinds in itertools.product(("batch", "one", "filter", "channel"), repeat=len(graph.weighted)):
        for _ in range(3):
            by_batch = Batch(shares_of(rng, batch, speeds))
            layers: dict[str, Strategy] = {}
            for kind, layer in zip(kinds, graph.weighted, strict=True):
                layers[layer.name] = {
                    "batch": by_batch,
                    "one": One(rng.randrange(devices)),
                    "filter": Filter(shares_of(rng, layer.channels_out, speeds)),
                    "channel": Channel(shares_of(rng, layer.channels_in, speeds)),
                }[kind]
            plan = Plan(
                "by hand", graph.fingerprint, devices, batch, layers, by_batch, rng.choice(("direct", "ring", "star"))
            )
            copied = [name for name, strategy in layers.items() if isinstance(strategy, Batch) and rng.random() < 0.5]
            how = Sharding(shares_of(rng, 100, speeds), rng.choice(("keep", "free")))
            yield replace(plan, chunks=rng.choice((1, 1, 2)), sharded=dict.fromkeys(copied, how))


def small(rng: random.Random) -> Graph:
    """Draw a chain of two or three weighted layers, few or many samples, small or large weights."""
    stack = Stack((rng.choice([3, 16]), 12, 12)).conv(rng.choice([4, 32]), 3).pool()
    if rng.random() < 0.6:
        stack = stack.conv(rng.choice([8, 64]), 3)
    return stack.flatten().linear(rng.choice([10, 200])).graph()


@pytest.mark.parametrize("case", most_slow(1, [2, 1, 0, *range(3, 12)]))
def test_no_plan_beats_the_lower_bound(case: int) -> None:
    rng = random.Random(case)
    graph, batch = small(rng), rng.choice([4, 12])
    rates = [rng.choice([1e9, 2e9, 5e9, 1e10]) for _ in range(rng.choice([2, 3]))]
    wire = rng.choice([1e4, 1e5, 1e6, 1e7, 1e9])
    costs = of_rates(rates, wire, rng.choice([0.0, 1e-7])) if case % 2 else measured(rng, graph, batch, rates, wire)
    bound = lower_bound(asked(graph, batch, costs))
    least_s = min(simulate(lower(plan, graph), graph, costs).step_s for plan in some_plans(rng, graph, batch, rates))
    found_s = candidates(asked(graph, batch, costs))[0].step_s
    assert bound.step_s <= min(least_s, found_s) * (1 + 1e-9)
    assert bound.step_s > 0


def test_a_single_layer_by_hand() -> None:
    """Devices of 3 and 1 GFLOP/s together take a fourth of the slow one's time."""
    graph = Stack((8, 8, 8)).conv(16, 3).graph()
    flop = 3 * 64 * graph.weighted[0].flop  # forward, and two products backward
    times = Roofline((Rate(3e9, 1e15), Rate(1e9, 1e15)))
    assert lower_bound(asked(graph, 64, Costs(times, network(2, 1e15)))).step_s == pytest.approx(flop / 4e9, rel=1e-3)


def test_loss_time_is_split_with_its_outputs() -> None:
    """16 samples of 1,000 outputs, 1 and 3 s for each byte of them: together 0.75 s."""
    graph = Stack((1000,)).linear(1000).graph()
    plain = Costs(Roofline((Rate(1e9, 1e15),) * 2), network(2, 1e15))
    costs = replace(plain, overheads=(Overheads(loss_s_per_byte=1.0), Overheads(loss_s_per_byte=3.0)))
    assert lower_bound(asked(graph, 16, costs)).step_s == pytest.approx(16 * 1000 * 4 * 0.75, rel=1e-3)


def test_traffic_bound_of_a_device_by_hand() -> None:
    """Three Linears of 1,000 x 1,000, 16 samples, two equal devices, a wire of 1 MB/s each way.

    A device takes 6e6 FLOP for a sample of each: 96 ms of 16 samples at 1 GFLOP/s, so alone 288 ms, and two of them 144 ms. For
    that, 16,000 entries go through the NIC at least once: 32 ms. At 10 GFLOP/s that is more than the 28.8 ms of one device
    alone; without a message a part of the first Linear is given away, at most 9.6 ms of 28.8.
    """
    graph = Stack((1000,)).linear(1000).linear(1000).linear(1000).graph()

    def bound_of(rate: float) -> float:
        return lower_bound(asked(graph, 16, Costs(Roofline((Rate(rate, 1e15),) * 2), network(2, 1e6)))).step_s

    assert bound_of(1e9) == pytest.approx(0.144, rel=0.01)
    assert bound_of(1e10) == pytest.approx(0.0192, rel=0.02)  # computing alone: 14.4 ms
