"""Compare the model of Marques' plan with the published figures, over the range of unknown conditions.

Known (the works' abstracts): the `master` plan, CIFAR-10, two convolutions of 500 and 1500 kernels, 3.28x with four CPUs,
2.45x with three GPUs, devices of different capability, convolutions 60-90 % of the time.
Not known: kernel size, pooling, batch, device models, how unequal they were, which device is the baseline, the link, the
software. These are the ranges below. The batch hardly matters here: arithmetic and traffic both grow with it.

Nothing here is fitted: each row is one replay of the real step list on devices that exist as numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from convoy.model.graph import Graph, Layer
from convoy.model.nets import graph_without_weights
from convoy.model.nets.builtin import two_conv
from convoy.plan.device_program import LocalSize, flop, whole_size
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Part, Phase
from convoy.simulate.costs import Costs
from convoy.simulate.network import Network
from convoy.simulate.simulator import simulate


@dataclass(frozen=True, slots=True)
class Published:
    """A figure from the work's abstract.

    Attributes:
        speedup: as reported, at 500:1500 kernels.
    """

    what: str
    devices: int
    speedup: float
    source: str


CPUS = Published("four CPUs", 4, 3.28, "Marques, Falcao, Alexandre 2018, abstract")
GPUS = Published("three GPUs", 3, 2.45, "Marques, Falcao, Alexandre 2018, abstract")

SPREADS: Mapping[str, Sequence[float]] = {
    "equal": (1.0, 1.0, 1.0, 1.0),
    "slightly unequal": (1.0, 0.9, 0.8, 0.7),
    "unequal": (1.0, 0.8, 0.6, 0.4),
}
"""Speeds of the devices beside the fastest; the first `devices` of them count."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One guess at the conditions of an experiment.

    Attributes:
        flop_per_s: what the fastest device reaches on convolutions, all overheads included.
        link_bytes_per_s: of every device's NIC, each direction.
        convolution: part of the time of one device alone that convolutions take.
        kernel: side of the kernels.
        spread: a key of `SPREADS`.
        baseline: "fastest" or "slowest" of the devices.
    """

    flop_per_s: float
    link_bytes_per_s: float
    convolution: float = 0.95
    kernel: int = 5
    spread: str = "equal"
    baseline: str = "fastest"
    batch: int = 128
    latency_s: float = 1e-4


RANGES: Mapping[str, Mapping[str, Sequence[float | int | str]]] = {
    CPUS.what: {
        "flop_per_s": (20e9, 50e9, 100e9, 200e9),
        "link_bytes_per_s": (12.5e6, 125e6, 1.25e9),
        "convolution": (0.8, 0.9, 0.95, 0.99),
        "kernel": (3, 5, 7),
        "spread": tuple(SPREADS),
        "baseline": ("fastest", "slowest"),
    },
    GPUS.what: {
        "flop_per_s": (0.5e12, 1e12, 2e12, 4e12),
        "link_bytes_per_s": (125e6, 1.25e9, 12e9),
        "convolution": (0.8, 0.9, 0.95, 0.99),
        "kernel": (3, 5, 7),
        "spread": tuple(SPREADS),
        "baseline": ("fastest", "slowest"),
    },
}
"""What is varied. Links of 0.1, 1 and 10 Gbit/s for CPUs; 1, 10 Gbit/s and a PCIe 3.0 x16 slot for GPUs. FLOP/s reached: from
one core to a server of 2016; from an older desktop GPU to the best of 2016."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Layer times: convolutions by FLOP; other layers share the rest of the time in proportion to their output."""

    graph: Graph
    speeds: tuple[float, ...]
    flop_per_s: float
    convolution: float

    def seconds(self, device: int, layer: Layer, phase: Phase, size: LocalSize, part: Part = "all") -> float:
        products = 2 if phase == "backward" and part == "all" else 1
        speed = self.flop_per_s * self.speeds[device]
        if layer.kind == "conv":
            return flop(layer, size) * products / speed
        others = sum(each.shape[0] * _area(each) for each in self.graph.layers.values() if _other(each))
        conv = sum(
            flop(each, whole_size(each, size.samples)) for each in self.graph.layers.values() if each.kind == "conv"
        )
        whole_s = conv / speed * (1 - self.convolution) / self.convolution
        return whole_s * size.outputs * _area(layer) / others * products

    def alike(self, device: int) -> int:
        return self.speeds.index(self.speeds[device])


