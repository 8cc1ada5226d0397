"""Run layers in bf16 or fp16, and keep everything else in float32.

Each layer rounds its inputs and weights before it computes, and returns outputs and gradients in float32. So weights,
optimizer state, gradients, their sums and messages are float32 under every plan. torch.autocast rounds the same tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from convoy.comm.control_messages import difference, gather, share_number
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, unknown_name
from convoy.model.graph import Graph
from convoy.runtime.kernels import widened
from convoy.runtime.module import Distributed
from convoy.runtime.shards import SCALED, accept_gradients, check_gradients, check_summed, works_on

PRECISIONS: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of layers; None: the model's own."""


def compute_in(model: Distributed, precision: str) -> None:
    """Set the precision of a model's layers. Every device must call it with the same value.

    Raises:
        InputError: unknown name; fp16 although one device is a CPU; a model that is not float32.
        MismatchError: the devices have different precisions.
    """
    agree_on_precision(model.group, model.traced[True].graph, precision)
    model.precision = dtype_named(precision)


def agree_on_precision(group: Group, graph: Graph, precision: str) -> None:
    """Check that all devices have this precision and can use it for this model, as in `compute_in`."""
    dtype = dtype_named(precision)
    rows = gather(group, "precision", [precision, group.torch_device.type])
    if found := difference([row[0] for row in rows]):
        raise MismatchError(f"the devices have different precisions: {found}; give all the same")
    processors = [str(d) for d, row in enumerate(rows) if row[1] == "cpu"]
    if dtype is torch.float16 and processors:
        raise InputError(
            f"precision fp16, but device {', '.join(processors)} is a CPU, where it is not faster: use bf16"
        )
    for layer in graph.weighted if dtype is not None else ():
        if layer.dtype != "float32":
            raise InputError(
                f"precision {precision}, but layer {layer.name!r} is {layer.dtype}: mixed precision needs a float32 model; "
                "use model.float(), or precision float32, which does not change the model's dtypes"
            )


def dtype_named(precision: str) -> torch.dtype | None:
    """Return the dtype of layers; None for the model's own. InputError for an unknown name lists the choices."""
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    return PRECISIONS[precision]


class UnderAutocast(nn.Module):
    """An ordinary model under torch.autocast, for comparison with a distributed one."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.module, self.dtype = model, dtype_named(precision)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            return widened(self.module(x), self.dtype)


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for fp16 on several devices: an overflow on one device skips the step on all.

    torch's GradScaler checks local shards only, so one device could skip a step that others take. Use this class in its place
    on every device, for a distributed or an ordinary model, with the options of torch.amp.GradScaler.

    Attributes:
        skips: the last unscaled gradients have overflowed, so the step is skipped.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.group = model.group if isinstance(model, Distributed) else None
        super().__init__(next(iter(model.parameters())).device.type, **options)
        self.skips = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, and discard a step interrupted between unscaling and update."""
        super().load_state_dict(state_dict)
        self._per_optimizer_states.clear()

    def unscale_(self, optimizer: Optimizer) -> None:
        parameters = works_on(optimizer)
        check_summed("GradScaler.unscale_()", parameters)
        check_gradients("GradScaler.unscale_()", parameters)
        super().unscale_(optimizer)
        accept_gradients(parameters)
        for p in parameters:
            setattr(p, SCALED, False)
        state = self._per_optimizer_states[id(optimizer)]
        found = float(sum(each.item() for each in state["found_inf_per_device"].values()))
        if self.group is not None:
            found = max(share_number(self.group, found))
        assert self._scale is not None
        # Set it even without local gradients: torch would have nothing to check.
        state["found_inf_per_device"] = {self._scale.device: torch.tensor(found, device=self._scale.device)}
        self.skips = found > 0

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Fused optimizers would unscale in their own step, and check local shards only.
        if self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)
