"""Finds the submodules to split in a model whose own forward cannot be traced, and therefore runs in every step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.model.nested import Arguments, CallForm, Example, arguments_of, map_tensors, tensors_of
from convoy.model.operation import Ref, TracedModel, fill, renumbered
from convoy.model.tracing.copies import hooked, written
from convoy.model.tracing.python_state import REGISTERED, State, changed, random_kept, settings, subtree
from convoy.model.tracing.trials import first_line, refuse_unregistered

_LEAST = 0.03
"""The smallest share of the arithmetic for which a submodule is split."""


@dataclass(frozen=True)
class SubmoduleCall:
    """The calls of one submodule in a forward, all with arguments of the same form and shapes."""

    path: str
    form: CallForm
    tensors: Sequence[Tensor]
    flop: int = 0

    @property
    def signature(self) -> tuple[Any, ...]:
        return str(self.form), *((t.shape, t.dtype) for t in self.tensors)


class LiveModel(nn.Module):
    """The split submodules of a model, under their paths there. Its forward calls each with inputs of its own."""

    def __init__(self, model: nn.Module, calls: Sequence[SubmoduleCall]) -> None:
        super().__init__()
        self._modules, self.training = dict(model._modules), model.training
        self._calls = [(call.path, call.form, len(call.tensors)) for call in calls]
        self.paths = [call.path for call in calls]

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        results, given = [], list(inputs)
        for path, form, tensors in self._calls:
            own, given = given[:tensors], given[tensors:]
            args, kwargs = fill(form.arguments, own)
            results.append(self.get_submodule(path)(*args, **kwargs))
        return tuple(results)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts FLOP, and finds modules whose parameters or buffers are used while the module is not called.

    FlopCounterMode would refuse modules that are called under torch.no_grad().

    Attributes:
        begun: path of a module -> for each of its calls that has not ended, the FLOP before it.
        found: paths of the modules found.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.begun: dict[str, list[int]] = {}
        self.found: set[str] = set()
        self.flop = 0
        self._owners: dict[int, set[str]] = {}
        for key, t in held:
            parts = key.split(".")[:-1]
            around = (".".join(parts[: i + 1]) for i in range(len(parts)))
            self._owners.setdefault(t.untyped_storage()._cdata, set()).update(around)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tensors_of([args, kwargs]):
            owners = self._owners.get(t.untyped_storage()._cdata, ())
            self.found |= {path for path in owners if not self.begun.get(path)}
        made, count = func(*args, **(kwargs or {})), flop_registry.get(func._overloadpacket)
        self.flop += 0 if count is None else count(*args, **(kwargs or {}), out_val=made)
        return made


class RecordedForward:
    """One forward of a model on its example: FLOP in total, and the calls of submodules that could be split."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        args, kwargs = map_tensors(arguments_of(example), lambda t: t.detach().cpu().clone())
        self.model, self.samples = model, samples_in((*args, *kwargs.values()))
        self._calls: dict[str, SubmoduleCall | None] = {}  # None: calls that differ
        # The code of a hook may read the weights of its module, and of those inside.
        self._hooked = [path for path, module in model.named_modules() if path and hooked(module)]
        state = State(dict(model.named_modules()))
        before = state.forms()
        self._settings = {name: held[key] for name, held, key in settings(dict(model.named_modules()))}
        with random_kept(), torch.enable_grad(), written(model.parameters()), _Uses(model) as uses:
            for path, module in model.named_modules():
                if path and not isinstance(module, torch.jit.ScriptModule):
                    begun: list[int] = uses.begun.setdefault(path, [])
                    module.register_forward_pre_hook(lambda *_, begun=begun: begun.append(uses.flop))
                    module.register_forward_hook(partial(self._record, path, uses), with_kwargs=True)
            try:
                result = model(*args, **kwargs)
            except Exception as error:
                name = next((path for path, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)), None)
                raise InputError(
                    f"{type(model).__name__} does not run on the example: {first_line(error)}. Give one batch, as its "
                    "forward takes it (prepare: by call=); of one sample, x[None]. Hooks do not run"
                    if name is None
                    else f"{name!r} is a SyncBatchNorm; all batch norms of a distributed model have the statistics of the "
                    "global batch: leave convert_sync_batchnorm out"
                ) from error
        self.flop = uses.flop
        refuse_unregistered(tensors_of(result), [*model.parameters(), *model.buffers()])
        names = changed(before, state.forms())
        if made := next((name.removesuffix(REGISTERED) for name in names if name.endswith(REGISTERED)), None):
            raise InputError(
                f"the forward of module {made or 'the model itself'!r} makes or removes parameters, buffers or submodules: "
                "call the model once on a batch before it is distributed; if it does so in every call, make them in __init__"
            )
        self._used, self._changed = uses.found, {name.rpartition(".")[2] for name in names}

    def _record(self, path: str, uses: _Uses, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        flop = uses.flop - uses.begun[path].pop()
        try:
            form, tensors = CallForm.of(module, Arguments(args, kwargs))
        except InputError:  # an argument of an unknown type
            tensors = []
        rows = settings(subtree(self.model, path))
        unlike = any(held[key] != self._settings.get(name) for name, held, key in rows)
        # Hooks on what autograd keeps, such as those of checkpoint, cannot be in a step.
        if not tensors or unlike or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._calls[path] = None
            return
        call = SubmoduleCall(path, form, tensors, flop)
        before = self._calls.get(path, replace(call, flop=0))
        same = before is not None and before.signature == call.signature and bool(tensors_of(result))
        self._calls[path] = replace(call, flop=flop + before.flop) if before is not None and same else None

    def largest(self, without: Collection[str], among: Collection[str] | None = None) -> list[SubmoduleCall]:
        """Return the largest submodules that can be split, none inside another.

        Args:
            without: paths of modules that cannot be traced, so that no module around them can.
            among: paths of the submodules to choose from; None: all.
        """
        found: list[SubmoduleCall] = []
        for call in sorted(filter(None, self._calls.values()), key=lambda call: -call.flop):
            rows = {t.shape[:1] for t in call.tensors}
            overlaps = any(is_inside(call.path, [c.path]) or is_inside(c.path, [call.path]) for c in found)
            wanted = call.path in among if among is not None else call.flop >= _LEAST * self.flop
            possible = (
                rows == {(self.samples,)} and call.path not in self._used and not is_inside(call.path, self._hooked)
            )
            possible = possible and not any(is_inside(path, [call.path]) for path in (*without, *self._hooked))
            # A trace would fix what the code reads and another forward changes.
            if wanted and possible and not overlaps and not State(subtree(self.model, call.path)).names & self._changed:
                found.append(call)
        return found

    def note(self, traced: TracedModel, why: str) -> str:
        """Return what runs on every device, and why."""
        split = sum(layer.flop for layer in traced.graph.layers.values()) * self.samples
        paths = ", ".join(part.path for part in traced.live or ())
        part = f" ({1 - split / max(1, self.flop):.0%} of the arithmetic)" if paths else ""
        text = f"the forward of {type(self.model).__name__} runs on every device{part}, because {why}"
        return f"{text}; split: {paths}" if paths else text


def samples_in(arguments: Sequence[Any]) -> int:
    """Return the number of samples in a batch: the length of the first argument, which may be in a dict."""
    first = next(iter(arguments), None)
    while isinstance(first, Mapping):
        first = next(iter(first.values()), None)
    return len(first) if isinstance(first, list | tuple) or (isinstance(first, Tensor) and first.dim()) else -1


def live_model(traced: TracedModel, calls: Sequence[SubmoduleCall], name: str) -> TracedModel:
    """Return the trace of a `LiveModel` with the trace of each submodule in `live`."""
    graph, inputs, live = traced.graph, [layer.name for layer in traced.graph.inputs], []
    for call, form in zip(calls, traced.result, strict=True):
        refs = _RefsInOrder()
        result = renumbered(form, refs)
        outputs = tuple(graph.outputs[i] for i in refs)
        own, inputs = inputs[: len(call.tensors)], inputs[len(call.tensors) :]
        needed = {*own, *outputs}
        for layer in reversed(list(graph.layers.values())):
            needed |= set(layer.inputs) if layer.name in needed else set()
        layers = {key: layer for key, layer in graph.layers.items() if key in needed}
        operations = {key: traced.operations[key] for key in layers}
        seen = tuple(path for path in traced.seen if is_inside(path, [call.path]))
        own_graph = Graph(name, layers, outputs)
        live.append(TracedModel(own_graph, operations, result, seen, call=call.form, path=call.path))
    seen = tuple(path for path in traced.seen if is_inside(path, [call.path for call in calls]))
    return replace(traced, graph=Graph(name, graph.layers, graph.outputs), live=tuple(live), seen=seen)


class _RefsInOrder(dict[int, Ref]):
    """The new `Ref` of each number asked for, numbered in order of first use."""

    def __missing__(self, number: int) -> Ref:
        return self.setdefault(number, Ref(len(self)))


def is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether the module at a path is one of others, or inside one."""
    return any(f"{path}.".startswith(f"{other}.") for other in others)
