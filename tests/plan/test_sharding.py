"""Sharded weights: what each device keeps, what is sent when, and refused plans."""

import json
from dataclasses import replace

import pytest

from convoy.errors import PlanError
from convoy.layout.collectives import gather_shares, sum_into_shares, traffic
from convoy.layout.layout import Replicated, Split
from convoy.plan.compile import compile_all
from convoy.plan.device_program import Compute as DeviceCompute
from convoy.plan.device_program import FreeWeights, PackWeights
from convoy.plan.lower import lower
from convoy.plan.placing import parameter_layouts
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, GatherWeights, SumGradients
from convoy.plan.strategy import Batch, Filter, Form, Sharding
from convoy.simulate.costs import NOTHING, Overheads, handling_of
from convoy.simulate.memory import memory_of
from tests.support.one_device import by_name, graph_of, in_shares
from tests.support.stacks import Stack

SHARES = (1, 3, 0, 2)
FORMS: tuple[Form, ...] = ("keep", "free")


def plan_of(net: str, form: Form = "keep") -> Plan:
    return in_shares(by_name("data-by-speed", net), net, SHARES, form)


def test_traffic_of_sharded_weights_by_hand() -> None:
    """Devices keep 7, 3 and 0 entries; of device 0's gradients, device 1 receives its own part, and so on."""
    assert traffic(sum_into_shares((0, 1), (7, 3)), 1) == {(0, 1): 3, (1, 0): 7}
    assert traffic(sum_into_shares((0, 2), (7, 3, 0)), 1) == {(0, 1): 3, (2, 0): 7, (2, 1): 3}
    assert traffic(gather_shares((7, 3, 0), (0, 2)), 1) == {(0, 2): 7, (1, 0): 3, (1, 2): 3}
    boxes = [(t.sender, t.receiver, t.box, t.adds) for t in sum_into_shares((0, 1), (7, 3)).rounds[0]]
    assert sorted(boxes) == [(0, 1, ((7, 10),), True), (1, 0, ((0, 7),), True)]


def test_parameters_are_sharded_along_axis_0_and_buffers_replicated() -> None:
    kept = parameter_layouts(plan_of("resnet"), graph_of("resnet"))
    assert kept["conv1.weight"] == kept["bn1.weight"] == Split(0, (1, 2, 0, 1))
    assert isinstance(kept["bn1.running_mean"], Replicated)
    assert isinstance(kept["bn1.num_batches_tracked"], Replicated)


def test_layers_await_only_their_own_weights() -> None:
    graph = graph_of("two-conv")
    steps = lower(plan_of("two-conv"), graph).steps
    gathers = {key: step.id for step in steps if isinstance(step, GatherWeights) for key in step.keys}
    assert set(gathers) == {p.key for layer in graph.layers.values() for p in layer.trainable}
    assert max(gathers.values()) < min(step.id for step in steps if isinstance(step, ComputeStep))
    for step in steps:
        if isinstance(step, ComputeStep) and step.phase == "forward":
            assert {gathers[p.key] for p in graph[step.layer].trainable} <= set(step.after)
    sums = [step for step in steps if isinstance(step, SumGradients)]
    assert all(step.into and step.devices == (0, 2, 3) for step in sums), "those that compute have summands"
    assert all(step.members == (0, 1, 2, 3) for step in sums), "device 1 keeps shares"


def test_freed_weights_are_gathered_one_bucket_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.plan.lower.BUCKET_ENTRIES", 1)
    graph = graph_of("two-conv")
    (program, *_) = compile_all(lower(plan_of("two-conv", "free"), graph), graph)
    there: set[str] = set()
    seen: list[tuple[str, ...]] = []
    for op in program.main():
        match op:
            case PackWeights():
                there |= set(op.keys)
            case FreeWeights():
                there -= set(op.keys)
            case DeviceCompute(layer=layer) if graph[layer].trainable:
                assert {p.key for p in graph[layer].trainable} <= there
                row = (op.phase, layer, *sorted({key.partition(".")[0] for key in there}))
                seen += [row] if row not in seen else []  # a backward may be in two parts
    assert not there
    assert seen == [
        ("forward", "conv1", "conv1", "conv2"),
        ("forward", "conv2", "conv2", "fc"),
        ("forward", "fc", "fc"),
        ("backward", "fc", "conv2", "fc"),
        ("backward", "conv2", "conv1", "conv2"),
        ("backward", "conv1", "conv1"),
    ]  # fmt: skip


