"""Computing in fewer bits: layers multiply in bf16 or fp16, everything else stays in float32.

Each layer rounds its inputs and weights before it computes, and gives its outputs and gradients in float32. So weights,
optimizer state, gradients, their sums over devices and what travels are float32, whatever the plan; each rounding is one that
torch.autocast makes on one device, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.collectives import difference, gather, share_number
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, unknown_name
from convoy.machine.accelerator import accelerator
from convoy.model.graph import Graph
from convoy.runtime.kernels import widened
from convoy.runtime.marks import check_summed
from convoy.runtime.module import Distributed

PRECISIONS: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What layers compute in; None: in the type that the model has."""


def check_kinds(precision: str, devices: Sequence[str]) -> None:
    """Refuse what these devices cannot compute in, by their names on the command line, before anything starts.

    Raises:
        InputError: unknown precision, or fp16 where one of the devices is a CPU.
    """
    dtype_named(precision)
    on_cpu = [name for name in devices if name.startswith("cpu") or (name == "auto" and accelerator() is None)]
    if precision == "fp16" and on_cpu:
        raise InputError("--precision fp16 on a CPU, which does not gain from it: use bf16, or GPUs only")


def compute_in(model: Distributed, precision: str) -> None:
    """From now on the layers of a model compute in this precision. Every device must call it, with the same.

    Raises:
        InputError: unknown name; fp16 where one of the devices is a CPU; a model that is not float32.
        MismatchError: the devices were given different precisions.
    """
    agree_on_precision(model.group, model.traced[True].graph, precision)
    model.precision = dtype_named(precision)


def agree_on_precision(group: Group, graph: Graph, precision: str) -> None:
    """Whether all devices were given this precision, and they and the model can compute in it. Every device must call it.

    Raises:
        InputError, MismatchError: see `compute_in`.
    """
    dtype = dtype_named(precision)
    rows = gather(group, "precision", [precision, group.torch_device.type])
    if found := difference([row[0] for row in rows]):
        raise MismatchError(f"the devices compute in different precisions: {found}; give all the same")
    processors = [str(d) for d, row in enumerate(rows) if row[1] == "cpu"]
    if dtype is torch.float16 and processors:
        raise InputError(
            f"precision fp16, but device {', '.join(processors)} is a CPU, and CPUs do not gain from fp16: use bf16, or GPUs "
            "only"
        )
    if dtype is not None:
        _check_float32(graph, precision)


def dtype_named(precision: str) -> torch.dtype | None:
    """What layers compute in; None: in the type that the model has.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    return PRECISIONS[precision]


def _check_float32(graph: Graph, precision: str) -> None:
    for layer in graph.weighted:
        if layer.dtype != "float32":
            raise InputError(
                f"precision {precision}, but layer {layer.name!r} is {layer.dtype}: mixed precision starts from a float32 "
                "model; use model.float(), or precision float32, which leaves a model as it is"
            )


class UnderAutocast(nn.Module):
    """An ordinary model that computes in a precision as torch itself does it: what a distributed one is compared with.

    Raises:
        InputError: unknown name.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.module, self.dtype = model, dtype_named(precision)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            return widened(self.module(x), self.dtype)


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for fp16: gradients too large for fp16 on one device count on all of them.

    torch's own looks at the pieces on its device: one device would leave out a step that the others make. It is used in the
    same way. Every device has one, and calls it at the same places.

    Args:
        model: a distributed model, or an ordinary one.
        options: those of torch.amp.GradScaler.

    Attributes:
        asks_all_devices: what tells it from torch's own.
        skips: whether the gradients that were unscaled last were too large, so that the step is left out.
    """

    asks_all_devices = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.group = model.group if isinstance(model, Distributed) else None
        super().__init__(next(iter(model.parameters())).device.type, **options)
        self.skips = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; and a step that broke off between unscaling and update is forgotten."""
        super().load_state_dict(state_dict)
        self._per_optimizer_states.clear()

    def unscale_(self, optimizer: Optimizer) -> None:
        check_summed("GradScaler.unscale_()", (p for group in optimizer.param_groups for p in group["params"]))
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        found = float(sum(each.item() for each in state["found_inf_per_device"].values()))
        if self.group is not None:
            found = max(share_number(self.group, found))
        assert self._scale is not None
        # Also where this device has no gradients at all, and torch would find nothing to check.
        state["found_inf_per_device"] = {self._scale.device: torch.tensor(found, device=self._scale.device)}
        self.skips = found > 0
