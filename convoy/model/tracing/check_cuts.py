"""Compares two parts of a layer with the whole of it, on random numbers: what was registered for it must be true."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.graph import Cut, Layer
from convoy.model.operation import Operation, call_operation
from convoy.model.tracing.opaque import Inputs, first_line, is_close
from convoy.model.tracing.python_state import random_kept
from convoy.model.tracing.shared_copy import shared_copy


def check_cuts(
    model: nn.Module,
    layer: Layer,
    operation: Operation,
    inputs: Sequence[tuple[Tensor, bool]],
    like: type[nn.Module] | None = None,
) -> None:
    """Refuse a registered layer that computes something else in parts than as a whole.

    Args:
        model: with weights; left as it is.
        inputs: for each input a tensor of its shape and dtype, and whether it has a batch axis.
        like: the class that computes the same, where the layer was registered so.

    Raises:
        InputError: the numbers, or what is noted in buffers, differ.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    with random_kept(), torch.no_grad():
        local = shared_copy(model)
        module = local.get_submodule(str(operation.target)) if operation.call == "module" else None
        if module is not None and layer.random:
            module.eval()  # what it draws would hide what it computes
        given = Inputs([t for t, _ in inputs], [b for _, b in inputs]).random(2, torch.float64)
        if module is not None:
            module.double()
        what = type(module).__name__ if module is not None else layer.name
        _Check(layer, operation, local, module, given, what).run(_cuts(layer), like)


def _cuts(layer: Layer) -> tuple[Cut, ...]:
    if layer.kind == "elementwise":
        return tuple(Cut(axis, extent, (axis,)) for axis, extent in enumerate(layer.shape, 1))
    return layer.cuts


class _Check:
    def __init__(
        self,
        layer: Layer,
        operation: Operation,
        model: nn.Module,
        module: nn.Module | None,
        inputs: Sequence[Tensor],
        what: str,
    ) -> None:
        self.layer, self.operation, self.model, self.module, self.inputs = layer, operation, model, module, inputs
        self.what = what
        self.before = copy.deepcopy(module.state_dict()) if module is not None else {}

    def run(self, cuts: Sequence[Cut], like: type[nn.Module] | None) -> None:
        whole, noted = self._call(self.inputs, {})
        if like is not None and self.module is not None:
            self._restore()
            self._compare(whole, like.forward(self.module, *self.inputs), f"as {like.__name__} computes it")
        for cut in cuts:
            if cut.parts < 2:
                continue
            first = (cut.parts + 1) // 2
            halves = [self._part(cut, 0, first), self._part(cut, first, cut.parts)]
            where = f"in parts of axis {cut.axis}"
            self._compare(whole, torch.cat([y for y, _ in halves], cut.axis), where)
            for key, value in noted.items():
                parts = [buffers[key] for _, buffers in halves]
                axis = cut.parameters.get(key)
                for found in parts if axis is None else [torch.cat(parts, axis)]:
                    self._compare(value, found, f"{where}, in its buffer {key!r}")

    def _part(self, cut: Cut, start: int, stop: int) -> tuple[Tensor, dict[str, Tensor]]:
        def here(t: Tensor, axis: int | None) -> Tensor:
            if axis is None:
                return t
            entries = t.shape[axis] // cut.parts
            return t.narrow(axis, start * entries, (stop - start) * entries).clone()

        inputs = [here(t, axis) for t, axis in zip(self.inputs, cut.inputs, strict=True)]
        try:
            return self._call(inputs, {key: here(self.before[key], axis) for key, axis in cut.parameters.items()})
        except Exception as error:
            raise self._wrong(f"it does not run in parts of axis {cut.axis} ({first_line(error)})") from error

    def _call(self, inputs: Sequence[Tensor], present: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The output with those parameters in place of the whole ones, and its buffers afterwards."""
        self._restore()
        for key, tensor in present.items():
            self._set(key, tensor)
        y = call_operation(self.model, self.operation, inputs, len(inputs[0]))
        return y, {k: b.clone() for k, b in self.module.named_buffers()} if self.module is not None else {}

    def _restore(self) -> None:
        for key, tensor in self.before.items():
            self._set(key, tensor.clone())

    def _set(self, key: str, tensor: Tensor) -> None:
        assert self.module is not None
        path, _, name = key.rpartition(".")
        holder = self.module.get_submodule(path)
        if name in holder._parameters:
            holder._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        else:
            holder._buffers[name] = tensor

    def _compare(self, whole: Tensor, found: Tensor, where: str) -> None:
        if not is_close(whole, found):
            raise self._wrong(f"it gives other numbers {where} than as a whole")

    def _wrong(self, what: str) -> InputError:
        return InputError(
            f"layer {self.layer.name!r}: {self.what} was registered with register_layer, but {what}: correct what is said of "
            "its axes, groups, parameters and attributes, or do not register it"
        )
