"""Make sharded parameters whole while a step computes with them."""

import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from convoy.layout.layout import Shape
from convoy.plan.device_program import FreeWeights, PackWeights, UnpackWeights
from convoy.runtime.exchange import Buffers
from convoy.runtime.gradients import by_device
from convoy.runtime.shards import CallGuard

_library = functools.cache(ctypes.CDLL)


class GatheredParameters:
    """Memory for whole parameters, filled from the shards of all devices.

    Args:
        model: holds the local shards, or the whole parameters during a step.
        shapes: shapes of the whole parameters, by key.
        calls: the guard that allows calls of the model's modules only during a step.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Shape], calls: CallGuard | None = None) -> None:
        self._model, self._shapes, self._calls = model, shapes, calls or CallGuard()
        self._whole: dict[str, nn.Parameter] = {}
        self._shards: dict[str, nn.Parameter] = {}  # out of the model while it has whole parameters

    @contextmanager
    def in_place(self, keys: Iterable[str]) -> Iterator[None]:
        """Replace these local shards in the model by whole parameters inside the block."""
        self._shards = {key: self._model.get_parameter(key) for key in keys}
        for key, shard in self._shards.items():
            if key not in self._whole:
                self._whole[key] = nn.Parameter(shard.detach().new_empty(self._shapes[key]), shard.requires_grad)
        self._calls.working += 1
        try:
            self._put({key: self._whole[key] for key in self._shards})
            yield
        finally:
            self._calls.working -= 1
            self._put(self._shards)
            self._shards = {}

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for key, parameter in parameters.items():
            holder, _, name = key.rpartition(".")
            self._model.get_submodule(holder)._parameters[name] = parameter

    def clear(self) -> None:
        """Free the memory of the whole parameters."""
        self._whole = {}

    def run(self, operation: PackWeights | UnpackWeights | FreeWeights, buffers: Buffers, device: int) -> None:
        """Run one operation of the program on this device."""
        match operation:
            case PackWeights():
                buffers[operation.buffer] = self._pack(operation, device)
            case UnpackWeights(alone=False):
                # `.data`: autograd must not count this as a change of tensors saved by an earlier forward.
                flats = [self._whole[key].data.view(-1) for key in operation.keys]
                places = by_device(flats, operation.shares)
                flat = buffers[operation.buffer]
                for place, arrived in zip(places, torch.split(flat, [p.numel() for p in places]), strict=True):
                    place.copy_(arrived)
            case FreeWeights(keys=keys):
                # Tensors that autograd saved are views of this memory; the next gathering restores the same values there.
                for key in keys:
                    _resize(self._whole[key], 0)
                if any(self._whole[key].device.type == "cpu" for key in keys):
                    release_freed_memory()  # else small tensors fill the holes, and the next weights need new pages

    def _pack(self, operation: PackWeights, device: int) -> Tensor:
        """Return the flat all-gather buffer, with the local shards in place."""
        own = [self._flat_shard(key) for key in operation.keys]
        if operation.own_only:
            return torch.cat(own)
        for key in operation.keys:
            _resize(self._whole[key], self._whole[key].numel())
        if operation.alone:
            flat = self._whole[operation.keys[0]].data.view(-1)
            # Connections read CPU tensors through numpy, which forbids resizing the storage later: use another storage.
            flat = from_dlpack(flat) if flat.device.type == "cpu" else flat
        else:
            flat = own[0].new_empty(operation.made)
        start = sum(sum(row[:device]) for row in operation.shares)
        for shard in own:
            flat[start : start + shard.numel()].copy_(shard)
            start += shard.numel()
        return flat

    def _flat_shard(self, key: str) -> Tensor:
        shard = self._shards.get(key)
        return (self._model.get_parameter(key) if shard is None else shard).detach().reshape(-1)


def release_freed_memory() -> None:
    """Return freed pages to the operating system if the C library has `malloc_trim` (1 ms per 100 MB)."""
    try:
        _library(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # other C libraries; Windows
        return


def _resize(parameter: Tensor, entries: int) -> None:
    storage = parameter.untyped_storage()
    if storage.nbytes() != entries * parameter.element_size():
        storage.resize_(entries * parameter.element_size())
