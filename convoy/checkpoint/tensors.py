"""Gathers a model's tensors on device 0, scatters them again, and writes and reads them as safetensors files.

Files are written tensor by tensor, so no device needs memory for the whole model. The safetensors library can only write all
tensors at once, so it is only used for reading. The format: the length of the header (8 bytes, little endian); the header, JSON
with type, shape and offsets of each tensor; the bytes of the tensors, without gaps.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.run_folder import Written, torch_dtype
from convoy.comm.control_messages import gather
from convoy.comm.group import AloneGroup, Group
from convoy.errors import InputError
from convoy.layout.layout import Layout, OnOne, Shape, box, everywhere
from convoy.runtime.exchange import redistribute
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import described
from convoy.runtime.shards import reading_shards

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

FIRST = OnOne(0)  # the layout of whole tensors: on the device that reads and writes files


@dataclass(frozen=True, slots=True)
class Spec:
    shape: Shape
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True)
class ModelShards:
    """The tensors of a model by their keys in `state_dict`. An ordinary model is a group of one device.

    Attributes:
        shards: the local shards, sharing memory with the model.
        shapes: of the whole tensors.
        names: the key of each parameter; tied parameters have one key.
        first_names: by key, the key in `names` of the same (tied) parameter, or the key itself.
    """

    group: Group
    shards: Mapping[str, Tensor]
    layouts: Mapping[str, Layout]
    shapes: Mapping[str, Shape]
    names: Mapping[Tensor, str]
    first_names: Mapping[str, str]

    @staticmethod
    def of(model: nn.Module) -> "ModelShards":
        """Describe a model. InputError where `state_dict` holds something that is no tensor."""
        inner = model.module if isinstance(model, Distributed) else model
        with reading_shards():
            own = inner.state_dict(keep_vars=True)
        for key, value in own.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise InputError(
                    f"state_dict() has a {kind} under {key!r}: a checkpoint holds tensors; make it a buffer"
                )
        shards = {key: tensor.detach() for key, tensor in own.items()}
        names: dict[Tensor, str] = {parameter: key for key, parameter in inner.named_parameters()}
        first_names = {key: names.get(tensor, key) for key, tensor in own.items()}
        if not isinstance(model, Distributed):
            device = next((shard.device for shard in shards.values()), torch.device("cpu"))
            shapes = {key: tuple(shard.shape) for key, shard in shards.items()}
            layouts: Mapping[str, Layout] = dict.fromkeys(shards, FIRST)
            return ModelShards(AloneGroup(device), shards, layouts, shapes, names, first_names)
        # A key without a layout is a second name of a tied buffer: every device has it.
        first = {tensor: key for key, tensor in (*inner.named_parameters(), *inner.named_buffers())}
        known = {key: first.get(tensor, key) for key, tensor in own.items()}
        everyone = everywhere(model.group.devices)
        whole = model.parameters_by_key
        shapes = {k: tuple(whole[name].shape if name in whole else own[k].shape) for k, name in known.items()}
        layouts = {key: model.layouts.get(name, everyone) for key, name in known.items()}
        return ModelShards(model.group, shards, layouts, shapes, names, first_names)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The whole tensors, in the order of `state_dict`."""
        return {key: Spec(self.shapes[key], shard.dtype) for key, shard in self.shards.items()}

    def has(self, key: str) -> bool:
        """Return whether this device has a shard of a tensor."""
        return box(self.layouts[key], self.group.device, self.shapes[key]) is not None

    def gather(self, key: str, shard: Tensor) -> Tensor:
        """Gather on device 0 the unsplit tensor of shards with the layout of `key`. Every device calls it."""
        shard = shard.to(self.group.torch_device)
        return redistribute(self.group, shard, self.layouts[key], FIRST, self.shapes[key])

    def scatter(self, key: str, whole: Tensor) -> Tensor:
        """Return the local shard of a tensor that is split like `key`; of device 0's `whole` only. Every device calls it."""
        return redistribute(self.group, whole.to(self.group.torch_device), FIRST, self.layouts[key], self.shapes[key])

    def scatter_state(self, key: str, rows: Mapping[str, Any], read: Callable[[str], Tensor]) -> dict[str, Any]:
        """Return a parameter's optimizer state, from rows of `runtime.optimizer.described`. Every device calls it.

        Args:
            rows: by state name. A number is on this device if its row has "near", else on the CPU.
            read: returns the unsplit state tensor on device 0, and any tensor of its type elsewhere.
        """
        state = {}
        for name, row in rows.items():
            state[name] = row.get("value")
            if row["kind"] == "tensor":
                # A copy: the shard may share memory with the whole tensor, or with a file.
                state[name] = self.scatter(key, read(name)).clone()
            elif row["kind"] == "number":
                near = self.group.torch_device if row.get("near") else torch.device("cpu")
                state[name] = torch.tensor(row["value"], dtype=torch_dtype(row["dtype"]), device=near)
        return state

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the parameter names of each of an optimizer's groups. InputError for parameters of another model."""
        groups = [group["params"] for group in optimizer.param_groups]
        if unknown := sum(p not in self.names for group in groups for p in group):
            raise InputError(
                f"{type(optimizer).__name__} works on {unknown} parameters that this model does not have: give the optimizer "
                "that was made from the model's parameters()"
            )
        return [[self.names[p] for p in group] for group in groups]

    def state_rows(self, optimizer: Optimizer) -> dict[str, dict[str, dict[str, Any]]]:
        """Return rows of `runtime.optimizer.described` by parameter and state name. Every device calls it and gets the same."""
        own = {}
        for parameter, state in optimizer.state.items():
            key = self.names[parameter]
            if state and self.has(key):
                own[key] = {name: described(name, value, parameter) for name, value in sorted(state.items())}
        tables = gather(self.group, "checkpoint: optimizer state", own)
        found = {key: next((t[key] for t in tables if key in t), None) for key in self.names.values()}
        return {key: rows for key, rows in found.items() if rows is not None}


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Write a new file; it is on the disk when this returns. OSError with the file's name."""
    digest, size_bytes = hashlib.sha256(), 0
    try:
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # that of an open file lacks its name
        raise OSError(error.errno, error.strerror, str(path)) from error
    return Written(size_bytes, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class TensorStream:
    """The tensors of one file in the order of `specs`. Each is gathered only when the writing device asks for it."""

    specs: Mapping[str, Spec]
    tensors: Iterator[Tensor]


def file_order(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Sort tensors by decreasing element size, so that all are aligned. InputError for types that the format lacks."""
    for name, spec in specs.items():
        if spec.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise InputError(
                f"{name!r} is {spec}: a checkpoint holds {known}; convert it, or keep it out of state_dict()"
            )
    return dict(sorted(specs.items(), key=lambda row: (-row[1].dtype.itemsize, row[0])))


def file_chunks(stream: TensorStream) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file, tensor by tensor."""
    rows, start = {}, 0
    for name, spec in stream.specs.items():
        stop = start + spec.size_bytes
        rows[name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [start, stop]}
        start = stop
    header = json.dumps({"__metadata__": {"format": "pt"}, **rows}).encode()
    header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of 8 bytes
    yield len(header).to_bytes(8, "little") + header
    for tensor in stream.tensors:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        del tensor  # the next must not arrive while this one is still held


def read_specs(path: Path) -> dict[str, Spec]:
    """Return the specs of a file's tensors by name. InputError if it is not a safetensors file, or has unsupported types."""
    names = {name: dtype for dtype, name in DTYPES.items()}
    try:
        with safe_open(path, framework="pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            return {key: Spec(tuple(s.get_shape()), names[s.get_dtype()]) for key, s in slices.items()}
    except (SafetensorError, KeyError, OSError) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error})") from None


@contextmanager
def reading(path: Path, types: Mapping[str, torch.dtype], *, here: bool) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that reads one tensor by name; on devices without the file, it returns an empty tensor."""
    if not here:
        yield lambda name: torch.empty(0, dtype=types[name])
        return
    with safe_open(path, framework="pt") as file:
        yield file.get_tensor
