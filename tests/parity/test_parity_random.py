"""Parity of random mixed plans: every layer draws a strategy and shares, zeros included.

Each example is compared with one device in everything, or its bytes with the prediction. Hypothesis shrinks a failure
to the fewest strategies; `derandomize` makes every run the same, and the slow test looks further.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from convoy.errors import PlanError
from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Graph, Layer
from convoy.plan import strategy
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from tests.support.one_device import OPTIMIZERS, TWENTY_STEPS, Training, check, graph_of, traffic_of

BATCH = 10
NETS = (
    *(
        "two-conv",
        "resnet",
        "concatenation",
        "mobile",
        "convolutions",
        "signal",
        "frozen-norm",
        "frozen",
        "bare",
        "tied",
    ),
    *(
        "in-place",
        "opaque-per-sample",
        "opaque-whole",
        "dependent-samples",
        "dependent-in-training",
        "average",
        "sizes",
    ),
    *("shuffle", "no-gradient", "own-backward", "hooked", "tokens"),
)
WITHOUT_BATCH_NORM = ("two-conv", "bare", "in-place", "opaque-per-sample", "shuffle", "tokens", "frozen")


def shares_of(draw: Any, extent: int, devices: int, quantum: int = 1) -> Shares:
    weights = draw(st.lists(st.integers(0, 3), min_size=devices, max_size=devices).filter(any))
    return apportion(extent, [float(w) for w in weights], quantum=quantum)


def strategy_of(draw: Any, layer: Layer, devices: int) -> Strategy | None:
    """None: the layer follows, or does what all others do."""
    kinds = ["none", "none", "batch", "one"]
    if layer.kind in ("conv", "linear"):
        kinds = ["filter", "channel", "batch", "one", "none"]
    elif layer.kind in ("elementwise", "pool", "flatten", "batch_norm", "join", "cat"):
        kinds.append("filter")
    match draw(st.sampled_from(kinds)):
        case "batch":
            return Batch(shares_of(draw, BATCH, devices))
        case "one":
            return One(draw(st.integers(0, devices - 1)))
        case "channel":
            return Channel(shares_of(draw, layer.channels_in, devices))
        case "filter" if layer.weighted:
            quantum = layer.channels_out // layer.groups if layer.groups > 1 else 1
            return Filter(shares_of(draw, layer.channels_out, devices, quantum))
        case "filter" if layer.shape:
            return Filter(shares_of(draw, layer.shape[0], devices))
    return None


def legal(graph: Graph, layer: Layer, chosen: Strategy, devices: int) -> bool:
    """Whether this layer, and all other calls of its module, may have a strategy. test_lower.py tests what is refused."""
    try:
        for call in graph.layers.values():
            if call.name.partition("#")[0] == layer.name.partition("#")[0]:
                strategy.check(call, chosen, BATCH, devices)
                strategy.place(graph, call, chosen, BATCH, devices)
    except PlanError:
        return False
    return True


@st.composite
def plans(draw: Any, nets: tuple[str, ...] = NETS) -> tuple[str, Plan]:
    """A net, and a plan for two to four devices."""
    net, devices = draw(st.sampled_from(nets)), draw(st.integers(2, 4))
    graph = graph_of(net)
    layers: dict[str, Strategy] = {}
    for layer in graph.layers.values():
        if layer.kind in ("input", "parameter", "pick") or not layer.batched:
            continue
        chosen = strategy_of(draw, layer, devices)
        if chosen is not None and legal(graph, layer, chosen, devices):
            layers[layer.name] = chosen
    otherwise = draw(st.sampled_from(["batch", "one"]))
    rest = Batch(shares_of(draw, BATCH, devices)) if otherwise == "batch" else One(draw(st.integers(0, devices - 1)))
    reduce = draw(st.sampled_from(["ring", "butterfly", "direct", "star"]))
    pieces = draw(st.sampled_from([1, 1, 2, 3]))
    plan = Plan("random", graph.fingerprint, devices, BATCH, layers, rest, reduce, pieces)
    return net, plan


def try_plan(net: str, plan: Plan, training: Training) -> None:
    note(f"{net}: {plan.to_json()}")
    check(training, plan)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@settings(max_examples=8, derandomize=True, **QUIET)
@given(plans())
def test_random_plans_follow_one_device_for_twenty_steps(case: tuple[str, Plan]) -> None:
    net, plan = case
    try_plan(net, plan, Training(net, TWENTY_STEPS))


@settings(max_examples=8, derandomize=True, **QUIET)
@given(plans(WITHOUT_BATCH_NORM), st.sampled_from([*OPTIMIZERS]), st.booleans())
def test_random_plans_with_tiny_batches(case: tuple[str, Plan], optimizer: str, clip: bool) -> None:
    net, plan = case
    training = Training(net, (10, 1, 2, 7), optimizer, accumulate=2, clip=(0.05, 2.0) if clip else None)
    try_plan(net, plan, training)


UNPREDICTED = (
    "no-gradient", "opaque-whole", "dependent-samples", "dependent-in-training", "average", "own-norm", "own-backward", "hooked"
)  # fmt: skip
"""Nets of which device 0 also sends gradients that are in no plan, because their own forward runs on every device."""


@settings(max_examples=8, derandomize=True, **QUIET)
@given(plans(tuple(net for net in NETS if net not in UNPREDICTED)), st.sampled_from([10, 3]))
def test_random_plans_move_the_bytes_they_predict(case: tuple[str, Plan], size: int) -> None:
    net, plan = case
    assert traffic_of(net, plan, size) == +lower(plan, graph_of(net), size).traffic(8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=600, **QUIET)
@given(plans(), st.sampled_from([(10, 3, 10), (10, 10, 2, 5)]), st.sampled_from([*OPTIMIZERS]))
def test_many_random_plans(case: tuple[str, Plan], sizes: tuple[int, ...], optimizer: str) -> None:
    net, plan = case
    try_plan(net, plan, Training(net, sizes, optimizer))
