"""Lowering: the backward half of a step list, and gradient all-reduces."""

import pytest
import torch

import convoy.plan.lower
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep, GatherStatistics, SumGradients
from tests.support.one_device import by_name, graph_of
from tests.support.step_text import spelled

# --- backward --------------------------------------------------------------------------------------------------------


def test_batch_norm_exchanges_statistics_in_forward_and_backward() -> None:
    graph = graph_of("resnet")
    steps = lower(by_name("data-by-speed", "resnet"), graph, 3)
    forward = [line for line in spelled(steps, "forward") if line.startswith("statistics")]
    backward = [line for line in spelled(steps, "backward") if line.startswith("statistics")]
    # Device 3 has none of the 3 samples, but keeps running statistics.
    assert forward[0] == "statistics of bn1: 8 from 0,2,3"
    assert backward == forward[::-1]
    # That of the shortcut travels with that of the first convolution beside it.
    assert forward[3:] == [
        "statistics of layer2.downsample.1 & layer2.bn1: 32 from 0,2,3", "statistics of layer2.bn2: 16 from 0,2,3"
    ]  # fmt: skip
    assert len(forward) == 5
    assert not [s for s in lower(by_name("model", "resnet"), graph).steps if isinstance(s, GatherStatistics)]


def test_nothing_runs_backward_below_the_last_trainable_layer() -> None:
    graph = graph_of("frozen")
    lines = spelled(lower(by_name("data", "frozen"), graph), "backward")
    assert "net.conv2 back" in lines
    assert lines[-2:] == ["net.conv2 back", "sum over 0,1,2,3: net.fc.weight net.conv2.weight net.conv2.bias"]
    conv2 = next(
        s
        for s in lower(by_name("data", "frozen"), graph).steps
        if isinstance(s, ComputeStep) and s.layer == "net.conv2"
    )
    assert conv2.wants == (False,)


def test_a_shared_weight_is_summed_once_after_its_first_use() -> None:
    graph = graph_of("tied")
    steps = lower(by_name("data", "tied"), graph)
    keys = [key for s in steps.steps if isinstance(s, SumGradients) for key in s.keys]
    assert keys.count("again.weight") == keys.count("fc1.weight") == keys.count("norm.weight") == 1
    assert "fc2.weight" not in keys
    trainable = {p.key for layer in graph.layers.values() for p in layer.trainable}
    assert set(keys) == trainable
    (total,) = [s for s in steps.steps if isinstance(s, SumGradients)]
    first_use = next(
        s for s in steps.steps if isinstance(s, ComputeStep) and s.layer == "norm" and s.phase == "backward"
    )
    assert first_use.id in total.after


def test_a_weight_that_is_also_used_without_gradient_is_still_summed() -> None:
    """conv2 is called under no_grad too, fc also where its output is detached: calls without backward. The sum of such a
    weight waited for them, and never came."""
    graph = graph_of("no-gradient")
    steps = lower(by_name("data", "no-gradient"), graph)
    keys = [key for s in steps.steps if isinstance(s, SumGradients) for key in s.keys]
    assert {"conv2.weight", "fc.weight"} <= set(keys)
    assert "watched.weight" not in keys
    assert not [s for s in steps.steps if isinstance(s, ComputeStep) and s.phase == "backward" and s.layer == "conv2"]


def test_gradients_are_sent_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plan = graph_of("two-conv"), by_name("data", "two-conv")
    whole = [s for s in lower(plan, graph).steps if isinstance(s, SumGradients)]
    assert [s.sizes for s in whole] == [(28 * 5, 5, 7 * 5 * 9, 7, 5 * 3 * 25, 5)]
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 140)
    lines = spelled(lower(plan, graph), "backward")
    # Each sum starts as soon as its weight gradients are there; the gradient of the inputs is computed behind it.
    # The large gradient goes alone: nothing has to be copied to it. The bias waits for company.
    assert lines[1:4] == ["fc back (weight)", "sum over 0,1,2,3: fc.weight", "fc back (input)"]
    at = lines.index("conv2 back (weight)")
    assert lines[at + 1 : at + 3] == ["sum over 0,1,2,3: conv2.weight", "conv2 back (input)"]
    assert set(lines[-2:]) == {"sum over 0,1,2,3: conv1.weight", "sum over 0,1,2,3: fc.bias conv2.bias conv1.bias"}
    monkeypatch.setattr(convoy.plan.lower, "BUCKET_ENTRIES", 400)
    sums = [s for s in lower(plan, graph).steps if isinstance(s, SumGradients)]
    assert [s.keys for s in sums] == [
        ("fc.weight", "fc.bias", "conv2.weight", "conv2.bias"),
        ("conv1.weight", "conv1.bias"),
    ]


def test_large_gradient_closes_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """two-conv 50:500: 320,000 gradients of the last layer waited for more company than the first layer has, until the end of
    the step, while those of the convolution in between travelled; and were then alone on the wire for 15 ms of 280."""
    graph = trace(build_net("two-conv:50:500", (3, 32, 32), 10), torch.zeros(1, 3, 32, 32)).graph
    steps = lower(named_plan("data", graph, 8, Speeds((1.0, 1.0))), graph)
    sums = [s.keys for s in steps.steps if isinstance(s, SumGradients)]
    assert sums == [("7.weight", "7.bias", "3.bias"), ("3.weight",), ("0.weight", "0.bias")]
    monkeypatch.setattr(convoy.plan.lower, "COMPANION_ENTRIES", 320_511)
    steps = lower(named_plan("data", graph, 8, Speeds((1.0, 1.0))), graph)
    assert [len(s.keys) for s in steps.steps if isinstance(s, SumGradients)] == [1, 5]


def test_only_user_defined_modules_need_usage_flags() -> None:
    graph = graph_of("opaque-per-sample")
    (total,) = [s for s in lower(by_name("data", "opaque-per-sample"), graph).steps if isinstance(s, SumGradients)]
    assert total.flags == len(total.keys)
    graph = graph_of("two-conv")
    (total,) = [s for s in lower(by_name("data", "two-conv"), graph).steps if isinstance(s, SumGradients)]
    assert total.flags == 0