def test_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """conv1 has 380, conv2 322 and fc 145 entries; device 0 keeps a sixth of the rows and computes with all."""
    monkeypatch.setattr("convoy.plan.lower.BUCKET_ENTRIES", 1)
    graph = graph_of("two-conv")
    lists = {form: lower(plan_of("two-conv", form), graph) for form in FORMS}
    needs = {form: memory_of(steps, graph, optimizer="adam", itemsize=1)[0] for form, steps in lists.items()}
    own = 76 + 46 + 29
    assert all(each.optimizer_bytes == 2 * own for each in needs.values())
    assert needs["keep"].weights_bytes == own + 380 + 322 + 145
    assert needs["free"].weights_bytes == own + 322 + 375, (
        "in backward conv1.weight sets out beside conv2; its bias follows"
    )
    assert needs["keep"].gradients_bytes == 380 + 322 + 145, "whole, until they are summed; shares afterwards"
    assert needs["free"].gradients_bytes < needs["keep"].gradients_bytes


def test_plan_file_lists_sharded_layers() -> None:
    plan = plan_of("two-conv")
    assert json.loads(plan.to_json())["in_shares"]["conv1"] == {"shares": list(SHARES), "form": "keep"}
    for form in ("keep", "free"):
        chosen = plan_of("two-conv", form)
        assert Plan.from_json(chosen.to_json()) == chosen
    assert "in_shares" not in replace(plan, sharded={}).to_json(), "files without are as they were"
    sharded = by_name("sharded", "two-conv")
    assert sharded.sharded["fc"] == Sharding((700, 0, 200, 100))
    assert set(sharded.sharded) == {"conv1", "conv2", "fc"}


@pytest.mark.parametrize(
    ("net", "layer", "shares", "words"),
    [
        ("two-conv", "conv1", (1, 2), "name 2 devices"),
        ("two-conv", "conv1", (0, 0, 0, 0), "all zero"),
        ("two-conv", "conv1", (1, -1, 1, 1), "negative"),
        ("two-conv", "pool", SHARES, "no parameter that is trained"),
        ("two-conv", "nosuch", SHARES, "does not have"),
        ("opaque-per-sample", "", SHARES, "it is opaque"),
    ],
)
def test_invalid_sharding_is_refused(net: str, layer: str, shares: tuple[int, ...], words: str) -> None:
    graph = graph_of(net)
    if not layer:
        layer = next(each.name for each in graph.layers.values() if each.kind == "opaque" and each.trainable)
    plan = replace(by_name("data-by-speed", net), sharded={layer: Sharding(shares)})
    with pytest.raises(PlanError, match=words):
        plan.check(graph)


def test_sharding_excludes_layer_splits() -> None:
    graph = graph_of("two-conv")
    plan = replace(plan_of("two-conv"), layers={"conv2": Filter((7, 0, 0, 0))})
    with pytest.raises(PlanError, match="strategy is 'filter'"):
        plan.check(graph)


def test_single_computing_device_gathers_nothing() -> None:
    alone = replace(plan_of("two-conv"), otherwise=Batch((10, 0, 0, 0)))
    assert not [s for s in lower(alone, graph_of("two-conv")).steps if isinstance(s, GatherWeights | SumGradients)]


def test_freed_weights_allocate_memory_at_each_gather() -> None:
    """A large one, of 10 M float32: the system provides 40 MB anew, in forward and in backward; one that stays is there."""
    graph = Stack((4, 50, 50)).flatten().linear(1000).graph()
    overhead = Overheads(fresh_s_per_byte=1e-9)
    for form, times in zip(FORMS, (0, 2), strict=True):
        kept = {name: Sharding((1, 1), form) for name in graph.layers if graph[name].trainable}
        plan = Plan("p", graph.fingerprint, 2, 4, {}, Batch((2, 2)), sharded=kept)
        (program, _) = compile_all(lower(plan, graph), graph)
        packs = [op for op in program.main() if isinstance(op, PackWeights) and 10_000_000 in map(sum, op.shares)]
        fresh_s = [overhead.handling_s(handling_of(op) or NOTHING, 4) for op in packs]
        assert sum(fresh_s) == pytest.approx(times * 0.04)
