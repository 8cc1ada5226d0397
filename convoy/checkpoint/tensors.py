"""A safetensors file written tensor by tensor: no device needs room for the whole model to save it.

The format: eight bytes, the length of the header (little endian); the header, JSON: for each tensor its type, shape and place;
the bytes of the tensors, without gaps. The library's own writer wants all tensors at once; reading is the library's.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from convoy.checkpoint.disk import Written, new_file
from convoy.errors import InputError
from convoy.sharding.layout import Shape

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_ALIGNED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and type of a tensor that need not be here."""

    shape: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True, slots=True)
class Stream:
    """Tensors on their way into one file.

    Attributes:
        specs: by name, in the order in which the tensors come: that of `file_order`.
        tensors: one by one, as the device that writes asks for them.
    """

    specs: Mapping[str, Spec]
    tensors: Iterator[Tensor]


def file_order(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """In the order of a file: the widest types first, so that every tensor begins at a multiple of its type's width.

    Raises:
        InputError: a type that the format does not have.
    """
    for name, spec in specs.items():
        if spec.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InputError(
                f"{name!r} is {spec}: a checkpoint holds {known}; convert it, or keep it out of state_dict()"
            )
    return dict(sorted(specs.items(), key=lambda row: (-row[1].dtype.itemsize, row[0])))


def write_tensors(path: Path, stream: Stream) -> Written:
    """Write a new file; it is on the disk when this returns.

    Raises:
        OSError: with the file's name.
    """
    with new_file(path) as sink:
        sink.write(_header(stream.specs))
        for tensor in stream.tensors:
            sink.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # the next must not arrive while this one is still held
    return sink.written()


def _header(specs: Mapping[str, Spec]) -> bytes:
    rows, start = {}, 0
    for name, spec in specs.items():
        stop = start + spec.size_bytes
        rows[name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text


def read_specs(path: Path) -> dict[str, Spec]:
    """What a file holds, by name.

    Raises:
        InputError: not a safetensors file, or one with types that Convoy does not write.
    """
    names = {name: dtype for dtype, name in DTYPES.items()}
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            return {key: Spec(tuple(s.get_shape()), names[s.get_dtype()]) for key, s in slices.items()}
    except (SafetensorError, KeyError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error})") from None


@contextmanager
def reading(path: Path, types: Mapping[str, torch.dtype], *, here: bool) -> Iterator[Callable[[str], Tensor]]:
    """Gives a function that reads one tensor by its name; on a device without the file, an empty one of its type."""
    if not here:
        yield lambda name: torch.empty(0, dtype=types[name])
        return
    with safe_open(path, framework="pt") as file:
        yield file.get_tensor
