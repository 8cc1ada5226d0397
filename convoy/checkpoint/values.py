"""Settings of optimizers and schedules as JSON, and back with the same types."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from convoy.errors import InputError, shown

MOST_NUMBERS = 10_000
"""A larger tensor is no setting, and would make the JSON file unreadable."""


def encode(value: Any, what: str) -> Any:
    """Return a value as JSON. A type that JSON lacks becomes an object whose first key begins with "!".

    Args:
        what: names the value in an error, e.g. "the state of StepLR".

    Raises:
        InputError: anything but numbers, text, small tensors, and lists, tuples and mappings of them.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"!float": str(value)}
        case Tensor() if value.numel() <= MOST_NUMBERS:
            return {"!tensor": encode(value.tolist(), what), "dtype": str(value.dtype).removeprefix("torch.")}
        case list():
            return [encode(each, what) for each in value]
        case tuple():
            return {"!tuple": [encode(each, what) for each in value]}
        case Mapping() if not isinstance(value, Counter) and all(
            isinstance(key, str) and not key.startswith("!") for key in value
        ):
            return {key: encode(each, what) for key, each in value.items()}
        case Mapping():
            pairs = [[encode(key, what), encode(each, what)] for key, each in value.items()]
            return {"!counter" if isinstance(value, Counter) else "!pairs": pairs}
    size = f" of {value.numel()} numbers" if isinstance(value, Tensor) else ""
    raise InputError(
        f"{what} holds a {type(value).__name__}{size}, which a checkpoint cannot store: it stores numbers, text, tensors "
        f"of at most {MOST_NUMBERS} numbers, and lists and mappings of them; leave it out, and set it again on resume"
    )


def dtype_named(name: object) -> torch.dtype:
    """Return the torch type of a name such as "float32". ValueError where torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {shown(name)}")
    return dtype


def decode(coded: Any) -> Any:
    """Return the value that `encode` turned into this JSON. Tensors are on the CPU.

    Raises:
        ValueError, TypeError: `encode` does not make such JSON.
    """
    match coded:
        case {"!float": text}:
            return float(text)
        case {"!tensor": numbers, "dtype": dtype}:
            return torch.tensor(decode(numbers), dtype=dtype_named(dtype))
        case {"!tuple": items}:
            return tuple(decode(items))
        case {"!counter": rows}:
            return Counter(dict(decode(rows)))
        case {"!pairs": rows}:
            return dict(decode(rows))
        case dict():
            return {key: decode(each) for key, each in coded.items()}
        case list():
            return [decode(each) for each in coded]
        case _:
            return coded
