"""Runs a model's own forward on every device, if it could not be traced, with its split submodules as steps of the job.

All devices compute the forward from the global batch, so that losses, Python state and random numbers are those of one
device. They may round differently: device 0's gradients count, and its buffers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from convoy.comm.group import Group, present
from convoy.errors import InputError
from convoy.layout.layout import OnOne, everywhere
from convoy.model.nested import CallForm
from convoy.model.operation import TracedModel
from convoy.model.tracing.live import samples_in
from convoy.runtime.batches import StepInputs, read_inputs
from convoy.runtime.exchange import redistribute
from convoy.runtime.step_node import at_end

Step = Callable[[TracedModel, CallForm, StepInputs], Any]


class SplitForward:
    """The forward of a split submodule in a distributed model.

    Args:
        step: runs a step.
        traced: returns the model's trace in the current mode.
    """

    def __init__(self, module: nn.Module, path: str, step: Step, traced: Callable[[], TracedModel]) -> None:
        self._module, self._path, self._step, self._traced = module, path, step, traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._traced().parts.get(self._path)
        if part is None:
            return type(self._module).forward(self._module, *args, **kwargs)
        call, tensors = part.call.read(self._module, args, kwargs)
        return self._step(part, call, read_inputs(tensors, None, True, ()))

    def __deepcopy__(self, _memo: object) -> "SplitForward":
        return self  # the copied model gets its own


def run_live(
    model: nn.Module,
    inputs: Sequence[Any],
    others: Mapping[str, Any],
    batch: int | None,
    lent: AbstractContextManager[bool],
) -> Any:
    """Run the model's own forward.

    Args:
        batch: samples of the global batch, if the caller gave it.
        lent: brings parameters for this call only, so that it cannot have gradients; returns whether there are any.
    """
    found = samples_in((*inputs, *others.values()))
    if batch not in (None, found) and found >= 0:
        raise InputError(
            f"the forward of {type(model).__name__} runs on every device, and this one gave {found} of {batch} samples: give "
            "every device the global batch, from the loader that convoy.prepare returned"
        )
    with lent as brought, torch.set_grad_enabled(torch.is_grad_enabled() and not brought):
        return model(*inputs, **others)


class OutsideGradients:
    """Hooks on parameters in no layer: when a backward ends, all devices get device 0's gradients and buffers.

    Args:
        sums: returns whether this backward sums gradients (see `Distributed.no_sync`).
    """

    def __init__(
        self, group: Group, model: nn.Module, traced: Mapping[bool, TracedModel], sums: Callable[[], bool]
    ) -> None:
        self._group, self._sums, self._task = group, sums, -1
        layers = [layer for each in traced.values() for layer in each.graph.layers.values()]
        inside = {p.key for layer in layers for p in layer.parameters.values()}
        live = traced[True].live is not None and group.devices > 1
        self._parameters = [p for key, p in model.named_parameters() if live and key not in inside]
        self._buffers = [b for key, b in model.named_buffers() if live and key not in inside and b.is_floating_point()]
        for p in self._parameters:
            required = p.requires_grad
            p.requires_grad_(True).register_post_accumulate_grad_hook(self._begin)  # type: ignore[no-untyped-call]
            p.requires_grad_(required)

    def _begin(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        # The user's model may share its table of hooks (see `carry_over`), so this may be a parameter of that model.
        if task != self._task and self._sums() and any(parameter is p for p in self._parameters):
            self._task = task
            at_end(self._send)

    @torch.no_grad()
    def _send(self) -> None:
        group, trained = present(self._group), [p for p in self._parameters if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            own = [p for p in trained if p.dtype == dtype]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            has = torch.tensor([p.grad is not None for p in own], dtype=dtype, device=own[0].device)
            targets = [has, *gradients, *(b.data for b in self._buffers if b.dtype == dtype)]
            flat = torch.cat([t.reshape(-1) for t in targets])
            flat = redistribute(group, flat, OnOne(0), everywhere(group.devices), tuple(flat.shape))
            for target, row in zip(targets, torch.split(flat, [t.numel() for t in targets]), strict=True):
                target.copy_(row.view_as(target))
            for p, given, gradient in zip(own, has.tolist(), gradients, strict=True):
                p.grad = gradient if given else None
