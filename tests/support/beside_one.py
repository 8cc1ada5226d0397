"""Train any small model for a few steps on threads and in plain PyTorch, and return the difference."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from tests.support.one_device import part
from tests.support.threads import run_on_threads

SIZES = (6, 5, 6)


def tensors_in(value: Any) -> list[Tensor]:
    """Yield the tensors of nested tuples, lists, dicts and objects with attributes, in order."""
    match value:
        case Tensor():
            return [value]
        case tuple() | list():
            return [t for each in value for t in tensors_in(each)]
        case dict():
            return [t for each in value.values() for t in tensors_in(each)]
        case None | bool() | int() | float() | str():
            return []
    return tensors_in(vars(value))


def difference(
    model: nn.Module,
    shape: tuple[int, ...] = (3, 8, 8),
    *,
    plan: str = "data",
    speeds: Sequence[float] = (2.0, 1.0),
    sizes: Sequence[int] = SIZES,
    after_step: Callable[[nn.Module, int], None] = lambda _model, _step: None,
) -> float:
    """Return the largest difference of losses, weights, buffers and evaluation outputs, relative to max(1, size).

    Args:
        model: is trained in float64; it must draw no random numbers.
        after_step: called after each step with the model, or with the `module` of a part, and the number of the step.
    """
    model = model.double()
    torch.manual_seed(3)
    given = [torch.randn(n, *shape, dtype=torch.float64) for n in sizes]
    chosen = named_plan(plan, trace(model, given[0][:2]).graph, sizes[0], Speeds(tuple(speeds)))

    def train(here: nn.Module, inner: nn.Module, forward: Callable[[Tensor], Any]) -> list[Tensor]:
        optimizer, found = torch.optim.SGD(here.parameters(), lr=0.02, momentum=0.9), []
        for step, x in enumerate(given):
            optimizer.zero_grad()
            loss = torch.stack([t.square().mean() for t in tensors_in(forward(x)) if t.is_floating_point()]).sum()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
            after_step(inner, step)
        here.eval()
        with torch.no_grad():
            return found + tensors_in(forward(given[0]))

    reference = copy.deepcopy(model)
    expected = train(reference, reference, reference) + list(reference.state_dict().values())

    def work(group: Group) -> float:
        here = Distributed(model, chosen, group, given[0][:2])
        found = train(here, here.module, lambda x: here(part(here, x), batch=len(x)))
        found += list(here.full_state_dict().values())
        apart = [(a - b).abs() / b.abs().clamp(min=1.0) for a, b in zip(found, expected, strict=True)]
        return max(float(each.double().nan_to_num(nan=float("inf")).max()) for each in apart if each.numel())

    return max(run_on_threads(len(speeds), work))
