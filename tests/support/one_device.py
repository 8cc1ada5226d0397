"""The oracle of the parity tests: the same training in plain PyTorch on one device, and the largest difference."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy.runtime.module
from convoy.comm.group import Group
from convoy.layout.layout import box
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel, trace
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import Batch, Channel, Filter, Form, One, Sharding, can_shard
from convoy.runtime.module import Distributed
from tests.support import nets
from tests.support.threads import run_on_threads
from tests.support.torch_seed import torch_seed

Labelled = tuple[Tensor, Tensor]
"""Images, and the label of each."""
EXACT = 1e-10
TWENTY_STEPS = (10, 10, 10, 3) * 5


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    """Return an Adagrad that needs the state of its constructor on every device: torch 2.11's creates none later."""
    optimizer = torch.optim.Adagrad(parameters, lr=0.02, eps=1e-3)

    def check(_optimizer: object, _args: object, _options: object) -> None:
        assert all(optimizer.state.get(p) for p in optimizer.param_groups[0]["params"] if p.grad is not None)

    optimizer.register_step_pre_hook(check)
    return optimizer


# A bias before a batch norm has the gradient zero, up to rounding. Divided by an eps of 1e-8, rounding would be all there is.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003, eps=1e-3, weight_decay=0.1),
    "adagrad": adagrad,
}


@dataclass(frozen=True)
class Training:
    """The model and the options of a training.

    Attributes:
        sizes: samples of each batch, in order.
        accumulate: batches per optimizer step; their gradients add up.
        one_sum: all passes of a step but the last are in `no_sync`.
        clip: (largest norm, which norm), or None.
        set_to_none: how gradients are cleared.
    """

    net: str
    sizes: tuple[int, ...] = (10, 10, 10, 3) * 2
    optimizer: str = "sgd"
    accumulate: int = 1
    one_sum: bool = False
    clip: tuple[float, float] | None = None
    set_to_none: bool = True
    dtype: torch.dtype = torch.float64

    def batches(self, model: nn.Module) -> list[Labelled]:
        with torch_seed(11):
            shape = nets.shape_of(model)
            return [
                (torch.randn(n, *shape, dtype=self.dtype), torch.randint(0, nets.CLASSES, (n,))) for n in self.sizes
            ]


@dataclass
class Record:
    """The results of a training, compared number by number."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    evaluated: list[Tensor] = field(default_factory=list)


def part(model: Distributed, x: Tensor, index: int = 0) -> Tensor:
    """Return this device's local batch of one input."""
    here = box(model.input_layouts(len(x))[index], model.group.device, tuple(x.shape))
    return (x[slice(*here[0])] if here is not None else x[:0]).to(model.group.torch_device)


def loss_of(outputs: Any, y: Tensor) -> Tensor:
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(first, y.to(first.device))


def _steps(
    model: nn.Module, training: Training, batches: Sequence[Labelled], forward: Callable[[Tensor], Any], clip: Any
) -> tuple[Record, torch.optim.Optimizer]:
    record = Record()
    optimizer = OPTIMIZERS[training.optimizer](model.parameters())
    for k, (x, y) in enumerate(batches):
        if k % training.accumulate == 0:
            optimizer.zero_grad(set_to_none=training.set_to_none)
        with waiting(model, training, k):
            loss = loss_of(forward(x), y)
            loss.backward()
        record.losses.append(loss.item())
        if (k + 1) % training.accumulate == 0:
            if training.clip is not None:
                record.norms.append(float(clip(*training.clip)))
            optimizer.step()
    return record, optimizer


def _evaluated(model: nn.Module, batches: Sequence[Labelled], forward: Callable[[Tensor], Any]) -> list[Tensor]:
    """Return evaluation outputs after training, for the first batch and for three of its samples."""
    model.eval()
    with torch.no_grad():
        outputs = [forward(batches[0][0][:n].clone()) for n in (len(batches[0][0]), 3)]
    return [t for out in outputs for t in (out if isinstance(out, tuple) else (out,))]


def waiting(model: nn.Module, training: Training, k: int) -> AbstractContextManager[None]:
    """Return the context of micro-batch k: `no_sync`, or none."""
    waits = training.one_sum and (k + 1) % training.accumulate
    return model.no_sync() if waits and hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]


@functools.cache
def on_one(training: Training) -> Record:
    """Train in plain PyTorch on one device, the reference."""
    model = nets.build(training.net, dtype=training.dtype)
    record, optimizer = _steps(
        model,
        training,
        training.batches(model),
        model,
        lambda largest, kind: torch.nn.utils.clip_grad_norm_(model.parameters(), largest, kind),
    )
    record.weights = {k: v.clone() for k, v in model.state_dict().items()}
    for key, parameter in model.named_parameters():
        record.gradients[key] = parameter.grad
        record.state[key] = {
            n: v for n, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor) and v.dim()
        }
    record.evaluated = _evaluated(model, training.batches(model), model)
    return record


def on_many(training: Training, plan: Plan, model: nn.Module | None = None) -> list[Record]:
    """Train on the devices of a plan; return one record per device, with everything gathered."""
    whole = model if model is not None else nets.build(training.net, dtype=training.dtype)
    batches = training.batches(whole)
    expected = on_one(training)

    def work(group: Group) -> Record:
        here = Distributed(whole, plan, group, batches[0][0][:2])

        def forward(x: Tensor) -> Any:
            return here(part(here, x), batch=len(x))

        record, optimizer = _steps(here, training, batches, forward, here.clip_grad_norm_)
        record.weights = here.full_state_dict()
        held = dict(here.named_parameters())
        for key, state in expected.state.items():
            grad, wanted = held[key].grad, expected.gradients[key]
            if wanted is None:
                assert grad is None or not grad.numel(), f"{key} has a gradient; on one device it has none"
                record.gradients[key] = None
            else:
                record.gradients[key] = here.gather(key, grad if grad is not None else torch.empty_like(held[key]))
            own = optimizer.state.get(held[key], {})
            record.state[key] = {n: here.gather(key, own.get(n, torch.empty_like(held[key]))) for n in state}
        record.evaluated = _evaluated(here, batches, forward)
        return record

    return run_on_threads(plan.devices, work, timeout_s=30)


