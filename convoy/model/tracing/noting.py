"""What calls of modules leave behind: Python state, parameters and buffers that are others afterwards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.model.tracing.outside import Outside
from convoy.model.tracing.shared_copy import is_shared, shared
from convoy.model.tracing.state import attributes_kept, state_of


@dataclass(frozen=True, slots=True)
class Notes:
    """What a call has changed.

    Attributes:
        python: attributes of modules, and what their code writes outside of them, with the values afterwards.
        tensors: parameters and buffers, with the values afterwards.
        of_norms: those among them that are the running statistics of batch norms.
    """

    python: dict[str, Any]
    tensors: dict[str, Tensor]
    of_norms: frozenset[str] = frozenset()

    @property
    def any(self) -> bool:
        """Whether it is more than running statistics, which every plan knows of."""
        return bool(self.python) or bool(self.tensors.keys() - self.of_norms)


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[Callable[[], Notes]]:
    """Restore the Python state, parameters and buffers of modules at the end; yields what tells how they have changed."""
    holder, outside = nn.ModuleList(modules), Outside(m for module in modules for m in module.modules())
    held = {key: (t, shared(t)) for key, t in (*holder.named_parameters(), *holder.named_buffers())}
    before = state_of(holder) | outside.values()

    def changes() -> Notes:
        after = state_of(holder) | outside.values()
        now = dict((*holder.named_parameters(), *holder.named_buffers()))  # a buffer may be another tensor now
        tensors = {k: t.detach().clone() for k, t in now.items() if k not in held or not _same(t, held[k][1])}
        python = {k: v for k, v in after.items() if before.get(k) != v}
        return Notes(python, tensors, frozenset(_statistics(holder)))

    try:
        with attributes_kept(holder), outside.kept():
            yield changes
    finally:
        with torch.no_grad():
            for t, old in held.values():
                if not t.is_leaf:
                    t.detach_()  # a buffer that took in what has a gradient
                if not is_shared(t, old) and not torch.equal(t, old):
                    t.data.copy_(old)


def _statistics(holder: nn.Module) -> Iterator[str]:
    for path, module in holder.named_modules():
        if isinstance(module, _BatchNorm):
            yield from (f"{path}.{key}" for key, _ in module.named_buffers())


def _same(a: Tensor, b: Tensor) -> bool:
    return is_shared(a, b) or (a.dtype == b.dtype and torch.equal(a, b))
