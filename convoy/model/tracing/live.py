"""Finds the submodules to split in a model whose own forward cannot be traced, and therefore runs in every step."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.model.nested import Arguments, CallForm, Example, arguments_of, map_tensors, tensors_of
from convoy.model.operation import Ref, TracedModel, fill, renumbered
from convoy.model.tracing.copies import written
from convoy.model.tracing.python_state import random_kept
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

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        results, given = [], list(inputs)
        for path, form, tensors in self._calls:
            own, given = given[:tensors], given[tensors:]
            args, kwargs = fill(form.arguments, own)
            results.append(self.get_submodule(path)(*args, **kwargs))
        return tuple(results)


class RecordedForward:
    """One forward of a model on its example: FLOP in total, and the calls of submodules that could be split."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        args, kwargs = map_tensors(arguments_of(example), lambda t: t.detach().cpu().clone())
        self.model, self.samples = model, samples_in((*args, *kwargs.values()))
        self._calls: dict[str, SubmoduleCall | None] = {}  # None: calls that differ
        begun: list[int] = []
        with random_kept(), torch.enable_grad(), written(model.parameters()), FlopCounterMode(display=False) as counter:
            for path, module in model.named_modules():
                if path and not isinstance(module, torch.jit.ScriptModule):
                    module.register_forward_pre_hook(lambda *_: begun.append(counter.get_total_flops()))
                    module.register_forward_hook(self._recorder(path, counter, begun), with_kwargs=True)
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
        self.flop = counter.get_total_flops()
        refuse_unregistered(tensors_of(result), [*model.parameters(), *model.buffers()])

    def _recorder(self, path: str, counter: FlopCounterMode, begun: list[int]) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            flop = counter.get_total_flops() - begun.pop()
            try:
                form, tensors = CallForm.of(module, Arguments(args, kwargs))
            except InputError:  # an argument of an unknown type
                self._calls[path] = None
                return
            call = SubmoduleCall(path, form, tensors, flop)
            before = self._calls.get(path, replace(call, flop=0))
            same = before is not None and before.signature == call.signature and bool(tensors_of(result))
            self._calls[path] = replace(call, flop=flop + before.flop) if before is not None and same else None

        return record

    def largest(self, but: Collection[str], among: Collection[str] | None = None) -> list[SubmoduleCall]:
        """Return the largest submodules that can be split, none inside another.

        Args:
            but: paths of submodules that stay whole.
            among: paths of the submodules to choose from; None: all.
        """
        found: list[SubmoduleCall] = []
        for call in sorted(filter(None, self._calls.values()), key=lambda call: -call.flop):
            rows = {t.shape[:1] for t in call.tensors}
            inside = any(is_inside(call.path, [c.path]) or is_inside(c.path, [call.path]) for c in found)
            of_modules = next(self.model.get_submodule(call.path).children(), None) is not None
            wanted = call.path in among if among is not None else call.flop >= _LEAST * self.flop
            if wanted and of_modules and not inside and rows == {(self.samples,)} and call.path not in but:
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
        live.append(TracedModel(own_graph, operations, result, seen, traced.whole, call=call.form, path=call.path))
    seen = tuple(path for path in traced.seen if is_inside(path, [call.path for call in calls]))
    return replace(traced, graph=Graph(name, graph.layers, graph.outputs), live=tuple(live), seen=seen)


class _RefsInOrder(dict[int, Ref]):
    """The new `Ref` of each number asked for, numbered in order of first use."""

    def __missing__(self, number: int) -> Ref:
        return self.setdefault(number, Ref(len(self)))


def is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether the module at a path is one of others, or inside one."""
    return any(f"{path}.".startswith(f"{other}.") for other in others)
