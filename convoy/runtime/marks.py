"""Marks on parameters: which are pieces, which are of a model that was distributed, whose gradients are not yet summed, and
which may have changed."""

from collections.abc import Iterable

from torch import nn

from convoy.errors import InputError

PIECE, ORIGINAL, UNSUMMED, CHANGED = "_convoy_piece", "_convoy_original", "_convoy_unsummed", "_convoy_changed"


def mark_pieces(parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    """Mark the parameters of which this device has less than the whole."""
    for parameter, piece in parameters:
        setattr(parameter, PIECE, piece)


def mark_originals(parameters: Iterable[nn.Parameter]) -> None:
    """Mark the parameters of a model that was distributed: an optimizer that still works on them trains nothing."""
    for parameter in parameters:
        setattr(parameter, ORIGINAL, True)


def is_piece(parameter: object) -> bool:
    return getattr(parameter, PIECE, False)


def mark_unsummed(parameter: nn.Parameter, unsummed: bool) -> None:
    """Mark that `.grad` is what passes on this device have added up, and has yet to be summed over the devices; or unmark."""
    setattr(parameter, UNSUMMED, unsummed)


def is_unsummed(parameter: object) -> bool:
    """Whether the gradient of a parameter has yet to be summed over the devices; marked, though there may be none."""
    return getattr(parameter, UNSUMMED, False)


def check_summed(what: str, parameters: Iterable[nn.Parameter]) -> None:
    """
    Raises:
        InputError: of one of these parameters each device has but the sum of its own passes.
    """
    if any(is_unsummed(p) and p.grad is not None for p in parameters):
        raise InputError(
            f"{what} after passes in no_sync(), whose gradients were not summed over the devices: make the last pass of a step "
            "outside of no_sync(), forward and backward, or clear the gradients with zero_grad()"
        )


def mark_changed(parameters: Iterable[object], changed: bool = True) -> None:
    """Mark that something that every device does may have changed these; or that whoever must know it does."""
    for parameter in parameters:
        setattr(parameter, CHANGED, changed)


def has_changed(parameters: Iterable[object]) -> bool:
    """Whether any of these is marked as changed."""
    return any(getattr(parameter, CHANGED, False) for parameter in parameters)
