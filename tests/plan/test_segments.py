"""Layers that a device computes between two exchanges form one autograd graph: same numbers, fewer calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.layout.layout import OnOne
from convoy.model.graph import Graph, Layer
from convoy.model.tracing import trace
from convoy.plan.compile import compile_device
from convoy.plan.device_program import Compute as Computation
from convoy.plan.device_program import Fused
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, StepList, Value
from convoy.plan.strategy import Batch, Filter, One
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.one_device import Training, by_name, check, graph_of
from tests.support.threads import run_on_threads

SHORT = (10, 10, 3)


def alone(net: str, device: int = 0, devices: int = 1, **layers: Any) -> Plan:
    return Plan("alone", graph_of(net).fingerprint, devices, 10, layers, One(device))


def rows(net: str, plan: Plan, device: int = 0, steps: StepList | None = None) -> list[list[str]]:
    """Return the layers of each segment of a device."""
    graph = graph_of(net)
    program = compile_device(steps or lower(plan, graph), graph, device)
    return [
        [each.layer for each in op.operations if isinstance(each, Computation)]
        for op in program.forward
        if isinstance(op, Fused)
    ]


def layers_of(net: str) -> list[str]:
    return [layer.name for layer in graph_of(net).layers.values() if layer.kind != "input"]


# --- what a segment is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["two-conv", "resnet", "mobile", "concatenation"])
def test_a_device_alone_has_one_segment(net: str) -> None:
    assert rows(net, alone(net)) == [layers_of(net)]
    assert rows(net, alone(net, device=2, devices=3), device=2) == [layers_of(net)]
    assert rows(net, alone(net, device=2, devices=3), device=0) == []
    by_samples = replace(alone(net, devices=3), otherwise=Batch((0, 10, 0)))
    assert rows(net, by_samples, device=1) == [layers_of(net)], "all samples on one device are the same"


def test_batch_split_has_one_segment_per_device() -> None:
    """Only gradients are exchanged, on their own lane."""
    plan = by_name("data-by-speed", "two-conv")
    assert [rows("two-conv", plan, device) for device in range(4)] == [
        [layers_of("two-conv")],
        [],
        *[[layers_of("two-conv")]] * 2,
    ]


def test_synchronised_batch_norms_end_a_segment() -> None:
    """Each exchanges its sums in forward and backward, so the layers between two of them form a segment."""
    graph = graph_of("resnet")
    plan = by_name("data-by-speed", "resnet")
    found = rows("resnet", plan)
    norms = {layer.name for layer in graph.layers.values() if layer.kind == "batch_norm"}
    assert len(found) > 1
    assert not norms & {name for row in found for name in row}


def test_matching_channel_splits_form_a_segment() -> None:
    """Filters, ReLU and pooling of local channels exchange nothing."""
    graph = graph_of("two-conv")
    conv = graph.weighted[1].name
    place = layers_of("two-conv").index(conv)
    plan = alone("two-conv", devices=2, **{conv: Filter((5, 2))})
    assert rows("two-conv", plan) == [layers_of("two-conv")[:place], layers_of("two-conv")[place + 1 : -1]]
    assert rows("two-conv", plan, device=1) == [layers_of("two-conv")[place + 1 : -1]]


def test_device_change_ends_a_segment() -> None:
    """The second convolution's input gradient must be sent before its weight gradient is computed: two steps."""
    layers = layers_of("two-conv")
    place = layers.index("conv2")
    plan = alone("two-conv", devices=2, conv2=One(1), fc=One(1))
    assert rows("two-conv", plan, device=0) == [layers[:place]]
    assert rows("two-conv", plan, device=1) == [layers[place + 1 :]]


def test_unconnected_layers_form_no_segment() -> None:
    """Two inputs with separate layers exchange nothing."""
    shape = (4, 3)
    x, y = Value("x", shape, OnOne(0)), Value("y", shape, OnOne(1))
    values = [Value(name, shape, OnOne(d)) for name, d in (("a", 0), ("b", 0), ("c", 1), ("d", 1))]
    reads = [x, values[0], y, values[2]]
    forward = [
        ComputeStep(i, "forward", v.key, (r,), v, (True,)) for i, (v, r) in enumerate(zip(values, reads, strict=True))
    ]
    backward = [replace(step, id=7 - step.id, phase="backward") for step in reversed(forward)]
    sides = StepList(4, 2, (x, y), (values[1], values[3]), (*forward, *backward))
    layers = {v.key: Layer(v.key, "elementwise", (r.key,), (3,)) for v, r in zip(values, reads, strict=True)}
    graph = Graph(
        "Sides", {"x": Layer("x", "input", (), (3,)), "y": Layer("y", "input", (), (3,)), **layers}, ("b", "d")
    )
    found = [op for d in (0, 1) for op in compile_device(sides, graph, d).forward if isinstance(op, Fused)]
    assert [(op.reads, op.writes) for op in found] == [(("x",), ("b",)), (("y",), ("d",))]


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["resnet", "tied", "opaque-per-sample", "auxiliary"])
def test_single_working_device_of_three_matches_pytorch(net: str) -> None:
    """Include residuals, branches, tied, frozen and unused parameters, and user-written layers."""
    check(Training(net, SHORT, "adam", clip=(0.05, 2.0)), alone(net, device=1, devices=3))


