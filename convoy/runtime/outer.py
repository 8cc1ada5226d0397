"""Runs a model's own forward on every device, if it could not be traced, with its split submodules as steps of the job.

All devices compute the forward from the global batch, so that losses, Python state and random numbers are those of one
device. They may round differently: device 0's gradients count, and its buffers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.group import Group, present
from convoy.layout.layout import OnOne, everywhere
from convoy.model.tracing import TracedModel
from convoy.runtime.exchange import redistribute
from convoy.runtime.step_node import at_end


def outside_keys(model: nn.Module, traced: Mapping[bool, TracedModel]) -> set[str]:
    """Return the parameters and buffers that no layer of a plan has, because the model's own forward reads them."""
    if traced[True].live is None:
        return set()
    layers = [layer for each in traced.values() for layer in each.graph.layers.values()]
    held = {key for key, _ in (*model.named_parameters(), *model.named_buffers())}
    return held - {p.key for layer in layers for p in layer.parameters.values()}


class SplitForward:
    """The forward of a split submodule in a distributed model.

    Args:
        step: called with the trace of the submodule in the current mode and the tensors of the call.
        trace: returns that trace; None: the submodule's own forward runs.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[[TracedModel, Sequence[Tensor]], Any],
        trace: Callable[[], TracedModel | None],
    ) -> None:
        before = vars(module).get("forward", type(module).forward.__get__(module))
        self._own = before._own if isinstance(before, SplitForward) else before
        self._module, self._step, self._trace = module, step, trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = self._trace()
        if traced is None:
            return self._own(*args, **kwargs)
        return self._step(traced, traced.call.tensors(self._module, args, kwargs))

    def __deepcopy__(self, _memo: object) -> "SplitForward":
        return self  # the copied model gets its own


class FirstDevice:
    """Hooks on parameters outside the plan: at the end of a backward, device 0's gradients and buffers go to all devices."""

    def __init__(self, group: Group, model: nn.Module, keys: set[str], sums: Callable[[], bool]) -> None:
        self._group, self._sums, self._task = group, sums, -1
        self._parameters = [p for key, p in model.named_parameters() if key in keys]
        self._buffers = [b for key, b in model.named_buffers() if key in keys and b.is_floating_point()]
        for p in self._parameters:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._begin)

    def _begin(self, _parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and self._group.devices > 1 and self._sums():
            self._task = task
            at_end(self._send)

    @torch.no_grad()
    def _send(self) -> None:
        group, trained = present(self._group), [p for p in self._parameters if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            own = [p for p in trained if p.dtype == dtype]
            buffers = [b.data for b in self._buffers if b.dtype == dtype]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            has = torch.tensor([p.grad is not None for p in own], dtype=dtype, device=own[0].device)
            flat = torch.cat([t.reshape(-1) for t in (has, *gradients, *buffers)])
            everyone = everywhere(group.devices)
            flat = redistribute(group, flat, OnOne(0), everyone, tuple(flat.shape))
            if group.device == 0:
                continue
            has, *rows = flat.split([t.numel() for t in (has, *gradients, *buffers)])
            for target, row in zip((*gradients, *buffers), rows, strict=True):
                target.copy_(row.view_as(target))
            for p, given, gradient in zip(own, has.tolist(), gradients, strict=True):
                p.grad = gradient if given else None
