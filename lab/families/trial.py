"""Try one family: trace its member, plan it in two ways, and compare three training steps with plain PyTorch in
float64."""

import copy
import gc
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import convoy.runtime.module
from convoy.comm.group import Group
from convoy.errors import ConvoyError, PlanError
from convoy.layout.layout import Partial, Split
from convoy.layout.shares import apportion
from convoy.model.graph import Graph, Layer
from convoy.plan import strategy
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import ComputeStep
from convoy.plan.strategy import Batch, Filter
from convoy.runtime.module import Distributed
from lab.families.registry import Member, build, narrowed
from tests.support.one_device import EXACT, part
from tests.support.threads import run_on_threads, work_shared

SPEEDS = Speeds((3.0, 2.0, 1.0))
BATCH = 6
STEPS = 3
RATE, SLOW_RATE = 1e-3, 1e-7
"""Where three steps at the first one diverge, the second is tried."""
STABLE = 5e-12
"""Where rounding alone moves one device further from itself, the biases of batch norms begin at BIAS: a deep chain of fresh
batch norms and rectifiers magnifies every change, one whose rectifiers rarely cut does not. Then larger images are tried."""
BIAS = 2.0
DIVERGES = 1.0
"""Rounding that moves one device by more than its numbers are large."""
_IMAGES = tuple((3, side, side) for side in (64, 96, 128, 224, 256, 299))
_SHAPES = (*_IMAGES, (3, 4, 64, 64), (3, 8, 64, 64), (3, 16, 64, 64), (3, 13, 209, 209))
"""Of an image or a film, in the order in which they are tried."""


@dataclass(frozen=True)
class Row:
    """The result of a family.

    Attributes:
        shape: of an image.
        layers, whole: layers of the trace, and how many of those with an unknown inside stay whole.
        by_samples, by_filters: for each of the two plans, percent of the forward FLOP: how -> percent.
        apart: for each plan, the largest difference to one device in anything, relative to one or to the number's size.
        rounding: how far one device is from itself when its images and weights are changed by 1e-15.
        biased: the biases of batch norms began at BIAS.
        rate: of the steps.
        gradients: those of the last step were compared, too, and `rounding` is of images and weights; not so in older rows.
        reasons: why layers with FLOP are not split.
        error: why it was not trained.
    """

    family: str
    name: str
    parameters: int
    shape: tuple[int, ...] = ()
    layers: int = 0
    whole: int = 0
    by_samples: Mapping[str, float] | None = None
    by_filters: Mapping[str, float] | None = None
    apart: tuple[float, ...] = ()
    rounding: float = 0.0
    biased: bool = False
    gradients: bool = False
    reasons: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    rate: float = RATE

    @property
    def exact(self) -> bool:
        return not self.error and len(self.apart) == 2 and max(self.apart) <= EXACT

    @property
    def untried(self) -> bool:
        """Return whether the family was left out by hand; `error` says why."""
        return self.error.startswith("not tried")

    @property
    def shared_out(self) -> float:
        """Return the percent of FLOP on several devices in the plan that splits by filters."""
        return 100.0 - self.by_filters["one"] if self.by_filters else 0.0


def try_family(member: Member) -> Row:
    """Train the family's member on one device and on three."""
    started = time.perf_counter()
    plain = Row(member.family, member.name, member.parameters)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            for model, shape in _runnable(member):
                row = _try(plain, model, shape, last=shape[-1] >= 128)
                if row.apart:
                    break
        except ConvoyError as error:
            row = _failed(plain, error)
        except Exception as error:  # a row of the table says what it was
            row = _failed(plain, error)
    gc.collect()
    return Row(**{**vars(row), "seconds": time.perf_counter() - started})


def _failed(row: Row, error: Exception) -> Row:
    return Row(**{**vars(row), "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"})


def _runnable(member: Member) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    """The net in float64 without random numbers, for each of our shapes that it takes.

    Raises:
        Exception: what the net raised, where it takes none.
    """
    problem: Exception | None = None
    for shape in _SHAPES:
        for options in ({"img_size": shape[-1]}, {}):
            if options and not member.family.startswith("timm"):
                continue
            try:
                built = narrowed(member.family, build(member.family, member.name, **options))
                model = _without_chance(built.double())
                x = torch.randn(2, *shape, dtype=torch.float64)
                with torch.no_grad():
                    for mode in (False, True):
                        model.train(mode)(x)
            except Exception as error:
                problem = error
                continue
            yield model, shape
            problem = None
            break
    if problem is not None:
        raise problem


