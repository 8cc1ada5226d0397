"""Coupled axes: which shares change together, by hand for small nets; and coupled changes add no moves."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.layout.shares import Shares, rescale
from convoy.model.tracing import trace
from convoy.plan.coupling import OTHERS, coupled_axes, shares_of, with_units
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.steps import ComputeStep
from convoy.plan.strategy import Batch, Channel, Filter, One, Sharding
from tests.support.one_device import by_name, graph_of, mixed


def table(plan: Plan, net: str) -> list[tuple[str, Shares, str, Shares]]:
    """Return all coupled axes: name, units, unit kind, and shares as the first strategy counts them."""
    return [(b.name, b.units, b.counted, shares_of(plan, b)) for b in coupled_axes(plan, graph_of(net))]


def two_conv(**layers: Any) -> Plan:
    return Plan("by hand", graph_of("two-conv").fingerprint, 3, 10, layers, Batch((5, 3, 2)))


def test_batch_shares_are_coupled_across_layers() -> None:
    plan = by_name("data-by-speed", "two-conv")
    (axes,) = coupled_axes(plan, graph_of("two-conv"))
    assert axes.layers == ("conv1", "relu", "pool", "conv2", "relu_1", "pool#2", "flatten", "fc")
    assert (axes.strategies, axes.units, axes.active) == ((OTHERS,), (7, 0, 2, 1), (0, 2, 3))
    assert with_units(plan, axes, (4, 0, 3, 3)).otherwise == Batch((4, 0, 3, 3))


def test_filter_splits_are_independent() -> None:
    plan = by_name("master", "two-conv")
    assert table(plan, "two-conv") == [
        ("conv1", (4, 0, 1, 0), "filters", (4, 0, 1, 0)),
        ("conv2", (5, 0, 1, 1), "filters", (5, 0, 1, 1)),
    ]


def test_channel_split_is_coupled_to_its_producer() -> None:
    """Flattening 2x2 pixels multiplies the shares by four; the units are whole filters."""
    plan = two_conv(conv1=One(0), conv2=Filter((4, 2, 1)), fc=Channel((16, 8, 4)))
    (axes,) = coupled_axes(plan, graph_of("two-conv"))
    assert axes.layers == ("conv2", "relu_1", "pool#2", "flatten", "fc")
    assert (axes.name, axes.units) == ("conv2 + fc", (4, 2, 1))
    other = with_units(plan, axes, (1, 1, 5))
    assert other.layers == {"conv1": One(0), "conv2": Filter((1, 1, 5)), "fc": Channel((4, 4, 20))}


def test_layer_with_other_shards_is_not_coupled() -> None:
    plan = two_conv(conv1=One(0), conv2=Filter((4, 2, 1)), fc=Channel((8, 12, 8)))
    assert table(plan, "two-conv") == [
        ("conv2", (4, 2, 1), "filters", (4, 2, 1)),
        ("fc", (8, 12, 8), "channels", (8, 12, 8)),
    ]


def test_equal_batch_splits_are_coupled_anywhere() -> None:
    plan = two_conv(conv1=Batch((5, 3, 2)), conv2=Filter((4, 2, 1)), fc=Batch((1, 1, 8)))
    first, second, third = coupled_axes(plan, graph_of("two-conv"))
    assert (first.strategies, second.strategies, third.strategies) == (("conv1", OTHERS), ("conv2",), ("fc",))
    assert (first.layers, third.layers) == (("conv1", "relu", "pool"), ("fc",))
    other = with_units(plan, third, (5, 3, 2))
    assert other.layers["fc"] == Batch((5, 3, 2))
    assert with_units(other, first, (1, 2, 7)).layers["fc"] == Batch((5, 3, 2)), "coupled axes know their own by name"


def test_convolution_groups_stay_whole() -> None:
    """Twelve filters in six groups of two make six units."""
    rows = table(by_name("master", "mobile"), "mobile")
    assert ("depthwise.0", (4, 0, 1, 1), "filters", (8, 0, 2, 2)) in rows


def test_fixed_shares_couple_nothing() -> None:
    plan = two_conv(conv1=One(0), conv2=Filter((7, 0, 0)), fc=One(1))
    assert coupled_axes(plan, graph_of("two-conv")) == (), "one device has all of it"
    plan = Plan("single", graph_of("two-conv").fingerprint, 2, 2, {}, Batch((1, 1)))
    assert coupled_axes(plan, graph_of("two-conv")) == (), "each has the least"


@pytest.mark.parametrize("plan", [*PLANS, "mixed"])
@pytest.mark.parametrize("net", ["two-conv", "resnet", "mobile", "concatenation", "convolutions", "tokens", "tied"])
def test_coupled_share_changes_add_no_moves(net: str, plan: str) -> None:
    """Shares never change the steps or their order: an extra move would be in the list."""
    graph, draw = graph_of(net), random.Random(f"{net} {plan}")
    made = mixed(net) if plan == "mixed" else by_name(plan, net)
    steps = _kinds(made, net)
    for axes in coupled_axes(made, graph):
        for _ in range(3):
            cuts = sorted(draw.sample(range(1, sum(axes.units)), len(axes.active) - 1))
            parts = [b - a for a, b in zip([0, *cuts], [*cuts, sum(axes.units)], strict=True)]
            units = [0] * made.devices
            for device, part in zip(axes.active, parts, strict=True):
                units[device] = part
            other = with_units(made, axes, tuple(units))
            other.check(graph)
            assert shares_of(other, axes) != (0,) * made.devices
            assert _kinds(other, net) == steps, f"{axes.name} {units}"


def _kinds(plan: Plan, net: str) -> list[tuple[str, str]]:
    return [
        (type(step).__name__, step.layer if isinstance(step, ComputeStep) else "")
        for step in lower(plan, graph_of(net)).steps
    ]


def test_norm_groups_stay_whole() -> None:
    """By the extents alone single channels would be: the norm could not keep them, and its weights would lie elsewhere."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    graph = trace(model, torch.zeros(2, 3, 8, 8)).graph
    plan = Plan("by hand", graph.fingerprint, 3, 10, {"0": Filter((4, 2, 2))}, Batch((5, 3, 2)))
    filters = next(axes for axes in coupled_axes(plan, graph) if axes.counted == "filters")
    assert (filters.layers, filters.units) == (("0", "1", "2", "3"), (2, 1, 1))


