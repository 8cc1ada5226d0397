"""Clipping by the norm of all gradients together."""

import torch
from torch import Tensor, nn

from convoy.runtime.module import Distributed


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients of a model so that their common norm is at most `max_norm`. Every device must call it.

    On a distributed model, `torch.nn.utils.clip_grad_norm_` is wrong without a word: it takes the norm of the pieces that lie
    on this device. Each device then finds a smaller norm than there is, and one of its own, and scales its pieces by a
    factor of its own: the direction of the step changes, and copies of the same weight drift apart. Here the norms of split
    pieces are added over the devices, copies count once, and all devices scale by the same factor, that of one device.

    Args:
        model: a distributed model, or an ordinary one, which torch's own function clips.
        norm_type: the p of the p-norm; infinity for the largest entry.

    Returns:
        The norm before clipping; the same on every device.
    """
    if isinstance(model, Distributed):
        return model.clip_grad_norm_(max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