def _without_chance(model: nn.Module) -> nn.Module:
    """Disable dropout and stochastic depth, the one exception to parity."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "drop_path_rate", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _try(row: Row, model: nn.Module, shape: tuple[int, ...], *, last: bool) -> Row:
    """Compare a training with one device, unless rounding grows and this is not the `last` try."""
    torch.manual_seed(1)
    images = [torch.randn(BATCH, *shape, dtype=torch.float64) for _ in range(STEPS)]
    for biased, rate in ((False, RATE), (True, RATE), (True, SLOW_RATE)):
        if biased:
            _bias(model)
        state = copy.deepcopy(model.state_dict())  # with its metadata, which MNASNet reads
        expected = {key: t.clone() for key, t in _trained(model, images, rate)}
        model.load_state_dict(state)
        rounding = _rounding(model, images, expected, rate)
        model.load_state_dict(state)
        model.zero_grad()
        if rounding < STABLE or (biased and rounding < DIVERGES):
            break
    if rounding >= STABLE and not last:
        return Row(**{**vars(row), "rounding": rounding})
    with work_shared():
        traced = convoy.runtime.module.trace(model, images[0][:2])
        graph, flop = traced.graph, _flop(model, images[0]) if traced.note else 0
        plans = (named_plan("data-by-speed", graph, BATCH, SPEEDS), filters_by_speed(graph, BATCH, SPEEDS))
        apart = tuple(max(_on_many(model, plan, images, expected, rate)) for plan in plans)
    lowered = [lower(plan, graph) for plan in plans]
    whole = [layer for layer in graph.layers.values() if layer.kind == "opaque" and layer.batched]
    reasons = {_reason(graph[s.layer]) for s in lowered[1].phase("forward") if _how(s) == "one" and graph[s.layer].flop}
    reasons |= {_without_folders(traced.note.partition("; split: ")[0])} if traced.note else set()
    return Row(
        row.family, row.name, row.parameters, shape, len(graph.layers), len(whole), shares_of_flop(graph, plans[0], flop),
        shares_of_flop(graph, plans[1], flop), apart, rounding, biased, True, tuple(sorted(reasons)),
        rate=rate,
    )  # fmt: skip


@torch.no_grad()
def _bias(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.bias is not None:
            module.bias.fill_(BIAS)


def _rounding(model: nn.Module, images: Sequence[Tensor], expected: Mapping[str, Tensor], rate: float) -> float:
    """Return how far one device differs from itself with changed last bits."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-15 * torch.randn_like(p))
    rounded = [x * (1 + 1e-15 * torch.randn_like(x)) for x in images]
    return _largest(_trained(model, rounded, rate), expected)


def filters_by_speed(graph: Graph, batch: int, speeds: Speeds) -> Plan:
    """Return a plan that splits filters by speed wherever possible, and other working layers by samples."""
    devices, by_samples = len(speeds.devices), Batch(apportion(batch, speeds.devices))
    layers: dict[str, Filter | Batch] = {}
    for layer in graph.layers.values():
        for chosen in (_filters(layer, speeds), by_samples):
            if chosen is not None and layer.batched and layer.flop and _fits(graph, layer, chosen, batch, devices):
                layers[layer.name] = chosen
                break
    plan = Plan("filters-by-speed", graph.fingerprint, devices, batch, layers, by_samples)
    plan.check(graph)
    return plan


def _fits(graph: Graph, layer: Layer, chosen: Filter | Batch, batch: int, devices: int) -> bool:
    try:
        strategy.check(layer, chosen, batch, devices)
        strategy.place(graph, layer, chosen, batch, devices)
    except PlanError:
        return False
    return True


def _filters(layer: Layer, speeds: Speeds) -> Filter | None:
    if not layer.weighted or layer.shared:
        return None
    quantum = layer.channels_out // layer.groups if layer.groups > 1 else 1
    return Filter(apportion(layer.channels_out, speeds.devices, quantum=quantum))


