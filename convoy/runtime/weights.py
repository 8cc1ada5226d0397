"""Manage one device's weights: the layout of each parameter and buffer, and the local shards."""

import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils.dlpack import from_dlpack

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import Boxes, Layout, OnOne, Replicated, Shape, Split, box, everywhere, holders, local_shape
from convoy.model.graph import Graph, Parameter
from convoy.model.tracing import TracedModel
from convoy.model.tracing.copies import carry_over, copied
from convoy.model.tracing.layer_builder import canonical_keys
from convoy.plan.device_program import FreeWeights, PackWeights, UnpackWeights
from convoy.plan.placing import borrowed, parameter_layouts, pin, placements
from convoy.plan.plan import Plan
from convoy.runtime import shards
from convoy.runtime.exchange import Buffers, Slots, redistribute
from convoy.runtime.gradients import Worker, by_device

# --- layouts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanInUse:
    """A plan for one graph, and the layouts of parameters and buffers, by their key in `state_dict`.

    Attributes:
        borrowed: parameters that this graph needs on other devices than the training graph, and their layout there.
        whole: for each parameter and buffer, whether every device holds all of it.
        boxed: the inputs of which devices hold boxes of each sample.
    """

    plan: Plan
    layouts: Mapping[str, Layout]
    whole: Mapping[str, bool]
    boxed: frozenset[str] = frozenset()
    borrowed: Mapping[str, Layout] = field(default_factory=dict)

    def to(self, traced: TracedModel, trained: Graph) -> "PlanInUse":
        """Return the plan for another trace, also of a submodule. Strategies, shares and layouts are those of `trained`."""
        pinned = pin(self.plan, trained, traced.graph)
        if traced.path:
            pinned = replace(pinned, outputs="everywhere")
        return replace(self, plan=pinned, borrowed=borrowed(pinned, self.plan, trained, traced.graph))

    def lent_whole(self, graph: Graph) -> dict[str, Layout]:
        """Return the sharded parameters that are in no layer of a graph, and a layout with all of each on every device."""
        read = {p.key for layer in graph.layers.values() for p in layer.parameters.values()}
        return {
            key: everywhere(self.plan.devices) for key, whole in self.whole.items() if not whole and key not in read
        }

    def counts(self, key: str, device: int) -> bool:
        """Return whether this device adds a parameter to a norm: it has a shard, or is the first with a copy."""
        return isinstance(self.layouts[key], Split) or holders(self.layouts[key])[0] == device


def plan_in_use(
    plan: Plan, trained: Graph, evaluated: Graph, known: Mapping[str, Parameter], devices: int
) -> PlanInUse:
    """Derive the layouts of a plan. Parameters and buffers that no layer reads are replicated."""
    # Training decides; evaluation adds the layouts of layers that only it has.
    layouts: dict[str, Layout] = {key: everywhere(devices) for key in known}
    layouts |= parameter_layouts(pin(plan, trained, evaluated), evaluated) | parameter_layouts(plan, trained)
    whole = {k: isinstance(how, Replicated) and len(how.devices) == devices for k, how in layouts.items()}
    placed = placements(plan, trained)
    boxed = (layer.name for layer in trained.inputs if isinstance(placed[layer.name].gives, Boxes))
    return PlanInUse(plan, layouts, whole, frozenset(boxed))


# --- the local shards --------------------------------------------------------------------------------------------------


