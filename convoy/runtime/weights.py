"""This device's pieces of a model's parameters and buffers: cut from whole ones, and made whole again for the caller."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from convoy.comm.collectives import gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import OnOne, Shape, box, everywhere, local_shape
from convoy.model.graph import Parameter
from convoy.model.tracing import TracedModel
from convoy.runtime.exchange import gather_whole, redistribute
from convoy.runtime.gradients import global_norm
from convoy.runtime.marks import check_summed, mark_changed
from convoy.runtime.plan_in_use import PlanInUse
from convoy.runtime.shard_guards import retire
from convoy.runtime.torch_guards import reading_pieces
from convoy.runtime.watch import carry_over


class Weights:
    """The parameters and buffers of one device. Whatever takes or gives whole ones is called by every device.

    Args:
        module: holds the pieces.
        known: all of them, by key in `state_dict`.
        in_use: says where they lie.

    Attributes:
        to_come: keys of those that have no numbers yet, because the model was built on the meta device.
    """

    def __init__(self, group: Group, module: nn.Module, known: Mapping[str, Parameter], in_use: PlanInUse) -> None:
        self.group, self.module, self.known, self.in_use = group, module, known, in_use
        self.to_come: set[str] = set()

    def own(self, key: str) -> Tensor:
        """This device's piece, as it stands in the module."""
        return _tensor(self.module, key)

    def held(self, key: str) -> Tensor:
        """This device's piece, outside of autograd."""
        return self.own(key).detach()

    def own_shape(self, key: str) -> Shape:
        """The shape of this device's piece."""
        return local_shape(self.in_use.layouts[key], self.group.device, self.known[key].shape)

    def check_there(self) -> None:
        """
        Raises:
            InputError: some of them have no numbers yet.
        """
        if self.to_come:
            raise InputError(
                f"the model was built on the meta device, and {len(self.to_come)} of its parameters and buffers "
                f"({min(self.to_come)!r}, say) have no numbers yet: call load_state_dict() with them on every device, such as "
                "load_state_dict(torch.load(file, mmap=True)), of which each device reads its pieces"
            )

    # --- whole ones become pieces ------------------------------------------------------------------------------------

    def cut(self, original: nn.Module) -> None:
        """Shard device 0's weights: every device gets its shards, parameter by parameter. Hooks stay on their parameters.

        Where `original` is the module itself, its whole parameters stay the same objects, and split ones are retired.
        """
        rows = [(key, _tensor(original, key)) for key in self.known]
        self.to_come = set(gather(self.group, "weights to come", [key for key, t in rows if t.is_meta])[0])
        for key, old in rows:
            if old.is_complex() and old.requires_grad and self.in_use.is_copied(key) and self.group.devices > 1:
                raise InputError(
                    f"parameter {key!r} is complex: its gradients cannot be summed over devices. Keep it as a real one with a "
                    "last axis of 2, and use torch.view_as_complex in forward"
                )
            piece = self._piece_of(key, old)
            if original is self.module and self.in_use.is_copied(key) and not old.is_meta:
                self.put(key, piece)
                continue
            if not self.known[key].buffer:
                piece = nn.Parameter(piece, requires_grad=old.requires_grad)
                carry_over(piece, old)
            _replace(self.module, self.own(key), piece)
            if original is self.module:
                retire(old, key)

    def _piece_of(self, key: str, old: Tensor) -> Tensor:
        here = self.group.torch_device
        if key in self.to_come:
            return torch.empty(self.own_shape(key), dtype=old.dtype, device=here)
        whole = old.detach().to(here) if self.group.device == 0 else torch.empty(0, dtype=old.dtype, device=here)
        return redistribute(self.group, whole, OnOne(0), self.in_use.layouts[key], self.known[key].shape).clone()

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
        """Take this device's pieces of whole weights; the missing and the unexpected keys.

        Raises:
            InputError: keys that do not fit, or a tensor of another shape than the whole parameter.
        """
        with reading_pieces():
            tied, known = _canonical(self.module), self.module.state_dict()
        missing = [key for key in known if key not in state_dict]
        unexpected = [key for key in state_dict if key not in known]
        nothing = bool(known) and len(missing) == len(known)
        if nothing or (strict and (missing or unexpected)):
            hint = (
                "use the model's ordinary keys, without 'module.'"
                if all(k.startswith("module.") for k in unexpected) and unexpected
                else "give all of them, or strict=False"
            )
            raise InputError(f"load_state_dict: keys {missing} are missing, {unexpected} are not known: {hint}")
        mark_changed(self.module.parameters())
        for key in filter(state_dict.__contains__, known):
            holder, _, name = key.rpartition(".")
            if tied.get(key, key) in self.known:
                self._load(key, tied.get(key, key), state_dict[key])
            elif name == "_extra_state":
                self.module.get_submodule(holder).set_extra_state(state_dict[key])
            else:
                raise InputError(
                    f"load_state_dict: {key!r} is no parameter or buffer, but what a hook on state_dict, or the "
                    "model's own state_dict, makes of them: load the weights before distribute()"
                )
        return _IncompatibleKeys(missing, unexpected)

    def _load(self, key: str, parameter: str, whole: Tensor) -> None:
        shape = self.known[parameter].shape
        if tuple(whole.shape) != tuple(shape):
            raise InputError(
                f"load_state_dict: {key!r} has the shape {tuple(whole.shape)}, the whole parameter has {tuple(shape)}: give "
                "the weights of the whole model, as full_state_dict() does"
            )
        here = box(self.in_use.layouts[parameter], self.group.device, shape)
        if here is not None:
            self.held(parameter).copy_(whole.detach()[tuple(slice(*span) for span in here)])
        self.to_come.discard(parameter)

    def put(self, key: str, piece: Tensor) -> None:
        """Let this device hold another shard, of any shape, and drop the gradient of the one before. Tensors stay the same
        objects."""
        tensor = self.own(key)
        # A gradient has the shape of its parameter at any time; the old one has been read, or is under way.
        tensor.grad = None
        # A loss of the last step may still be held, and with it autograd's node of this parameter, which knows its old shape.
        # With another type, autograd makes a new one.
        tensor.data = piece.new_empty(0, dtype=torch.float32 if piece.dtype == torch.float16 else torch.float16)
        tensor.data = piece

    # --- pieces become whole -----------------------------------------------------------------------------------------

    def gather(self, key: str, piece: Tensor) -> Tensor:
        """The whole of a tensor that lies like parameter `key`; see `Distributed.gather`."""
        if piece is (owner := self.own(key)).grad and isinstance(owner, nn.Parameter):
            check_summed("gather", [owner])
        layout, wanted, shape = self.in_use.layouts[key], everywhere(self.group.devices), self.known[key].shape
        return gather_whole(self.group, piece, layout, wanted, shape, differ=self.in_use.plan.mixes).clone()

    def full_state(self) -> dict[str, Tensor]:
        """The `state_dict` of the whole model."""
        self.check_there()
        # Who calls it alone may need no message from the others: it is to be named here, not where they meet its messages.
        self.group.agree("full_state_dict", "")
        whole = {key: self.gather(key, self.held(key)) for key in self.known}
        # Hooks of the model, and its own state_dict, may do anything with whole ones.
        with self._replaced(whole), reading_pieces():
            return dict(self.module.state_dict())

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """Within it evaluation finds parameters with the layers that could not be brought to them."""
        layouts, brought = self.in_use.layouts, {}
        for key, wanted in self.in_use.borrowed.items():
            brought[key] = redistribute(self.group, self.held(key), layouts[key], wanted, self.known[key].shape)
        with self._replaced(brought):
            yield

    @contextmanager
    def _replaced(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it, these are the numbers of parameters and buffers."""
        pieces = [(own, own.data) for own in map(self.own, others)]
        try:
            for (own, _), other in zip(pieces, others.values(), strict=True):
                own.data = other
            yield
        finally:
            for own, piece in pieces:
                own.data = piece

    # --- gradients ---------------------------------------------------------------------------------------------------

    def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
        """Scale all gradients by their norm over all devices; see `Distributed.clip_grad_norm_`."""
        rows = [(key, self.module.get_parameter(key)) for key, p in self.known.items() if p.trainable]
        check_summed("clip_grad_norm_", [p for _, p in rows])
        held = [(p.grad, self.in_use.counts(key, self.group.device)) for key, p in rows if p.grad is not None]
        norm = global_norm(self.group, held, norm_type)
        scale = max_norm / (norm + 1e-6)
        # Written so that a norm that is not a number shows in the gradients, as torch's does.
        if not scale >= 1.0:
            for g, _ in held:
                g.mul_(scale)
        dtypes = [p.dtype for _, p in rows] or [torch.float32]
        return torch.tensor(norm, dtype=reduce(torch.promote_types, dtypes), device=self.group.torch_device)


def parameters_of(model: nn.Module, traced: Mapping[bool, TracedModel]) -> dict[str, Parameter]:
    """All parameters and buffers of a model; those that no layer reads have no gradient, but belong to it."""
    rows = [*traced[True].graph.layers.values(), *traced[False].graph.layers.values()]
    known = {p.key: p for layer in rows for p in layer.parameters.values()}
    tied = _canonical(model)
    held = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    missing = [(k, t, b) for k, t, b in held if tied[k] == k and k not in known]
    return known | {k: Parameter(k, tuple(t.shape), t.requires_grad and not b, b) for k, t, b in missing}


def placeholders(model: nn.Module, device: torch.device) -> dict[int, Any]:
    """Empty tensors for the parameters and buffers of a copy that gets its pieces later."""
    empty = {id(t): torch.empty(0, dtype=t.dtype, device=device) for t in (*model.parameters(), *model.buffers())}
    return empty | {id(p): nn.Parameter(empty[id(p)], p.requires_grad) for p in model.parameters()}


def _tensor(root: nn.Module, key: str) -> Tensor:
    holder, _, name = key.rpartition(".")
    tensor = getattr(root.get_submodule(holder), name)
    assert isinstance(tensor, Tensor)
    return tensor


def _replace(root: nn.Module, old: Tensor, new: Tensor) -> None:
    """Put `new` wherever `old` stands: tied weights stay tied."""
    for module in root.modules():
        for table in (module._parameters, module._buffers):
            for name in [name for name, tensor in table.items() if tensor is old]:
                table[name] = new  # type: ignore[assignment]


def _canonical(root: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    rows = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return {key: first.setdefault(id(tensor), key) for key, tensor in rows}
