"""ModuleOfPieces: what one can do with the parameters of a distributed model, and what torch's own methods do on pieces."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.runtime.alike import check_copies
from convoy.runtime.marks import mark_changed, mark_pieces
from convoy.runtime.plan_in_use import PlanInUse
from convoy.runtime.shard_guards import CallGuard
from convoy.runtime.weights import Weights


class ModuleOfPieces(nn.Module):
    """An nn.Module around another one, `module`, whose parameters and buffers are pieces of a whole model's.

    A method that takes or gives whole ones is called on every device.
    """

    module: nn.Module
    group: Group
    weights: Weights
    calls: CallGuard
    _in_use: PlanInUse

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This device's pieces under the names they have in the model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This device's pieces of the buffers under the names they have in the model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refused, because this device's pieces are not the model: see `full_state_dict`.

        Raises:
            InputError: always.
        """
        raise InputError(
            "state_dict() would hold only this device's pieces: call full_state_dict() on every device, "
            "which gives the whole model under its ordinary keys"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take this device's pieces of the weights of the whole model. Every device must call it, with the same weights.

        Args:
            state_dict: of the model as it was before `distribute`, under its ordinary keys.
            strict: refuse keys that are missing or not known; False: they are returned, as by torch.
            assign: refused.

        Returns:
            the missing and the unexpected keys, as torch gives them.

        Raises:
            InputError: keys that do not fit, or a tensor of another shape than the whole parameter.
        """
        if assign:
            raise InputError("load_state_dict(assign=True): a device holds pieces, which are copied: leave assign out")
        return self.weights.load(state_dict, strict=strict)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model under its ordinary keys, on every device. Every device must call it.

        With `inexact-butterfly-mixing` every device has weights of its own; these are their averages.
        """
        return self.weights.full_state()

    def gather(self, key: str, piece: Tensor) -> Tensor:
        """The whole of a tensor that lies like parameter `key` (its gradient, its momentum), on every device.

        Where the plan mixes inexactly the copies differ from device to device: this is their average.

        Raises:
            InputError: a gradient that has yet to be summed over the devices, after `no_sync`.
        """
        return self.weights.gather(key, piece)

    def mark_pieces(self) -> None:
        """From now on, refuse what is not exact on this device's shards: steps of some optimizers, calls of modules."""
        mark_pieces((parameter, not self._in_use.is_copied(key)) for key, parameter in self.named_parameters())
        self.calls.watch(self.module)

    def check_copies(self) -> None:
        """Whether parameters that every device has whole are still the same on all of them. Every device must call it.

        Raises:
            MismatchError: they are not.
        """
        if self.group.devices > 1 and not self._in_use.plan.mixes:
            check_copies(self.group, {key: p for key, p in self.named_parameters() if self._in_use.is_copied(key)})

    def weights_changed(self) -> None:
        """Tell that weights were changed by hand between two passes of a step. Every device calls it.

        Where weights are kept in shares, the passes of a step gather them once, and one whose device finds its share changed is
        refused; after this the next pass gathers them anew. What changes weights by Convoy or an optimizer tells it by itself.
        """
        mark_changed(self.parameters())

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm, over all devices, is at most `max_norm`; returns the norm before.

        `torch.nn.utils.clip_grad_norm_` would see only this device's pieces. Call it on every device.
        """
        return self.weights.clip_gradients(max_norm, norm_type)

    # --- what does not belong on pieces ------------------------------------------------------------------------------

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refused: neither pickle nor torch.save can keep the connections to the other devices.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a distributed model cannot be pickled: it is this device's pieces, and connections to the others. Save "
            "full_state_dict(), which every device calls, or use convoy.Checkpointer"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "require_backward_grad_sync":
                raise AttributeError(
                    f"{name} is of DistributedDataParallel: make passes whose gradients are summed later inside no_sync()"
                ) from None
            if name.startswith("__") or not hasattr(self.__dict__.get("_modules", {}).get("module"), name):
                raise
        raise AttributeError(
            f"a distributed model has no attribute {name!r}; the model that was given has. model.module.{name} is that of "
            "this device, whose parameters are pieces; whole ones are in full_state_dict(). Only forward runs on all devices"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_modules", {}).get("module")
        if inner is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif hasattr(inner, name):
            # Its forward reads it there, or what has read it once refuses the next step.
            setattr(inner, name, value)
        elif isinstance(value, nn.Module | nn.Parameter):
            raise InputError(
                f"{name!r} would be added to a distributed model, whose parameters() would not have it: add it to the model "
                "before, or keep it beside the distributed model, with its parameters in the optimizer"
            )
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for tensor in {(t.dtype, t.device): t for t in (*self.parameters(), *self.buffers())}.values():
            made = fn(tensor.detach()[:0] if tensor.dim() else tensor.detach())
            if made.dtype != tensor.dtype or made.device != tensor.device:
                raise InputError(
                    f"the distributed model would change from {tensor.dtype} on {tensor.device} to {made.dtype} on "
                    f"{made.device}: change the model before it is distributed; where a device computes is said by "
                    "convoy.join(device) or CONVOY_DEVICE, in which precision by precision='bf16'"
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
