"""Parameters that are kept in shares: whole while a step computes with them, this device's share between steps."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import Shape
from convoy.plan.device_program import FreeWeights, HaveWeights, PackWeights, UnpackWeights
from convoy.runtime.exchange import Buffers
from convoy.runtime.freed_memory import give_back_freed
from convoy.runtime.gradients import by_device
from convoy.runtime.marks import has_changed, mark_changed
from convoy.runtime.shard_guards import CallGuard


class WholeWeights:
    """Memory for whole parameters, and the change between them and the shares.

    Args:
        model: holds this device's shares; while a step computes, the whole parameters.
        shapes: of the whole parameters, by key.
        calls: allows calls of the model's modules while a step computes.

    Attributes:
        held: the whole parameters are those of the present step, for its next pass.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, Shape], calls: CallGuard | None = None) -> None:
        self._model, self._shapes, self._calls = model, shapes, calls or CallGuard()
        self._whole: dict[str, nn.Parameter] = {}
        self._shares: dict[str, nn.Parameter] = {}  # that are out of the model meanwhile
        self._sent: dict[str, Tensor] = {}  # shares as the others were given them, where none of it is whole here
        self.held = False

    @contextmanager
    def in_place(self, keys: Iterable[str]) -> Iterator[None]:
        """Within it, the model's modules have these parameters whole."""
        self._shares = {key: self._model.get_parameter(key) for key in keys}
        whole = {key: self._of(key, share) for key, share in self._shares.items()}
        self._calls.working += 1
        try:
            self._put(whole)
            yield
        finally:
            self._calls.working -= 1
            self._put(self._shares)
            self._shares = {}

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for key, parameter in parameters.items():
            holder, _, name = key.rpartition(".")
            self._model.get_submodule(holder)._parameters[name] = parameter

    def clear(self) -> None:
        """Free the memory of the whole parameters."""
        self._whole, self._sent, self.held = {}, {}, False

    def stay(self, parameters: Collection[nn.Parameter], group: Group) -> bool:
        """Whether the whole parameters are those of the next pass, too, which then gathers none. Every device calls it.

        Args:
            parameters: those that have a gradient.
        """
        if self.held and has_changed(parameters):
            group.agree("weights that have changed between two passes", "")
            self.held = False
        if not self.held:
            mark_changed(parameters, False)
        return self.held

    def run(
        self, operation: PackWeights | UnpackWeights | HaveWeights | FreeWeights, buffers: Buffers, device: int
    ) -> None:
        """One operation of the program on this device.

        Raises:
            InputError: a share has changed since the others were given it.
        """
        match operation:
            case PackWeights():
                buffers[operation.buffer] = self._pack(operation, device)
            case UnpackWeights():
                self._unpack(operation, buffers[operation.buffer])
            case HaveWeights():
                self._check(operation, device)
            case FreeWeights():
                self._free(operation.keys)

    def _pack(self, operation: PackWeights, device: int) -> Tensor:
        """The flat buffer of a gathering, with this device's shares at their place."""
        own = [self._share(key) for key in operation.keys]
        if operation.own_only:
            flat = torch.cat(own)
            if operation.stays:
                self._sent |= zip(operation.keys, torch.split(flat, [share.numel() for share in own]), strict=True)
            return flat
        for key in operation.keys:
            _resize(self._whole[key], self._whole[key].numel())
        flat = _alias(self._whole[operation.keys[0]]) if operation.alone else own[0].new_empty(operation.made)
        start = sum(sum(row[:device]) for row in operation.shares)
        for share in own:
            flat[start : start + share.numel()].copy_(share)
            start += share.numel()
        return flat

    def _unpack(self, operation: UnpackWeights, flat: Tensor) -> None:
        """The shares of all have arrived."""
        if operation.alone:
            return
        # `.data`, because autograd must not take this for a change of what an earlier forward has kept.
        flats = [self._whole[key].data.view(-1) for key in operation.keys]
        places = by_device(flats, operation.shares)
        for place, arrived in zip(places, torch.split(flat, [p.numel() for p in places]), strict=True):
            place.copy_(arrived)

    def _share(self, key: str) -> Tensor:
        """This device's share, flat."""
        share = self._shares.get(key)
        return (self._model.get_parameter(key) if share is None else share).detach().reshape(-1)

    def _check(self, operation: HaveWeights, device: int) -> None:
        """Refuse whole parameters that are no longer what the shares make."""
        for key, shares in zip(operation.keys, operation.shares, strict=True):
            if operation.own_only:
                given = self._sent[key]
            else:
                given = self._whole[key].data.view(-1)[sum(shares[:device]) :][: shares[device]]
            if not torch.equal(_bits(given), _bits(self._share(key))):
                raise InputError(
                    f"parameter {key!r} has changed between two passes of a step, and the others were given device {device}'s "
                    "share of it before: change weights between steps, or call the distributed model's weights_changed() on "
                    "every device, and the next pass gathers them anew"
                )

    def _free(self, keys: Sequence[str]) -> None:
        """Give the memory of whole parameters back until they are gathered again. What autograd has kept of them are views of
        that memory, and find the same numbers there."""
        for key in keys:
            _resize(self._whole[key], 0)
        if any(self._whole[key].device.type == "cpu" for key in keys):
            give_back_freed()  # else small tensors come to lie in the holes, and the next weights elsewhere

    def _of(self, key: str, share: Tensor) -> nn.Parameter:
        if key not in self._whole:
            self._whole[key] = nn.Parameter(share.detach().new_empty(self._shapes[key]), share.requires_grad)
        return self._whole[key]


def _bits(x: Tensor) -> Tensor:
    """The same numbers to the last bit are equal, NaN too."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds.get(x.element_size(), torch.uint8))


def _alias(parameter: Tensor) -> Tensor:
    """The entries of a parameter as a flat tensor with a storage of its own, for the network.

    Who hands a CPU's tensor to numpy, as connections do, may no longer resize its storage.
    """
    flat = parameter.data.view(-1)
    return from_dlpack(flat) if flat.device.type == "cpu" else flat


def _resize(parameter: Tensor, entries: int) -> None:
    storage = parameter.untyped_storage()
    if storage.nbytes() != entries * parameter.element_size():
        storage.resize_(entries * parameter.element_size())