def test_weight_shards_follow_batch_shares() -> None:
    plan = replace(
        by_name("data-by-speed", "two-conv"),
        sharded={"fc": Sharding((7, 1, 2, 0), "free"), "conv2": Sharding((1, 1, 1, 1))},
    )
    (axes,) = coupled_axes(plan, graph_of("two-conv"))
    slowed = with_units(plan, axes, (2, 0, 6, 2))
    # Device 0 has 2 samples of 7, and 2 of 7 parts; device 2 three times as many; device 1, without samples, keeps its one.
    assert slowed.sharded["fc"] == Sharding(tuple(rescale((2, 1, 6, 0), 1000)), "free")
    assert slowed.sharded["conv2"].shares == rescale((2 * 1, 7 * 1, 7 * 3, 7 * 2), 1000)
    again = with_units(slowed, replace(axes, units=(2, 0, 6, 2)), (7, 0, 2, 1))
    for name, how in plan.sharded.items():
        before = rescale(how.shares, 1000)
        assert all(abs(a - b) <= 3 for a, b in zip(again.sharded[name].shares, before, strict=True))
        assert again.sharded[name].form == how.form


def test_weight_shards_do_not_follow_filter_shares() -> None:
    plan = replace(two_conv(conv1=One(0), conv2=Filter((4, 2, 1))), sharded={"fc": Sharding((5, 3, 2))})
    (filters,) = (axes for axes in coupled_axes(plan, graph_of("two-conv")) if axes.counted == "filters")
    assert with_units(plan, filters, (1, 1, 5)).sharded == plan.sharded
