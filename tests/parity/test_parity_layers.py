"""Parity of every kind of layer in every plan that can split it: forward, backward, three steps, evaluation."""

import pytest

from convoy.layout.layout import Split
from convoy.model.graph import Graph, Layer
from convoy.plan.placing import placements
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, One, Strategy
from tests.support import layer_nets, nets
from tests.support.layer_nets import BY_SAMPLES, FILTERED, KEPT
from tests.support.one_device import Training, check, graph_of
from tests.support.slow import each_value

SIZES = (6, 2, 6)
SAMPLES = Batch((4, 0, 2))

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
]


@pytest.fixture(autouse=True)
def _layer_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*KEPT, *FILTERED, *BY_SAMPLES):
        monkeypatch.setitem(nets.NETS, name, lambda name=name: layer_nets.build(name))


def plan_for(graph: Graph, layers: dict[str, Strategy]) -> Plan:
    return Plan("mine", graph.fingerprint, 3, 6, layers, SAMPLES)


def the_layer(graph: Graph, name: str) -> Layer:
    """The layer of that name, or the one between stem and head."""
    return next(
        each for each in graph.weighted if each.name == name or (name == "layer" and each.name not in ("stem", "head"))
    )


def split_of(graph: Graph, plan: Plan) -> set[str]:
    """The layers that give parts of another axis than the batch."""
    placed = placements(plan, graph)
    return {name for name, p in placed.items() if isinstance(p.gives, Split) and p.gives.axis > 0}


@pytest.mark.parametrize("name", [*KEPT])
def test_layers_that_stay_split(name: str) -> None:
    graph, shares = graph_of(name), KEPT[name][1]
    plan = plan_for(graph, {"stem": Filter(shares)})
    inside = {each.name for each in graph.layers.values() if each.batched} - {*graph.outputs, "x", "stem"}
    assert inside <= split_of(graph, plan), "every layer up to the last Linear takes what lies there"
    check(Training(name, SIZES), plan)
    check(Training(name, SIZES), plan_for(graph, {}))


@pytest.mark.parametrize(("name", "strategy"), each_value([*FILTERED], ["filter", "channel", "batch", "one"]))
def test_layers_with_filters(name: str, strategy: str) -> None:
    graph, (_, prefix, extent, sums) = graph_of(name), FILTERED[name]
    layer = the_layer(graph, prefix)
    assert layer.channels_out == extent
    assert layer.sums_channels == sums
    if strategy == "channel" and not sums:
        pytest.skip("it does not sum over channels")
    inner = layer.channels_in
    chosen: dict[str, Strategy] = {
        "filter": Filter((extent - extent // 3, 0, extent // 3)),
        "channel": Channel((0, inner - inner // 3, inner // 3)),
        "batch": Batch((1, 2, 3)),
        "one": One(2),
    }
    plan = plan_for(graph, {"stem": Filter((5, 0, 3)), layer.name: chosen[strategy]})
    if strategy == "filter":
        assert layer.name in split_of(graph, plan)
    check(Training(name, SIZES), plan)


@pytest.mark.parametrize("name", [*BY_SAMPLES])
def test_layers_by_samples(name: str) -> None:
    graph = graph_of(name)
    assert all(layer.per_sample for layer in graph.layers.values())
    check(Training(name, SIZES), plan_for(graph, {"stem": Filter((5, 0, 3))}))


def test_attention_is_computed_by_heads() -> None:
    """Queries, keys and values by filter: attention of the heads that are there, and what is behind them by channel."""
    graph = graph_of("attention")
    by_head = Filter((4, 0, 4))
    layers = {f"layer.{p}": by_head for p in "qkv"} | {"layer.out": Channel((4, 0, 4))}
    plan = plan_for(graph, layers)
    attention = next(name for name in graph.layers if "scaled_dot_product" in name)
    assert placements(plan, graph)[attention].gives == Split(1, (2, 0, 2))
    check(Training("attention", SIZES), plan)


def test_channels_last_in_the_middle_stay_split() -> None:
    """ConvNeXt's block: up by filter, down by channel, one move between."""
    graph = graph_of("block")
    plan = plan_for(graph, {"layer.up": Filter((10, 0, 6)), "layer.down": Channel((10, 0, 6))})
    assert {"layer.up", "gelu"} <= split_of(graph, plan)
    check(Training("block", SIZES), plan)
