"""Gradients of large weights, compared without holding them: each is reduced to a thousandth as soon as autograd has it."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from convoy.model.tracing.freed_memory import give_back_freed

_WIDTH = 1024
"""So many entries become one number."""
_RTOL, _ATOL = {True: 1e-9, False: 1e-3}, {True: 1e-11, False: 1e-5}
"""As `is_close` has them for one entry, in float64 and in other types."""


class Sketches:
    """Random projections of the gradients of some parameters, which are freed at once.

    A row of `_WIDTH` entries becomes its product with one random vector, and its norm, by which two products are compared:
    what differs by more than rounding in a row's entries differs in the product, but for chance.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._found: dict[str, tuple[Tensor, Tensor]] = {}
        for key, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._take, key))  # type: ignore[no-untyped-call]

    def _take(self, key: str, parameter: Tensor) -> None:
        g = parameter.grad
        if g is None or g.layout is not torch.strided:
            return  # it is small, and compared as it is
        made, before = sketch_of(g), self._found.get(key)  # a reentrant checkpoint brings its part for itself
        parameter.grad = None
        del g
        give_back_freed()  # small tensors would lie in the hole, and the next gradient elsewhere
        self._found[key] = made if before is None else (before[0] + made[0], before[1] + made[1])

    def taken(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Those since the last question, by key."""
        found, self._found = self._found, {}
        return found


def sketch_of(g: Tensor) -> tuple[Tensor, Tensor]:
    """Products and norms of the rows of a tensor; the last row may be a shorter one."""
    flat = g.reshape(-1)
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    full = flat.numel() // _WIDTH * _WIDTH
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(_WIDTH, generator=generator, dtype=torch.float64).to(flat)
    rows, rest = flat[:full].view(-1, _WIDTH), flat[full:]
    products = torch.cat([torch.mv(rows, vector), (rest @ vector[: rest.numel()])[None]])
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(rest)[None]])
    return products, norms


def differing(
    a: Mapping[str, tuple[Tensor, Tensor]], b: Mapping[str, tuple[Tensor, Tensor]], keys: Iterable[str]
) -> str | None:
    """The first of the keys whose gradients are not the same up to rounding, or are there in one of both alone."""
    for key in keys:
        if (key in a) != (key in b) or (key in a and not _alike(a[key], b[key])):
            return key
    return None


def _alike(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    (x, _), (y, norms) = a, b
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    double = x.dtype in (torch.float64, torch.complex128)
    near = (x - y).abs() <= _ATOL[double] * _WIDTH**0.5 + _RTOL[double] * norms
    return bool((near | torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)).all())
