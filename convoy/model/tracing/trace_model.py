"""Turns an nn.Module into a TracedModel: layer by layer where torch.fx can follow it, else with submodules kept whole.

A trace is believed only after it has computed what the model computes, on random numbers (`check.py`).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from convoy.errors import InputError
from convoy.model.operation import TracedModel
from convoy.model.tracing.check import Differs, DoesNotRun, check_same
from convoy.model.tracing.hooks import copied, mute, with_hooks
from convoy.model.tracing.layers import LayerBuilder, Verdicts, canonical_keys, noted_by_each
from convoy.model.tracing.nodes import (
    READS,
    TRACE_LOCK,
    Followed,
    Nodes,
    Untraceable,
    first_line,
    line_of_forward,
    nodes_of,
    reading_refused,
)
from convoy.model.tracing.outside import Outside
from convoy.model.tracing.per_sample import run_on_random
from convoy.model.tracing.search import keep_whole
from convoy.model.tracing.shared_copy import release, shared_tensors
from convoy.model.tracing.sizes import Spec, meta_inputs
from convoy.model.tracing.state import comparable, random_kept
from convoy.model.tracing.state_watch import modes_of
from convoy.model.tracing.values import on_meta
from convoy.model.tracing.whole import as_one_layer


def trace(
    model: nn.Module, example: Tensor | Sequence[Tensor], *, training: bool = True, like: TracedModel | None = None
) -> TracedModel:
    """Trace a model into layers and the operations that compute them. The model itself is not changed.

    Args:
        model: an ordinary module on any device, the meta device too where all layers are of known kinds; its inputs are
            tensors whose first axis is the batch.
        example: one batch of each input; only shape and dtype matter.
        training: trace what the model does in training (dropout, batch statistics, auxiliary outputs) or in evaluation.
        like: a trace of the same model in the other mode; what is one layer there is one layer here, so that both
            modes keep parameters in the same layers.

    Raises:
        InputError: the model cannot be copied, does not run on the example, returns something else than tensors, or does
            what no trace can repeat.
    """
    if isinstance(example, Mapping):
        raise InputError(
            f"the example is a dict ({', '.join(map(str, example))}): give the inputs as a tuple of tensors, in the order in "
            "which forward takes them"
        )
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    if not examples or any(not isinstance(e, Tensor) or e.dim() == 0 for e in examples):
        raise InputError("the example must be a batch: tensors whose first axis is the batch; give e.g. x[:2]")
    inner = unwrapped(model)
    lazy = [k for k, t in (*inner.named_parameters(), *inner.named_buffers()) if is_lazy(t)]
    if lazy:
        raise InputError(
            f"{lazy[0]!r} of {type(inner).__name__} has no shape yet: call the model once on a batch before it is distributed"
        )
    for path, module in inner.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise InputError(
                f"module {path or 'the model itself'!r} was made by torch.jit, which keeps its parameters to itself: "
                "distribute the module that it was made of"
            )
    try:
        local = mute(copied(inner, shared_tensors(inner)))
        local = local if _on_meta(local) else local.cpu()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(
            f"{type(inner).__name__} cannot be copied ({first_line(error)}): what is computed from parameters is no state "
            "of a module; torch.nn.utils.parametrizations has forms that can be copied"
        ) from error
    if not training or not local.training:  # frozen parts of a model in training stay as they are
        local.train(training)
    specs = [(tuple(e.shape[1:]), e.dtype) for e in examples]
    with TRACE_LOCK, random_kept(), warnings.catch_warnings(), Outside(local.modules()).kept():
        warnings.simplefilter("ignore")  # what a model warns of, it warns of when it is trained
        capture = _Capture(local, specs, [tuple(e.shape) for e in examples], training, like)
        traced = with_hooks(local, capture.run(), inner)
    modes = modes_of(local)
    release(local)
    if capture.overwrites and training:
        warnings.warn(
            f"{type(inner).__name__} overwrites its input in forward; distributed, it leaves the tensors that it is given as "
            "they are. Begin forward with x = x.clone(), and one device does so, too",
            stacklevel=2,
        )
    return replace(traced, modes=modes)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile, DataParallel or DistributedDataParallel made of it."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@dataclass(frozen=True)
class _Known:
    """What the checks of a model have found.

    Attributes:
        leaves: what must stay whole, and why.
        calls: of the trace that was checked.
        overwrites: see `_Capture`.
    """

    leaves: Mapping[str, str]
    calls: str
    verdicts: Verdicts
    overwrites: bool


_KNOWN: dict[str, _Known] = {}
_REMEMBERED = 16


class _Capture:
    """One model in one mode on its way to a trace.

    Args:
        specs: of each input, the shape of a sample and the type.
        shapes: of the examples, as they were given.

    Attributes:
        overwrites: whether the model overwrites its inputs.
        changed: paths of the attributes that its forward changes.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[Spec],
        shapes: Sequence[tuple[int, ...]],
        training: bool,
        like: TracedModel | None,
    ) -> None:
        self.model, self.specs, self.training, self.like = model, list(specs), training, like
        self.shapes = shapes
        self.meta = on_meta(model)
        self.small = self.specs
        self.why: dict[str, str] = {}
        self.followed: Followed = {}
        self.overwrites = False
        self.changed: frozenset[str] = frozenset()
        self.verdicts: dict[frozenset[str], Verdicts] = {}
        self.settled: dict[frozenset[str], tuple[Nodes, frozenset[str], TracedModel]] = {}
        self.together: list[set[str]] = []
        self.elsewhere = noted_by_each(like.graph) if like is not None else {}
        if like is not None:
            regions = [n for n, operation in like.operations.items() if operation.call == "region"]
            self.together = [{p.key for p in like.graph[n].parameters.values()} for n in regions]

    def run(self) -> TracedModel:
        given = frozenset(self.like.whole) if self.like is not None else frozenset()
        try:
            if "" in given:
                raise Untraceable("it is one layer in the other mode")
            return self._layer_by_layer(given)
        except Untraceable as reason:
            if _on_meta(self.model):
                raise self._needs_weights(str(reason)) from None
            return self._whole(str(reason))

    def _layer_by_layer(self, given: frozenset[str]) -> TracedModel:
        key = self._key(given)
        known = _KNOWN.get(key)
        if known is not None:
            nodes = nodes_of(self.model, self.meta, self.specs, known.leaves, self.followed)
            if _calls(nodes) == known.calls:
                self.why, self.overwrites = dict(known.leaves), known.overwrites
                return _with_calls(self._build(nodes, self.specs, dict(known.verdicts)), nodes)
        if (traced := self._as_in_the_other_mode()) is not None:
            return traced
        leaves = given
        if not _on_meta(self.model):
            self.small = self._smallest()
            leaves = self._with_readers(self._checked(given))
        nodes, leaves, traced = self._settled(leaves)
        if self.small != self.specs:
            small, nodes = nodes, nodes_of(self.model, self.meta, self.specs, leaves, self.followed)
            if _path(nodes) != _path(small):  # a branch on sizes goes another way: what was checked is another trace
                self.small = self.specs
                self.settled, self.verdicts = {}, {}
                nodes, leaves, traced = self._settled(self._with_readers(self._checked(leaves)))
            else:
                traced = self._build(nodes, self.specs, self.verdicts.setdefault(leaves, {}))
        verdicts = self.verdicts[leaves]
        if _on_meta(self.model):
            opaque = [name for name, layer in traced.graph.layers.items() if layer.kind == "opaque"]
            if opaque:
                raise self._needs_weights(opaque[0])
            return traced
        if len(_KNOWN) >= _REMEMBERED:
            _KNOWN.pop(next(iter(_KNOWN)))
        whole = {path: self.why.get(path, "") for path in leaves}
        _KNOWN[key] = _Known(whole, _calls(nodes), dict(verdicts), self.overwrites)
        return _with_calls(traced, nodes)

    def _as_in_the_other_mode(self) -> TracedModel | None:
        """The trace, where it makes the calls of one that was compared, and of layers that do alike in both modes."""
        if self.like is None or not self.like.calls or self.together:
            return None
        nodes = nodes_of(self.model, self.meta, self.specs, (), self.followed)
        called = [type(self.model.get_submodule(str(n.target))) for n in nodes.nodes if n.op == "call_module"]
        # Dropout is the one that hands on its very input in evaluation, so that in-place calls behind it are others.
        alike = all(cls.__module__.startswith("torch.nn") and "Dropout" not in cls.__name__ for cls in called)
        if not alike or _calls(nodes) != self.like.calls:
            return None
        verdicts: Verdicts = {}
        traced = self._build(nodes, self.specs, verdicts)
        return None if verdicts else _with_calls(traced, nodes)

    # --- what must stay whole ----------------------------------------------------------------------------------------

    def _checked(self, given: frozenset[str]) -> frozenset[str]:
        """What must stay whole for the trace to be right.

        Raises:
            Untraceable: the model itself.
        """
        nodes, leaves, small = self._settled(given)
        try:
            self._check(small)
            return leaves
        except Differs as difference:
            found = keep_whole(self._is_right, leaves, nodes.seen)
            if found is None:
                raise Untraceable(str(difference)) from None
            self.why |= dict.fromkeys(found, str(difference))
            return leaves | found

    def _is_right(self, leaves: frozenset[str]) -> bool:
        try:
            self._check(self._settled(leaves)[2])
        except (Differs, Untraceable):
            return False
        return True

    def _settled(self, leaves: frozenset[str]) -> tuple[Nodes, frozenset[str], TracedModel]:
        """The nodes with these leaves, and with those that turn out to be needed when layers are made of them."""
        asked = leaves
        while asked not in self.settled:
            nodes = nodes_of(self.model, self.meta, self.small, leaves, self.followed)
            try:
                small = self._build(nodes, self.small, self.verdicts.setdefault(leaves, {}))
                self.settled[asked] = self.settled[leaves] = (nodes, leaves, small)
            except Untraceable as reason:
                if not reason.where or reason.where in leaves:
                    raise
                self.why[reason.where] = str(reason)
                leaves |= {reason.where}
        return self.settled[asked]

    def _check(self, traced: TracedModel) -> None:
        try:
            seen = check_same(self.model, traced, self.small, training=self.training)
            self.overwrites, self.changed = seen.overwrites, seen.changed
        except DoesNotRun as error:
            raise self._does_not_run(error) from error

    def _with_readers(self, leaves: frozenset[str]) -> frozenset[str]:
        """With the submodules whose Python reads what another module changes: it may go another way after many steps.

        Raises:
            Untraceable: the model itself does so.
        """
        if not self.changed:
            return leaves
        with reading_refused(self.model, self.changed):
            nodes = nodes_of(self.model, self.meta, self.small, leaves)
        known = self._settled(leaves)[0].whole
        readers = {path: why for path, why in nodes.whole.items() if why.startswith(READS) and path not in known}
        if not readers:
            return leaves
        self.why |= readers
        return self._checked(leaves | frozenset(readers))

    def _build(self, nodes: Nodes, specs: Sequence[Spec], verdicts: Verdicts) -> TracedModel:
        named = replace(nodes, whole={**nodes.whole, **{path: why for path, why in self.why.items() if why}})
        return LayerBuilder(self.model, self.meta, named, specs, verdicts, self.together, self.elsewhere).run()

    def _smallest(self) -> list[Spec]:
        """The smallest images on which the model runs, halved and halved again: the checks take them."""
        side = min((min(shape[-2:]) for shape, _ in self.specs if len(shape) == 3), default=0)
        for parts in (16, 8, 4, 2):
            if side // parts < _SMALLEST_SIDE:
                continue
            specs = [((s[0], s[1] // parts, s[2] // parts) if len(s) == 3 else s, dtype) for s, dtype in self.specs]
            if _runs(self.model, self.meta, specs):
                return specs
        return self.specs

    # --- the model as one layer --------------------------------------------------------------------------------------

    def _whole(self, why: str) -> TracedModel:
        self.small = self._smallest()
        found: Verdicts = {}
        try:
            small = as_one_layer(self.model, self.small, why, found, self.elsewhere)
            self.overwrites = check_same(self.model, small, self.small, training=self.training).overwrites
            return as_one_layer(self.model, self.specs, why, found, self.elsewhere)
        except DoesNotRun as error:
            raise self._does_not_run(error) from error
        except Differs as difference:
            raise InputError(
                f"{type(self.model).__name__} cannot be distributed: even as one layer, {difference}. Look at its forward "
                f"({line_of_forward(self.model)}): the same input and random state must give the same numbers, and its "
                "modules must not rely on `inplace`"
            ) from None

    def _does_not_run(self, error: DoesNotRun) -> InputError:
        told = f"{type(self.model).__name__} does not run on the example ({error}): "
        norm = next((path for path, module in self.model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)
        if norm is not None:
            return InputError(
                f"{told}{norm!r} is a SyncBatchNorm; of a distributed model every batch norm takes the statistics of the whole "
                "batch: leave convert_sync_batchnorm out"
            )
        sample = [(shape, dtype) for shape, (_, dtype) in zip(self.shapes, self.specs, strict=True)]
        if _runs(self.model, self.meta, sample):
            return InputError(
                f"{told}it is one sample, {' and '.join(map(str, self.shapes))}, without the axis of the batch: give "
                "example[None], or one batch of the loader"
            )
        return InputError(f"{told}give one batch of each of its inputs, as its forward takes them")

    def _needs_weights(self, part: str) -> InputError:
        return InputError(
            f"{type(self.model).__name__} has parameters on the meta device, and a part of it must be run to know how it "
            f"treats samples ({part}): give a model with weights"
        )

    def _key(self, given: frozenset[str]) -> str:
        """All that the checks depend on, but for the values of weights."""
        rows: list[Any] = [
            self.specs,
            self.training,
            sorted(given),
            [sorted(keys) for keys in self.together],
            sorted(self.elsewhere.items()),
        ]
        rows.append(sorted(canonical_keys(self.model).items()))
        for path, module in self.model.named_modules():
            own = {k: v for k, v in vars(module).items() if k != "_modules"}
            rows.append((path, id(type(module)), comparable(own), module.training))
        for key, p in self.model.named_parameters():
            rows.append((key, p.shape, p.dtype, p.requires_grad))
        return repr(rows)


_SMALLEST_SIDE = 24


def _runs(model: nn.Module, meta: nn.Module, specs: Sequence[Spec]) -> bool:
    for module, run in ((meta, None), (model, run_on_random)):
        inputs = meta_inputs(specs, 2)
        try:
            with torch.no_grad(), torch.device("meta" if run is None else "cpu"):
                module(*inputs) if run is None else run(module, inputs, {})
        except Exception:
            continue
        return True
    return False


def _calls(nodes: Nodes) -> str:
    return "\n".join(repr((n.op, n.name, n.target, n.args, n.kwargs)) for n in nodes.nodes)


def _with_calls(traced: TracedModel, nodes: Nodes) -> TracedModel:
    if traced.whole or any(layer.kind == "opaque" for layer in traced.graph.layers.values()):
        return traced
    return replace(traced, calls=_calls(nodes))


def _path(nodes: Nodes) -> list[Any]:
    """What is called in which order, whatever the numbers among the arguments."""
    return [(n.op, n.name, str(n.target), [each.name for each in n.all_input_nodes]) for n in nodes.nodes]


def _on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())