class Weights:
    """The parameters and buffers of one device. Methods that take or return whole tensors are collective.

    Attributes:
        to_come: keys without values yet, because the model was built on the meta device.
    """

    def __init__(self, group: Group, module: nn.Module, known: Mapping[str, Parameter], in_use: PlanInUse) -> None:
        self.group, self.module, self.known, self.in_use = group, module, known, in_use
        self.to_come: set[str] = set()

    def own(self, key: str) -> Tensor:
        """Return the local shard, the module's own tensor object."""
        return attrgetter(key)(self.module)  # type: ignore[no-any-return]

    def check_loaded(self) -> None:
        if self.to_come:
            raise InputError(
                f"the model was built on the meta device, and {len(self.to_come)} of its parameters and buffers "
                f"({min(self.to_come)!r}, say) have no values yet: call load_state_dict() on every device; with "
                "load_state_dict(torch.load(file, mmap=True)) each device reads only its shards"
            )

    # --- from whole parameters to shards -----------------------------------------------------------------------------

    def cut(self, original: nn.Module) -> None:
        """Shard device 0's weights, parameter by parameter. Hooks stay on their parameters.

        If `original` is the module itself, replicated parameters stay the same objects, and split ones are retired.
        """
        here = self.group.torch_device
        rows = [(key, attrgetter(key)(original)) for key in self.known]
        self.to_come = set(gather(self.group, "weights without values", [key for key, t in rows if t.is_meta])[0])
        for key, old in rows:
            if old.is_complex() and old.requires_grad and self.in_use.whole[key] and self.group.devices > 1:
                raise InputError(
                    f"parameter {key!r} is complex: its gradients cannot be summed over devices. Store it as a real parameter "
                    "with a last axis of 2, and use torch.view_as_complex in forward"
                )
            if key in self.to_come:
                shape = local_shape(self.in_use.layouts[key], self.group.device, self.known[key].shape)
                shard = torch.empty(shape, dtype=old.dtype, device=here)
            else:
                empty = torch.empty(0, dtype=old.dtype, device=here)
                whole = old.detach().to(here) if self.group.device == 0 else empty
                shard = redistribute(
                    self.group, whole, OnOne(0), self.in_use.layouts[key], self.known[key].shape
                ).clone()
            if original is self.module and self.in_use.whole[key] and not old.is_meta:
                self.put(key, shard)
                continue
            if not self.known[key].buffer:
                shard = nn.Parameter(shard, requires_grad=old.requires_grad)
                carry_over(shard, old)
            own = self.own(key)
            for table in (table for m in self.module.modules() for table in (m._parameters, m._buffers)):
                for name in [name for name, tensor in table.items() if tensor is own]:  # tied weights stay tied
                    table[name] = shard  # type: ignore[assignment]
            if original is self.module:
                shards.retire(old, key)
        shards.guard_state_dicts(self.module)
        release_freed_memory()  # tracing has used it

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
        """Copy the local shards of whole weights. Return the missing and the unexpected keys."""
        with shards.reading_shards():
            tied, known = canonical_keys(self.module), self.module.state_dict()
        missing = [key for key in known if key not in state_dict]
        unexpected = [key for key in state_dict if key not in known]
        nothing = bool(known) and len(missing) == len(known)
        if nothing or (strict and (missing or unexpected)):
            raise InputError(
                f"load_state_dict: keys {missing} are missing, {unexpected} are unknown: give all of the model's ordinary "
                "keys (without 'module.'), or strict=False"
            )
        for key in filter(state_dict.__contains__, known):
            holder, _, name = key.rpartition(".")
            if tied.get(key, key) in self.known:
                self._load(key, tied.get(key, key), state_dict[key])
            elif name == "_extra_state":
                self.module.get_submodule(holder).set_extra_state(state_dict[key])
            else:
                raise InputError(
                    f"load_state_dict: {key!r} is not a parameter or buffer; a hook on state_dict, or the model's own "
                    "state_dict, adds it: load the weights before distribute()"
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
            self.own(parameter).detach().copy_(whole.detach()[tuple(slice(*span) for span in here)])
        self.to_come.discard(parameter)

    def put(self, key: str, shard: Tensor) -> None:
        """Replace the data of the module's tensor by another shard, of any shape, and drop its gradient."""
        tensor = self.own(key)
        # The gradient's shape would be wrong. Callers that need it have read it already.
        tensor.grad = None
        # The last step's loss may still hold this parameter's autograd node, with the old shape. Changing the dtype for a
        # moment makes autograd create a new node.
        tensor.data = shard.new_empty(0, dtype=torch.float32 if shard.dtype == torch.float16 else torch.float16)
        tensor.data = shard

    # --- from shards to whole parameters -----------------------------------------------------------------------------

    def gather(self, key: str, shard: Tensor) -> Tensor:
        if shard is (owner := self.own(key)).grad and isinstance(owner, nn.Parameter):
            shards.check_summed("gather", [owner])
        layout, wanted, shape = self.in_use.layouts[key], everywhere(self.group.devices), self.known[key].shape
        return redistribute(self.group, shard, layout, wanted, shape).clone()

    def full_state(self) -> dict[str, Tensor]:
        self.check_loaded()
        # Fail here if only one device calls this: it might need no message, and the others would fail later.
        self.group.agree("full_state_dict", "")
        whole = {key: self.gather(key, self.own(key).detach()) for key in self.known}
        # Hooks on state_dict, and the model's own state_dict, expect whole tensors.
        with self._replaced(whole), shards.reading_shards():
            return dict(self.module.state_dict())

    def whole_copy(self, guard: shards.CallGuard, *, values: bool) -> nn.Module:
        """Return a copy with whole parameters (on meta unless `values`), without this guard. Every device must call it."""
        memo: dict[int, Any] = {id(guard): guard}
        kept = (value for module in self.module.modules() for value in vars(module).values())
        # Tensors that a forward has kept, which deepcopy refuses.
        memo |= {id(t): t.detach() for t in kept if isinstance(t, Tensor) and not t.is_leaf}
        for key, parameter in self.known.items():
            own = self.own(key)
            meta = torch.empty(parameter.shape, dtype=own.dtype, device="meta")
            memo[id(own)] = whole = self.gather(key, own.detach()) if values else meta
            if not parameter.buffer:
                memo[id(own)] = nn.Parameter(whole, own.requires_grad)
                carry_over(memo[id(own)], own)
        made = copied(self.module, memo)
        for hooks in [m._forward_pre_hooks for m in made.modules()]:
            for number in [number for number, hook in hooks.items() if hook is guard]:
                del hooks[number]
        return made

    @contextmanager
    def borrowing(self, others: Mapping[str, Layout]) -> Iterator[None]:
        """Move parameters to the devices that compute with them in evaluation, inside the block. `others`: their layouts."""
        layouts, brought = self.in_use.layouts, {}
        for key, wanted in others.items():
            brought[key] = redistribute(self.group, self.own(key).detach(), layouts[key], wanted, self.known[key].shape)
        with self._replaced(brought):
            yield

    @contextmanager
    def _replaced(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        kept = [(own, own.data) for own in map(self.own, others)]
        try:
            for (own, _), other in zip(kept, others.values(), strict=True):
                own.data = other
            yield
        finally:
            for own, shard in kept:
                own.data = shard


def parameters_of(model: nn.Module, traced: Mapping[bool, TracedModel]) -> dict[str, Parameter]:
    rows = [*traced[True].graph.layers.values(), *traced[False].graph.layers.values()]
    known = {p.key: p for layer in rows for p in layer.parameters.values()}
    tied = canonical_keys(model)
    held = [(k, p, False) for k, p in model.named_parameters()] + [(k, b, True) for k, b in model.named_buffers()]
    missing = [(k, t, b) for k, t, b in held if tied[k] == k and k not in known]
    return known | {k: Parameter(k, tuple(t.shape), t.requires_grad and not b, b) for k, t, b in missing}


def copied_without_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a deep copy with empty parameters and buffers, which `Weights.cut` then fills with shards."""
    empty = {id(t): torch.empty(0, dtype=t.dtype, device=device) for t in (*model.parameters(), *model.buffers())}
    return copied(model, empty | {id(p): nn.Parameter(empty[id(p)], p.requires_grad) for p in model.parameters()})


# --- whole parameters during a step -------------------------------------------------------------------------------------

_library = functools.cache(ctypes.CDLL)


class GatheredParameters:
    """Memory for whole parameters, filled from the shards of all devices. During a step they are the model's parameters.

    All executors of a model share it, with receive buffers (`slots`) and the thread (`worker`) for gradient sums.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Shape], calls: shards.CallGuard) -> None:
        self.slots, self.worker = Slots(), Worker("convoy-sums")
        self._model, self._shapes, self._calls = model, shapes, calls
        self._whole: dict[str, nn.Parameter] = {}
        self._shards: dict[str, nn.Parameter] = {}  # replaced in the model by whole parameters

    @contextmanager
    def in_place(self, keys: Iterable[str]) -> Iterator[None]:
        """Replace these local shards in the model by whole parameters inside the block."""
        self._shards = {key: self._model.get_parameter(key) for key in keys}
        for key, shard in self._shards.items():
            if key not in self._whole:
                self._whole[key] = nn.Parameter(shard.detach().new_empty(self._shapes[key]), shard.requires_grad)
            self._whole[key].requires_grad_(shard.requires_grad)
        self._calls.working += 1
        try:
            self._put({key: self._whole[key] for key in self._shards})
            yield
        finally:
            self._calls.working -= 1
            self._put(self._shards)
            self._shards = {}

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for key, parameter in parameters.items():
            holder, _, name = key.rpartition(".")
            self._model.get_submodule(holder)._parameters[name] = parameter

    def clear(self) -> None:
        self._whole = {}

    def run(self, operation: PackWeights | UnpackWeights | FreeWeights, buffers: Buffers, device: int) -> None:
        match operation:
            case PackWeights():
                buffers[operation.buffer] = self._pack(operation, device)
            case UnpackWeights(alone=False):
                # `.data` hides this from autograd, which would see a change of tensors saved by an earlier forward.
                flats = [self._whole[key].data.view(-1) for key in operation.keys]
                places = by_device(flats, operation.shares)
                flat = buffers[operation.buffer]
                for place, arrived in zip(places, torch.split(flat, [p.numel() for p in places]), strict=True):
                    place.copy_(arrived)
            case FreeWeights(keys=keys):
                # Tensors that autograd saved are views of this memory; the next gathering restores the same values there.
                for key in keys:
                    _resize(self._whole[key], 0)
                if any(self._whole[key].device.type == "cpu" for key in keys):
                    release_freed_memory()  # else small tensors fill these pages, and the next weights need new ones

    def _pack(self, operation: PackWeights, device: int) -> Tensor:
        found = [self._shards.get(key) for key in operation.keys]
        held = [self._model.get_parameter(k) if p is None else p for k, p in zip(operation.keys, found, strict=True)]
        own = [shard.detach().reshape(-1) for shard in held]
        if operation.own_only:
            return torch.cat(own)
        for key in operation.keys:
            _resize(self._whole[key], self._whole[key].numel())
        if operation.alone:
            flat = self._whole[operation.keys[0]].data.view(-1)
            # Connections read CPU tensors through numpy, which forbids resizing the storage later: use another storage.
            flat = from_dlpack(flat) if flat.device.type == "cpu" else flat
        else:
            flat = own[0].new_empty(operation.made)
        start = sum(sum(row[:device]) for row in operation.shares)
        for shard in own:
            flat[start : start + shard.numel()].copy_(shard)
            start += shard.numel()
        return flat


def release_freed_memory() -> None:
    """Return freed pages to the operating system if the C library has `malloc_trim` (1 ms per 100 MB)."""
    try:
        _library(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # other C libraries; Windows
        return


def _resize(parameter: Tensor, entries: int) -> None:
    storage = parameter.untyped_storage()
    if storage.nbytes() != entries * parameter.element_size():
        storage.resize_(entries * parameter.element_size())