def halves(net: str) -> Plan:
    """Return a plan with the first half of the layers on one device, the rest on another: two segments."""
    every = [layer for layer in graph_of(net).weighted if not layer.shared]
    return alone(net, devices=2, **{layer.name: One(1) for layer in every[len(every) // 2 :]})


@pytest.mark.parametrize("net", ["concatenation", "mobile", "frozen"])
def test_two_devices_with_segments_match_pytorch(net: str) -> None:
    assert sum(len(rows(net, halves(net), d)) for d in (0, 1)) >= 2
    check(Training(net, SHORT, accumulate=2), halves(net))


def test_layer_by_layer_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    x, y = torch.randn(10, 3, 8, 8), torch.randint(0, nets.CLASSES, (10,))

    def gradients() -> list[Tensor]:
        def work(group: Group) -> list[Tensor]:
            model = nets.build("resnet", dtype=torch.float32)
            here = Distributed(model, alone("resnet"), group, x[:2])
            F.cross_entropy(here(x, batch=10), y).backward()  # type: ignore[no-untyped-call]
            return [p.grad for p in here.parameters() if p.grad is not None]

        return run_on_threads(1, work)[0]

    own = gradients()
    monkeypatch.setattr("convoy.plan.compile.segments", lambda *_: ())
    layered = gradients()
    assert len(own) == len(layered) > 10
    assert all(torch.equal(a, b) for a, b in zip(own, layered, strict=True))


class TwoLosses(nn.Module):
    """A net whose second output depends on the first layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(6, 5), nn.Linear(5, nets.CLASSES), nn.Linear(5, nets.CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.body(x))
        return self.head(torch.relu(h)), self.side(h)


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_layers_without_a_gradient_keep_none_as_in_pytorch(used: tuple[bool, bool]) -> None:
    """Zeros instead would let momentum or weight decay change the weights."""
    torch.manual_seed(5)
    model, x, y = TwoLosses().double(), torch.randn(10, 6).double(), torch.randint(0, nets.CLASSES, (10,))

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([F.cross_entropy(o, y) for o, u in zip(outputs, used, strict=True) if u]).sum()

    def work(group: Group) -> dict[str, Tensor | None]:
        graph = trace(model, x[:2]).graph
        plan = Plan("alone", graph.fingerprint, 1, 10, {}, One(0))
        here = Distributed(model, plan, group, x[:2])
        loss(here(x, batch=10)).backward()  # type: ignore[no-untyped-call]
        return {key: p.grad for key, p in here.named_parameters()}

    found = run_on_threads(1, work)[0]
    loss(model(x)).backward()  # type: ignore[no-untyped-call]
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            assert found[key] is None, key
        else:
            torch.testing.assert_close(found[key], parameter.grad)
    assert (found["side.weight"] is None) == (not used[1])


def test_callers_autocast_gives_float32_outputs_as_in_pytorch() -> None:
    """A segment switched it off if no precision was given to Convoy."""
    torch.manual_seed(7)
    x = torch.randn(10, 3, 8, 8)

    def work(group: Group) -> Tensor:
        here = Distributed(nets.build("two-conv", dtype=torch.float32), alone("two-conv"), group, x[:2])
        with torch.autocast("cpu", torch.bfloat16):
            return here(x, batch=10).detach()

    with torch.autocast("cpu", torch.bfloat16):
        expected = nets.build("two-conv", dtype=torch.float32)(x)
    (found,) = run_on_threads(1, work)
    assert (found.dtype, expected.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(found, expected.float())


# --- what it saves ---------------------------------------------------------------------------------------------------


def calls_of_autograd(net: str, monkeypatch: pytest.MonkeyPatch) -> int:
    x, y = torch.randn(10, 3, 8, 8, dtype=torch.float64), torch.randint(0, nets.CLASSES, (10,))
    counted: list[int] = []
    grad = torch.autograd.grad

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(len(args[1]))
        return grad(*args, **kwargs)

    def work(group: Group) -> None:
        here = Distributed(nets.build(net), alone(net), group, x[:2])
        monkeypatch.setattr(torch.autograd, "grad", counting)  # not before: tracing takes gradients, too
        F.cross_entropy(here(x, batch=10), y).backward()  # type: ignore[no-untyped-call]

    run_on_threads(1, work)
    return len(counted)


def test_a_segment_is_one_call_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_of_autograd("resnet", monkeypatch) == 1