def difference(found: Record, expected: Record) -> dict[str, float]:
    """Return the largest difference of each kind, relative to max(1, size). NaN counts as infinite."""
    assert found.weights.keys() == expected.weights.keys()
    for key, weight in expected.weights.items():
        assert (found.weights[key].shape, found.weights[key].dtype) == (weight.shape, weight.dtype), key
    rows = {f"weight {k}": (found.weights[k], w) for k, w in expected.weights.items()}
    rows |= {f"gradient of {k}": (found.gradients[k], g) for k, g in expected.gradients.items() if g is not None}
    for key, state in expected.state.items():
        rows |= {f"{name} of {key}": (found.state[key][name], value) for name, value in state.items()}
    rows |= {f"evaluated {i}": row for i, row in enumerate(zip(found.evaluated, expected.evaluated, strict=True))}
    rows["losses"] = (_numbers(found.losses), _numbers(expected.losses))
    rows["norms"] = (_numbers(found.norms), _numbers(expected.norms))
    return {name: _apart(a, b) for name, (a, b) in rows.items()}


def _numbers(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = a.cpu().double(), b.cpu().double()
    apart = (a - b).abs() / b.abs().clamp(min=1.0)
    return float(apart.nan_to_num(nan=float("inf")).max()) if apart.numel() else 0.0


def assert_same(records: Sequence[Record], expected: Record, tolerance: float = EXACT) -> None:
    for device, found in enumerate(records):
        wrong = {what: by for what, by in difference(found, expected).items() if not by <= tolerance}
        assert not wrong, f"device {device} differs from one device: {wrong}"


def check(training: Training, plan: Plan, tolerance: float = EXACT) -> None:
    """Train on a plan's devices and on one device; assert that everything is equal on every device."""
    with one_trace(training.net, training.dtype):
        assert_same(on_many(training, plan), on_one(training), tolerance)


def traffic_of(net: str, plan: Plan, size: int) -> Counter[tuple[int, int]]:
    """Return the bytes sent in one training step."""
    model = nets.build(net)
    (x, y), *_ = Training(net, (size,)).batches(model)

    def work(group: Group) -> list[int]:
        here = Distributed(model, plan, group, x[:2])
        group.clear_counters()
        outputs = here(part(here, x), batch=size)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.stack([loss_of(out, y) for out in outputs]).sum().backward()
        return list(group.sent_bytes)

    with one_trace(net, torch.float64):
        rows = run_on_threads(plan.devices, work)
    return Counter({(i, j): n for i, row in enumerate(rows) for j, n in enumerate(row) if n})


def graph_of(name: str) -> Graph:
    return traced(name).graph


@functools.cache
def traced(name: str) -> TracedModel:
    model = nets.build(name)
    return trace(model, torch.zeros(2, *nets.shape_of(model), dtype=torch.float64))


UNEVEN = Speeds((7.0, 0.0, 2.0, 1.0))
"""Of a batch of 10: (7, 0, 2, 1)."""


def by_name(plan: str, net: str, reduce: Any = "ring", speeds: Speeds = UNEVEN, batch: int = 10) -> Plan:
    return named_plan(plan, graph_of(net), batch, speeds, reduce)


_TRACES: dict[Any, TracedModel] = {}
_TRACING = threading.Lock()


@contextmanager
def one_trace(*model: Any) -> Iterator[None]:
    """Trace a net once for all tests. (A group of threads traces each model object once anyway.)

    Args:
        model: name and dtype of the net.
    """
    original = convoy.runtime.module.trace

    def cached(whole: nn.Module, example: Any, *, training: bool | None = True, **like: Any) -> TracedModel:
        with _TRACING:
            if training is None:  # a new size or mode
                return original(whole, example, training=training, **like)
            key = (*model, training)
            if key not in _TRACES:
                _TRACES[key] = original(whole, example, training=training, **like)
            return _TRACES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.runtime.module.trace", cached)
        yield


def mixed(net: str, reduce: Any = "ring") -> Plan:
    """Return a plan for four devices with every strategy; other layers follow, or split by samples."""
    graph = graph_of(net)
    layers: dict[str, Any] = {}
    for i, layer in enumerate(graph.weighted):
        if layer.shared or layer.groups > 1:
            continue
        out, inner = layer.channels_out, layer.channels_in
        choices = (
            Filter((out - out // 3, 0, out // 3, 0)),
            Channel((0, inner - inner // 2, 0, inner // 2)),
            Batch((1, 2, 3, 4)),
            One(3),
        )
        layers[layer.name] = choices[i % 4]
    return Plan("mixed", graph.fingerprint, 4, 10, layers, Batch((7, 0, 2, 1)), reduce)


def in_shares(plan: Plan, net: str, shares: tuple[int, ...], form: Form = "keep") -> Plan:
    """Return the plan with the parameters of every layer sharded unless its strategy forbids it."""
    free = [
        layer.name
        for layer in graph_of(net).layers.values()
        if can_shard(layer) and isinstance(plan.layers.get(layer.name, Batch(())), Batch)
    ]
    return replace(plan, sharded=dict.fromkeys(free, Sharding(shares, form)))
