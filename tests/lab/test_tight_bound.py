"""The relaxations of the tighter lower bound: by hand, and against plans."""

import itertools
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor, nn

from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Split, holders
from convoy.layout.shares import Shares
from convoy.model.graph import Graph
from convoy.model.nets import graph_without_weights
from convoy.plan.lower import lower
from convoy.plan.placing import placements
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.simulator import simulate
from lab.bound_shares import PLACES, Sums
from lab.bound_wire import Kinds, path_of, wire_s
from lab.share_places import STEPS, square
from lab.tight_bound import tight_bound
from tests.lab.test_lower_bound import Block, network, of_rates
from tests.support.plan_requests import asked
from tests.support.slow import most_slow
from tests.support.stacks import Stack


class Normed(nn.Module):
    """Consecutive convolutions, each with its norm, and a Linear."""

    def __init__(self, width: int, convolutions: int) -> None:
        super().__init__()
        widths = itertools.pairwise([3, *[width] * convolutions])
        rows = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths]
        self.layers, self.head = nn.Sequential(*itertools.chain(*rows)), nn.Linear(width, 10)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x_NCHW).mean((2, 3)))
        return out


def sixteenths(rng: random.Random, total: int, devices: int) -> Shares:
    """Return multiples of a sixteenth, often zero for some device."""
    cuts = sorted(rng.choice([0, 4, 8, 12, 16, rng.randrange(17)]) for _ in range(devices - 1))
    return tuple((b - a) * total // 16 for a, b in itertools.pairwise([0, *cuts, 16]))


def place_of(layout: Layout, device: int) -> int:
    """Return the place of a layer for this layout."""
    if isinstance(layout, Replicated):
        return PLACES.copies
    if isinstance(layout, OnOne | Partial):
        return int(device in holders(layout))
    assert isinstance(layout, Split)
    share = STEPS * layout.shares[device] // sum(layout.shares)
    return {0: 0, STEPS: 1}.get(share, (PLACES.features if layout.axis else PLACES.samples).start + share)


@pytest.mark.parametrize("case", most_slow(8, range(60)))
def test_no_plan_beats_the_relaxed_bound(case: int) -> None:
    """Check chain, device and NIC separately, for plans whose shares are places, on message-bound networks."""
    rng = random.Random(case)
    width, batch, devices = rng.choice([16, 32]), 16, rng.choice([2, 2, 3, 4])
    make = rng.choice([lambda: Normed(width, 3), lambda: Block(width, normed=True), lambda: Block(width, normed=False)])
    graph = graph_without_weights(make, (3, 8, 8))
    rates = [rng.choice([1e9, 2e9, 5e9]) for _ in range(devices)]
    alone_s = 3 * batch * sum(layer.flop for layer in graph.weighted) / max(rates)
    costs = of_rates(rates, batch * width * 64 * 4 / alone_s * rng.choice([0.03, 0.3, 3.0, 30.0]))
    kinds, groups = Kinds.of(graph, batch, costs, 1), path_of(graph, batch, costs)
    assert groups is not None
    path = [layer for group in groups for layer in group]
    sums = [Sums(graph, batch, costs, kinds, device, 4, 1) for device in range(devices)]
    for _ in range(12):
        by_samples, layers = Batch(sixteenths(rng, batch, devices)), dict[str, Strategy]()
        for layer in graph.layers.values():
            choices: list[Strategy] = [by_samples, One(rng.randrange(devices))]
            if layer.weighted or layer.shape[0] % 16 == 0:
                filters = layer.channels_out if layer.weighted else layer.shape[0]
                choices += [Filter(sixteenths(rng, filters, devices))] * (filters % 16 == 0)
            if layer.weighted and layer.channels_in % 16 == 0:
                choices.append(Channel(sixteenths(rng, layer.channels_in, devices)))
            if layer.kind != "input" and (layer.weighted or rng.random() < 0.4):
                layers[layer.name] = rng.choice(choices)
        plan = Plan(
            "by hand", graph.fingerprint, devices, batch, layers, by_samples, rng.choice(("direct", "ring", "star"))
        )
        plan = replace(plan, chunks=rng.choice((1, 4)))
        step_s = simulate(lower(plan, graph), graph, costs).step_s
        placed = placements(plan, graph)
        for device, each in enumerate(sums):
            places = [place_of(placed[layer.name].gives, device) for layer in path]
            for index, layer in enumerate(path):
                strategy = layers.get(layer.name)
                if isinstance(strategy, Channel) and 0 < strategy.shares[device] < sum(strategy.shares):
                    share = STEPS * strategy.shares[device] // sum(strategy.shares)
                    places[index] = PLACES.channels.start + share
            total = sum(np.array(each.of_layer(layer))[:, place] for layer, place in zip(path, places, strict=True))
            for (source, layer), (before, after) in zip(
                itertools.pairwise(path), itertools.pairwise(places), strict=True
            ):
                waited_s, passed_s = each.waited_s(source, layer), each.passed_s(source, layer)
                total += np.array([waited_s[before, after], 0.0, passed_s[before, after]])
            assert (total <= step_s * (1 + 1e-9)).all(), (total, step_s, places, plan.layers)


def test_last_device_at_a_norm_pays_for_the_messages() -> None:
    """A chain pays a second of latency, forward and backward, where it changes device: 2 x (1 - x) times."""
    graph = graph_without_weights(lambda: Normed(4, 1), (3, 8, 8))
    (norm,) = (layer for layer in graph.layers.values() if layer.statistics)

    def chain(latency_s: float) -> npt.NDArray[np.float64]:
        slow = replace(network(3, 1e8), latency_s=((latency_s,) * 3,) * 3)
        costs = Costs(Roofline((Rate(1e9, 1e9),) * 3), slow)
        found, *_ = Sums(graph, 8, costs, Kinds.of(graph, 8, costs, 1), 0, 4, 1).of_layer(norm)
        return found

    paid = chain(1.0) - chain(0.0)
    share = PLACES.share[PLACES.samples]
    assert paid[PLACES.samples] == pytest.approx(4 * share * (1 - share))
    assert paid.sum() == pytest.approx(paid[PLACES.samples].sum())


@pytest.mark.parametrize("seed", range(3))
def test_random_rounding_costs_nothing_on_average(seed: int) -> None:
    """What the places rest on, with one number for samples, and one for features and channels."""
    rng = np.random.default_rng(seed)
    draws = (np.arange(4000) + 0.5) / 4000
    for x, y in rng.uniform(size=(40, 2)):
        same = [np.floor(STEPS * share + draws) / STEPS for share in (x, y)]
        other = [same[0], np.floor(STEPS * y + rng.permutation(draws)) / STEPS]

        def mean(values: npt.NDArray[np.float64]) -> float:
            return float(values.mean())

        assert mean(np.abs(same[0] - same[1])) == pytest.approx(abs(x - y), abs=1e-3)
        assert mean(square(np.abs(same[0] - same[1]), STEPS)) <= (x - y) ** 2 + 1e-3
        for a, b in (same, other):
            here, there = square(a, STEPS), square(1 - b, STEPS)
            assert mean(here) <= x**2 + 1e-4
            assert mean(a * there) <= x * (1 - y) ** 2 + 2e-3
            assert mean(here * (1 - b)) <= x**2 * (1 - y) + 2e-3
        assert mean(square(other[0], STEPS) * square(1 - other[1], STEPS)) <= (x * (1 - y)) ** 2 + 2e-3
        assert mean(same[0] ** 2) - 1 / (2 * STEPS) ** 2 <= x**2 + 1e-4


def by_the_wire(graph: Graph, batch: int, costs: Costs) -> float:
    """Return the bound without the relation between shares of consecutive layers."""
    kinds, path = Kinds.of(graph, batch, costs, 1), path_of(graph, batch, costs)
    assert path is not None
    found = (wire_s(graph, batch, costs, path, kinds, d, costs.itemsize, 1) for d in range(costs.network.devices))
    return max(tight_bound(asked(graph, batch, costs)).compute_s, *found)


def test_waiting_devices_by_hand() -> None:
    """Four Linears of 1,000 x 1,000, 16 samples, two equal devices of 5 GFLOP/s: 19.2 ms for each on one device.

    By a wide wire all are shared: 38.4 ms. By 300 kB/s no tensor of 64 kB passes twice in time; what has no price is a part of
    the first Linear. The others are on one device, or on both in turns: behind a tensor's way back, 213 ms, 6.4 ms of each
    Linear could hide, of which 6.4 ms - (6.4 ms)^2 / (2 x 213 ms) count: 9.6 + 3 x (12.8 + 6.304) ms.
    """
    graph = Stack((1000,)).linear(1000).linear(1000).linear(1000).linear(1000).graph()

    def bound_of(bytes_per_s: float) -> float:
        return by_the_wire(graph, 16, Costs(Roofline((Rate(5e9, 1e15),) * 2), network(2, bytes_per_s)))

    assert bound_of(1e9) == pytest.approx(0.0384, rel=0.01)
    assert bound_of(3e5) == pytest.approx(0.066912, rel=1e-3)


def test_traffic_bound_of_a_device_by_hand() -> None:
    """Three Linears of 1,000 x 1,000, 16 samples, two equal devices, a wire of 1 MB/s each way.

    A device takes 6e6 FLOP for a sample of each: 96 ms of 16 samples at 1 GFLOP/s, so alone 288 ms, and two of them 144 ms. For
    that to change hands, 16,000 entries pass the card at least once: 32 ms. At 5 GFLOP/s that is too little for all three to be
    shared: one is on one device, 19.2 ms, 0.32 ms of which could hide behind a tensor's way back. At 10 GFLOP/s it is more than
    28.8 ms alone. What is shared without a byte that is counted is the first Linear: 4.8 + 2 x 9.52 ms.
    """
    graph = Stack((1000,)).linear(1000).linear(1000).linear(1000).graph()

    def bound_of(rate: float) -> float:
        return by_the_wire(graph, 16, Costs(Roofline((Rate(rate, 1e15),) * 2), network(2, 1e6)))

    assert bound_of(1e9) == pytest.approx(0.144, rel=0.01)
    assert bound_of(5e9) == pytest.approx(0.03792, rel=1e-3)  # 9.6 + 9.44 + 18.88 ms; computing alone: 28.8 ms
    assert bound_of(1e10) == pytest.approx(0.02384, rel=1e-3)
