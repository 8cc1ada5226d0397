"""Finds side effects of the nodes of a trace: writing in place, drawing random numbers, counting batches."""

import inspect
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

IN_PLACE: dict[str, str] = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv", "add_": "add", "sub_": "sub", "mul_": "mul",
    "div_": "div", "relu_": "relu", "relu6_": "relu6", "sigmoid_": "sigmoid", "tanh_": "tanh", "clamp_": "clamp",
    "leaky_relu_": "leaky_relu", "elu_": "elu", "selu_": "selu", "celu_": "celu", "hardtanh_": "hardtanh",
    "threshold_": "threshold", "dropout_": "dropout", "ipow": "pow", "imod": "mod", "ifloordiv": "floordiv",
}  # fmt: skip
"""In-place call -> the out-of-place function that replaces it in a trace."""
_OTHER_IN_PLACE = frozenset(("setitem", "imatmul", "iand", "ior", "ixor", "ilshift", "irshift", "iconcat"))
_VIEWS = frozenset(("getattr", "detach", "view", "reshape", "getitem", "flatten", "t", "transpose", "permute", "squeeze",
                    "unsqueeze", "narrow", "select", "expand", "view_as", "copy_", "zero_", "fill_"))  # fmt: skip


def called(node: fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def has_effect(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a node must stay in a trace even if its result is unused."""
    if node.op in ("placeholder", "output") or "out" in node.kwargs:
        return True
    return (mutates(model, node) or unsupported_in_place(node)) and written(node) is None


def written(node: fx.Node) -> fx.Node | None:
    """Return the parameter or buffer that an in-place call writes into, through any view."""
    place: Any = node
    while isinstance(place, fx.Node) and place.op in ("call_function", "call_method"):
        reads = place is node or called(place) in _VIEWS or called(place) in IN_PLACE
        place = place.args[0] if place.args and reads else None
    return place if isinstance(place, fx.Node) and place.op == "get_attr" else None


def counted_norm(model: nn.Module, node: fx.Node) -> str | None:
    """Return the path of the batch norm whose `num_batches_tracked` a call increments, as torch's forward does; else None."""
    held = node.args[0] if called(node) in ("add_", "iadd") and node.args[1:] == (1,) and not node.kwargs else None
    path, _, name = str(held.target).rpartition(".") if isinstance(held, fx.Node) else ("", "", "")
    return path if name == "num_batches_tracked" and isinstance(model.get_submodule(path), _BatchNorm) else None


def mutates(model: nn.Module, node: fx.Node) -> bool:
    """Return whether a call overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    return bool(node.kwargs.get("inplace")) or called(node) in IN_PLACE


def unsupported_in_place(node: fx.Node) -> bool:
    """Return whether a call works in place and has no out-of-place form in `IN_PLACE`, such as `x.zero_()`."""
    name = called(node)
    if node.op not in ("call_function", "call_method") or name in IN_PLACE:
        return False
    return (name.endswith("_") and not name.endswith("__")) or name in _OTHER_IN_PLACE


def batch_norm_of(model: nn.Module, node: fx.Node) -> str | None:
    """Return the path of the batch norm module that a call of `F.batch_norm` computes exactly, or None.

    With it, a batch norm with an activation in its forward (timm's `BatchNormAct2d`) becomes two layers.
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
    recorded = (norm.running_mean, norm.running_var) if not norm.training or norm.track_running_stats else (None, None)
    own = zip(("running_mean", "running_var", "weight", "bias"), (*recorded, norm.weight, norm.bias), strict=True)
    wanted = [None if held is None else f"{path}.{name}".lstrip(".") for name, held in own]
    same = wanted == [t.target if isinstance(t, fx.Node) else t for t in tensors]
    # In evaluation no statistics are recorded, so the momentum does not matter.
    momenta = momentum == norm.momentum or not norm.training or norm.running_mean is None
    return path if same and (training, eps) == (by_batch, norm.eps) and momenta else None


def draws_random(node: fx.Node) -> bool:
    """Return whether a function or method draws random numbers: noise, or active dropout."""
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