def _flop(model: nn.Module, images: Tensor) -> float:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        copy.deepcopy(model)(images)
    return counter.get_total_flops() / len(images)


def shares_of_flop(graph: Graph, plan: Plan, flop_of_model: float = 0.0) -> dict[str, float]:
    """Return the percent of forward FLOP that a plan splits by filters, by samples, and does not split.

    Args:
        flop_of_model: FLOP per sample of a model whose own forward runs on every device.
    """
    flop: Counter[str] = Counter()
    for step in lower(plan, graph).phase("forward"):
        if isinstance(step, ComputeStep):
            flop[_how(step)] += graph[step.layer].flop
    total = max(flop.total(), flop_of_model, 1)
    split = {how: 100.0 * flop[how] / total for how in ("filters", "samples")}
    return {**split, "one": 100.0 - sum(split.values())}


def _how(step: Any) -> str:
    if not isinstance(step, ComputeStep):
        return ""
    match step.writes.layout:
        case Split(axis, _):
            return "filters" if axis > 0 else "samples"
        case Partial():
            return "filters"
    return "one"


def _reason(layer: Layer) -> str:
    return _without_folders(layer.reason) or f"{layer.kind} {layer.name}"


def _without_folders(text: str) -> str:
    """Return a text with names of files as the library has them, not as this machine does."""
    return re.sub(r"[^\s(]*site-packages/", "", text)


# --- training --------------------------------------------------------------------------------------------------------


Named = Iterator[tuple[str, Tensor]]


def _trained(model: nn.Module, images: Sequence[Tensor], rate: float) -> Named:
    """Train on one device and return everything to compare."""
    yield from _train(model, images, rate, model, lambda _, g: g)
    yield from model.state_dict().items()


def _train(
    model: nn.Module,
    images: Sequence[Tensor],
    rate: float,
    forward: Callable[[Tensor], Any],
    whole: Callable[[str, Tensor], Tensor],
) -> Named:
    """Train three steps, then evaluate; return everything that can be compared, by name.

    Args:
        whole: (key, gradient) -> the gradient of the whole parameter.
    """
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for k, x in enumerate(images):
        optimizer.zero_grad()
        loss = _loss(forward(x))
        loss.backward()
        yield f"loss {k}", loss.detach()
        if k == len(images) - 1:
            for key, p in model.named_parameters():
                if p.grad is not None:
                    yield f"gradient of {key}", whole(key, p.grad)
        optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for i, t in enumerate(_tensors(forward(images[0]))):
            yield f"evaluated {i}", t
    model.train()


def _on_many(
    model: nn.Module, plan: Plan, images: Sequence[Tensor], expected: Mapping[str, Tensor], rate: float
) -> list[float]:
    def trained(here: Distributed) -> Named:
        yield from _train(here, images, rate, lambda x: here(part(here, x), batch=len(x)), here.gather)
        yield from here.full_state_dict().items()

    def work(group: Group) -> float:
        return _largest(trained(Distributed(model, plan, group, images[0][:2])), expected)

    return run_on_threads(plan.devices, work, timeout_s=900)


def _loss(outputs: Any) -> Tensor:
    """Return the cross entropy over axis 1, for images and pixels; further outputs count 0.3."""
    total: Tensor | None = None
    for i, t in enumerate(_tensors(outputs)):
        labels = torch.arange(t.numel() // t.shape[1]).remainder(t.shape[1]).view(t.shape[0], *t.shape[2:])
        each = F.cross_entropy(t, labels)
        total = each if total is None else total + 0.3 * each * (i > 0)
    assert total is not None
    return total


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    return [t for v in values for t in _tensors(v)]


def _largest(found: Named, expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference relative to max(1, size), of gradients to their largest. NaN is infinite."""
    largest, seen = 0.0, set()
    for key, t in found:
        seen.add(key)
        size = expected[key].double().abs()
        if size.numel():
            size = size.max() if key.startswith("gradient") else size
            apart = (t.double() - expected[key].double()).abs() / size.clamp(min=1.0)
            largest = max(largest, float(apart.nan_to_num(nan=float("inf")).max()))
    assert seen == expected.keys(), seen ^ expected.keys()
    return largest
