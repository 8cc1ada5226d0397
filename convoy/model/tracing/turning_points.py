"""Finds the numbers of samples at which Python decides otherwise: `if x.shape[0] > 32`, `len(x) % 64`, `min(n, 100)`.

Sizes that are read from tensors are numbers that remember how they follow the number of samples.
"""

import builtins
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LARGEST = 1024
"""Decisions at more samples than these cannot be tried."""
FAR = 64
"""Tried wherever a size is read: what becomes of it in functions of C (`math.log`) cannot be followed."""
_ASKED = 16
"""Decisions that a line makes, in a loop."""
_PRIMES = (11, 13, 17, 19, 23)
_TORCH = str(Path(torch.__file__).parent)
_SIZES = (Tensor.size, Tensor.numel, Tensor.nelement)

PLAIN_LEN = len
Follows = Callable[[int], Any]
"""A number for so many samples."""


@contextmanager
def counting(kind: type, count: Callable[[Any], Any]) -> Iterator[None]:
    """While it is on, `len(x)` in this thread gives `count(x)` of such values; by `__len__` it would be a plain number."""
    before, thread = builtins.len, threading.get_ident()

    def length(x: Any) -> Any:
        return count(x) if isinstance(x, kind) and threading.get_ident() == thread else before(x)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = before


class Undecided(Exception):  # noqa: N818 - it ends one check, not the program
    """A decision for more samples than can be tried, or in a way that cannot be followed."""


def turning_points(run: Callable[[int], Any], extents: Collection[int]) -> list[int]:
    """Numbers of samples for which Python decides otherwise than for one sample less, the first of each decision.

    Args:
        run: calls what is asked about with so many samples.
        extents: of the axes of its inputs, that the number of samples is none of them.

    Raises:
        Undecided: nobody can tell.
    """
    samples = next((p for p in _PRIMES if all(e % p for e in extents)), _PRIMES[-1])
    watch = _Watch(samples)
    with counting(Tensor, watch.length), watch:
        run(watch.number(lambda n: n))
    return sorted(watch.points)


class _Watch(TorchFunctionMode):
    """While it is on, sizes that are read are followed, and decisions on them noted."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples, self.points = samples, set[int]()
        self._asked: Counter[tuple[str, int]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if not isinstance(value, torch.Size) and func not in _SIZES:
            return value
        if not _in_torch(sys._getframe(1)):
            self.points.add(FAR)
        return torch.Size(map(self.extent, value)) if isinstance(value, torch.Size) else self.extent(value)

    def length(self, x: Tensor) -> int:
        self.points.add(FAR)
        return self.extent(PLAIN_LEN(x))

    def extent(self, extent: int) -> int:
        if extent % self.samples:
            return extent
        each = extent // self.samples
        return self.number(lambda n: each * n)  # type: ignore[no-any-return]

    def number(self, of: Follows) -> Any:
        value = of(self.samples)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        made: Any = (_Whole if isinstance(value, int) else _Real)(value)
        made.of, made.watch = of, self
        return made

    def decide(self, of: Follows, *, steps: bool = False) -> None:
        """Note where a number that Python asks for jumps.

        Args:
            steps: it goes on jumping: it is a quotient, not an answer.
        """
        frame = sys._getframe(2)
        place = (frame.f_code.co_filename, frame.f_lineno)
        self._asked[place] += 1
        if _in_torch(frame) or self._asked[place] > _ASKED:
            return
        values = [_or_error(of, n) for n in range(1, LARGEST + 1)]
        jumps = [n + 1 for n in range(1, LARGEST) if values[n] != values[n - 1]]
        if not jumps and not steps and any(_or_error(of, LARGEST << k) != values[-1] for k in range(1, 12)):
            raise Undecided(f"it decides at more than {LARGEST} samples")
        self.points.update(jumps[:2])


def _in_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)


def _or_error(of: Follows, samples: int) -> Any:
    try:
        return of(samples)
    except ArithmeticError as error:
        return type(error)


class _Followed:
    of: Follows
    watch: _Watch

    def __hash__(self) -> int:
        if not _in_torch(sys._getframe(1)):
            raise Undecided("it looks the number of samples up")
        return hash(self.of(self.watch.samples))

    def __bool__(self) -> bool:
        self.watch.decide(lambda n: bool(self.of(n)))
        return bool(self.of(self.watch.samples))


def _at(value: Any, samples: int) -> Any:
    return value.of(samples) if isinstance(value, _Followed) else value


def _made(name: str, plain: Callable[[Any, Any], Any], reflected: bool) -> Callable[[Any, Any], Any]:
    asks, steps = name in _ASKING, name in _STEPPING

    def call(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented

        def of(n: int) -> Any:
            a, b = _at(self, n), _at(other, n)
            return plain(b, a) if reflected else plain(a, b)

        if asks or steps:
            self.watch.decide(of, steps=steps)
        return self.watch.number(of)

    return call


_ASKING = ("lt", "le", "gt", "ge", "eq", "ne")
_STEPPING = ("floordiv", "mod")
_MAKING = ("add", "sub", "mul", "truediv", "pow")
for _name in (*_ASKING, *_STEPPING, *_MAKING):
    setattr(_Followed, f"__{_name}__", _made(_name, getattr(operator, _name), reflected=False))
    if _name not in _ASKING:
        setattr(_Followed, f"__r{_name}__", _made(_name, getattr(operator, _name), reflected=True))


class _Whole(_Followed, int):
    pass


class _Real(_Followed, float):
    pass
