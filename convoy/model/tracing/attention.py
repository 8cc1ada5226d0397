"""torch's attention as the calls that it stands for: queries, keys and values by filter, then each head for itself."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from convoy.model.tracing.kinds import has_hooks


def is_by_heads(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is attention of rows of the batch without masks or dropout, which `attend` computes as torch does."""
    if type(module) is not nn.MultiheadAttention or not module.batch_first or not module._qkv_same_embed_dim:
        return False
    if module.bias_k is not None or module.add_zero_attn or (module.dropout and module.training):
        return False
    if type(module.out_proj) is not NonDynamicallyQuantizableLinear or has_hooks(module.out_proj):
        return False  # torch never calls it, it reads its weight
    given = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs).arguments
    plain = all(given.get(name) is None for name in ("key_padding_mask", "attn_mask")) and not given.get("is_causal")
    inputs = [given[name] for name in ("query", "key", "value")]
    return plain and all(isinstance(x, fx.Proxy) and _axes(x) == 3 for x in inputs)


def _axes(x: fx.Proxy) -> int | None:
    shape = x.tracer.sizes.shape(x.node)  # type: ignore[attr-defined]
    return None if shape is None else len(shape)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: None = None,  # noqa: ARG001
    need_weights: bool = True,
    attn_mask: None = None,  # noqa: ARG001
    average_attn_weights: bool = True,
    is_causal: bool = False,  # noqa: ARG001
) -> tuple[Any, Any]:
    """Output (samples, queries, features), and the weights where they are asked for; nobody computes what nobody reads."""
    heads = []
    for number, x in enumerate((query, key, value)):
        rows = slice(number * module.embed_dim, (number + 1) * module.embed_dim)
        bias = None if module.in_proj_bias is None else module.in_proj_bias[rows]
        projected: Any = F.linear(x, module.in_proj_weight[rows], bias)
        heads.append(projected.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
    q, k, v = heads
    y = module.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    if not need_weights:
        return y, None
    weights = (q @ k.transpose(-2, -1) / math.sqrt(module.head_dim)).softmax(-1)
    return y, weights.mean(1) if average_attn_weights else weights
