"""Finds layers whose Python decides by numbers of the whole batch: a branch on its mean, a loop until all values are small.

Random inputs may take such a branch the same way every time. So each number that Python reads out of what is computed from
the inputs is replaced by others: where the layer then goes on and does something else, its samples depend on each other.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST = 12
"""Numbers that are tried; a layer that reads more of a small batch is taken to depend on them."""

Run = Callable[[int, Sequence[Tensor]], Any]
"""(samples, inputs) -> all that a call gives and changes."""


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, the numbers that Python reads out of what is computed from some tensors are noted.

    Args:
        change: the place of a number among those, and what Python gets instead.
    """

    def __init__(self, inputs: Sequence[Tensor], change: tuple[int, Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages are held, so that no other one gets the address of one that was freed.
        self._from_inputs = {_place(t): t.untyped_storage() for t in inputs}
        self._change = change
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(_place(t) in self._from_inputs for t in given):
            written = given[:1] if func._schema.is_mutable else []
            made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
            self._from_inputs |= {_place(t): t.untyped_storage() for t in (*made, *written)}
            if isinstance(result, bool | int | float | complex):
                self.found.append(result)
                if self._change is not None and self._change[0] == len(self.found) - 1:
                    return self._change[1]
        return result


def decides_together(
    run: Run, inputs: Sequence[Tensor], batched: Sequence[bool], same: Callable[[Any, Any], bool]
) -> bool:
    """Whether the samples of a layer depend on each other by what Python reads of them.

    Args:
        run: a call of the layer from one state.
        inputs: of several samples.
        batched: which of them have a batch axis.
        same: whether two calls have given and changed the same.
    """
    samples = next((len(t) for t, b in zip(inputs, batched, strict=True) if b), 0)
    if samples < 2:
        return False
    whole = _reads(run, samples, inputs)
    if not whole:
        return False
    apart = []
    for rows in (slice(0, 2), slice(2, samples)):
        some = [t[rows] if b else t for t, b in zip(inputs, batched, strict=True)]
        apart += _reads(run, len(range(*rows.indices(samples))), some)
    if repr(whole) == repr(apart):
        return False  # it reads of each sample by itself
    if len(whole) > _MOST:
        return True
    expected = run(samples, inputs)
    return any(not same(expected, found) for found in with_others(run, samples, inputs, whole))


def with_others(run: Run, samples: int, inputs: Sequence[Tensor], read: Sequence[Any] | None = None) -> Iterator[Any]:
    """What calls of a layer give, each with another value of one of the first numbers that Python reads.

    Args:
        read: those numbers, where they are known.
    """
    read = _reads(run, samples, inputs) if read is None else read
    for place, value in enumerate(read[:_MOST]):
        for other in _others(value):
            try:
                with Reads(inputs, (place, other)):
                    found = run(samples, inputs)
            except Exception:
                continue  # a check that ends in an error, like an assertion that all is finite
            yield found


def _reads(run: Run, samples: int, inputs: Sequence[Tensor]) -> list[Any]:
    with Reads(inputs) as reads:
        run(samples, inputs)
    return list(reads.found)


def _others(value: Any) -> Iterator[Any]:
    match value:
        case bool():
            yield not value
        case int():
            yield from {0, 1, value + 1, value - 1} - {value}
        case float():
            yield from (v for v in (0.0, -value, 10 * value, value / 10, 1e3, -1e3) if v != value)
        case _:
            yield -value


def _place(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