@cache
def _marques_net(kernel: int) -> Graph:
    image = (3, 32, 32)
    return graph_without_weights(lambda: two_conv(image, 10, (500, 1500), kernel), image)


def predicted(published: Published, given: Assumption) -> float:
    """Return the speedup of the `master` plan under an assumption, over its baseline device alone."""
    graph = _marques_net(given.kernel)
    speeds = tuple(SPREADS[given.spread][: published.devices])
    alone = replace(given, spread="equal")
    base = max(speeds) if given.baseline == "fastest" else min(speeds)
    return _step_s(graph, alone, (base,)) / _step_s(graph, given, speeds)


def bound(published: Published, given: Assumption) -> float:
    """Return the speedup with free communication: Amdahl's law, with the rest on the fastest device."""
    speeds = SPREADS[given.spread][: published.devices]
    base = max(speeds) if given.baseline == "fastest" else min(speeds)
    shared_s, rest_s = given.convolution / sum(speeds), (1 - given.convolution) / max(speeds)
    return (1 / base) / (shared_s + rest_s)


def table(
    published: Published, ranges: Mapping[str, Sequence[float | int | str]] | None = None
) -> list[dict[str, str | float]]:
    """Return a row per combination of the ranges: assumption, predicted and reported speedup, and their ratio."""
    varied = RANGES[published.what] if ranges is None else ranges
    rows: list[dict[str, str | float]] = []
    for values in product(*varied.values()):
        given = Assumption(**dict(zip(varied, values, strict=True)))  # type: ignore[arg-type]
        speedup = predicted(published, given)
        row: dict[str, str | float] = {name: getattr(given, name) for name in varied}
        row |= {"predicted": speedup, "free_links": bound(published, given), "reported": published.speedup}
        rows.append(row | {"predicted_over_reported": speedup / published.speedup})
    return rows


def summary(published: Published, rows: Sequence[Mapping[str, str | float]]) -> str:
    """Summarise the table in one sentence: the range, and how many guesses are within a tenth of the report."""
    found = sorted(float(row["predicted"]) for row in rows)
    near = sum(abs(value / published.speedup - 1) <= 0.1 for value in found)
    return (
        f"{published.what}: {published.speedup:.2f}x reported; the model says {found[0]:.2f}x to {found[-1]:.2f}x over "
        f"{len(found)} assumptions, median {found[len(found) // 2]:.2f}x; {near} of them within 10 % of the report"
    )


def _step_s(graph: Graph, given: Assumption, speeds: tuple[float, ...]) -> float:
    plan = named_plan("master", graph, given.batch, Speeds(speeds))
    times = _Times(graph, speeds, given.flop_per_s, given.convolution)
    costs = Costs(times, _network(len(speeds), given))
    # Nothing is known of any overlap in those experiments.
    return simulate(lower(plan, graph), graph, costs, overlap=False).step_s


def _network(devices: int, given: Assumption) -> Network:
    link, every = given.link_bytes_per_s, tuple(range(devices))
    return Network(
        host=every,
        send_bytes_per_s=(link,) * devices,
        receive_bytes_per_s=(link,) * devices,
        within_bytes_per_s=(float("inf"),) * devices,
        latency_s=((given.latency_s,) * devices,) * devices,
        pair_bytes_per_s=((link,) * devices,) * devices,
        processor_s_per_byte=(0.0,) * devices,
    )


def _area(layer: Layer) -> int:
    area = 1
    for extent in layer.shape[1:]:
        area *= extent
    return area


def _other(layer: Layer) -> bool:
    return layer.kind not in ("conv", "input")
