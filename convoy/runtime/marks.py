"""Marks on parameters: which are pieces, which are of a model that was distributed."""

from collections.abc import Iterable

from torch import nn

PIECE, ORIGINAL = "_convoy_piece", "_convoy_original"


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
