"""What a node of a trace does beside giving a result: writing in place, drawing random numbers, counting batches."""

import inspect
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.model.tracing.kinds import IN_PLACE
from convoy.model.tracing.sizes import called


def has_effect(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node must stay in a trace though nobody reads its result."""
    if node.op in ("placeholder", "output"):
        return True
    return (mutates(model, node) or unsupported_in_place(node)) and written(node) is None


def written(node: fx.Node) -> fx.Node | None:
    """The parameter or buffer that an in-place call writes into, under whatever view."""
    place: Any = node
    while isinstance(place, fx.Node) and place.op in ("call_function", "call_method"):
        reads = place is node or called(place) in _VIEWS or called(place) in IN_PLACE
        place = place.args[0] if place.args and reads else None
    return place if isinstance(place, fx.Node) and place.op == "get_attr" else None


_VIEWS = frozenset(("getattr", "detach", "view", "reshape", "getitem", "flatten", "t", "transpose", "permute", "squeeze",
                    "unsqueeze", "narrow", "select", "expand", "view_as", "copy_", "zero_", "fill_"))  # fmt: skip


def counts_batches(model: nn.Module, node: fx.Node) -> bool:
    """Whether a node is the count of a batch norm whose normalisation is known for what it is (see `batch_norm_of`)."""
    holder, _, name = str(node.target).rpartition(".")
    return name == "num_batches_tracked" and isinstance(model.get_submodule(holder), _BatchNorm)


def mutates(model: nn.Module, node: fx.Node) -> bool:
    """Whether a call overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    return bool(node.kwargs.get("inplace")) or called(node) in IN_PLACE


def unsupported_in_place(node: fx.Node) -> bool:
    """Whether a call works in place and has no out-of-place form in `IN_PLACE`: `x.zero_()`, say."""
    name = called(node)
    if node.op not in ("call_function", "call_method") or name in IN_PLACE:
        return False
    return (name.endswith("_") and not name.endswith("__")) or name in _OTHER_IN_PLACE


def batch_norm_of(model: nn.Module, node: fx.Node) -> str | None:
    """Path of the batch norm whose normalisation a call of `F.batch_norm` is; None where it is none, or another one.

    So a subclass of torch's batch norm with an activation in its forward (timm's `BatchNormAct2d`) is taken apart.
    """
    if node.op != "call_function" or node.target is not nn.functional.batch_norm:
        return None
    given = inspect.signature(nn.functional.batch_norm).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    _, *tensors, training, momentum, eps = given.arguments.values()
    paths = [str(t.target) for t in tensors if isinstance(t, fx.Node) and t.op == "get_attr"]
    path = paths[0].rpartition(".")[0] if paths else ""
    norm = model.get_submodule(path)
    if not isinstance(norm, _BatchNorm):
        return None
    by_batch = norm.training or norm.running_mean is None
    noted = (norm.running_mean, norm.running_var) if not norm.training or norm.track_running_stats else (None, None)
    rows = zip(
        tensors, ("running_mean", "running_var", "weight", "bias"), (*noted, norm.weight, norm.bias), strict=True
    )
    same = all((t.target if isinstance(t, fx.Node) else t) == _path(path, n, held) for t, n, held in rows)
    # In evaluation nothing is noted, so the momentum does not matter.
    momenta = momentum == norm.momentum or not norm.training or norm.running_mean is None
    return path if same and (training, eps) == (by_batch, norm.eps) and momenta else None


def _path(module: str, name: str, held: Tensor | None) -> str | None:
    return None if held is None else f"{module}.{name}" if module else name


_OTHER_IN_PLACE = frozenset(
    ("setitem", "ipow", "imod", "imatmul", "ifloordiv", "iand", "ior", "ixor", "ilshift", "irshift", "iconcat")
)


def draws_random(node: fx.Node) -> bool:
    """Whether a function or method draws random numbers: noise, or a dropout that is switched on."""
    name = called(node)
    if name == "scaled_dot_product_attention":
        return bool(node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0))
    # dropout(x, p, training) and torchvision's stochastic_depth(x, p, mode, training)
    place = 3 if name == "stochastic_depth" else 2 if "dropout" in name else None
    if place is None:
        return name in ("bernoulli", "rand_like", "randn_like", "rrelu")
    chance = node.kwargs.get("p", node.args[1] if len(node.args) > 1 else None)
    training = node.kwargs.get("training", node.args[place] if len(node.args) > place else True)
    return not (chance == 0 or training is False)
