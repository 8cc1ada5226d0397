"""Running a schedule: the pieces that a move sends, receives, keeps and adds, on one device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.execute.group import Group, Message, Pending
from convoy.layout import Box, Layout, Partial, Shape, box, local_shape
from convoy.transfer import Round, Schedule, Transfer


def run_move(group: Group, schedule: Schedule, piece: Tensor, src: Layout, dst: Layout, shape: Shape) -> Tensor:
    """Bring this device's piece of a tensor of `shape` from layout `src` to layout `dst`.

    Args:
        piece: what this device holds under `src`; an empty tensor of the right dtype where it holds nothing.

    Returns:
        what it holds under `dst`; where nothing has to arrive, a view of `piece`.

    Raises:
        DeviceLostError: a device that had to send or receive did not.
    """
    if not schedule.rounds:
        return piece
    if schedule.in_place:
        return _run_sum(group, schedule, piece, dst, shape)
    return _run_direct(group, schedule.rounds[0], piece, src, dst, shape)


def run_rounds(group: Group, schedule: Schedule, flat: Tensor) -> None:
    """Run the rounds of a summing collective in place on a flat buffer that this device owns."""
    for transfers in schedule.rounds:
        sends = [t for t in transfers if t.sender == group.device]
        receives = sorted((t for t in transfers if t.receiver == group.device), key=lambda t: t.sender)
        if not sends and not receives:
            continue
        # What is added arrives beside the buffer: a summand must not be overwritten while it is being sent.
        landing = [torch.empty_like(_span(flat, t)) if t.adds else _span(flat, t) for t in receives]
        pending = group.start(
            [Message(t.receiver, _span(flat, t)) for t in sends],
            [Message(t.sender, buffer) for t, buffer in zip(receives, landing, strict=True)],
        )
        pending.wait()
        for t, buffer in zip(receives, landing, strict=True):
            if t.adds:
                _span(flat, t).add_(buffer)


def _span(flat: Tensor, t: Transfer) -> Tensor:
    ((start, stop),) = t.box
    return flat[start:stop]


def _run_sum(group: Group, schedule: Schedule, piece: Tensor, dst: Layout, shape: Shape) -> Tensor:
    """A pending sum becomes copies. Every copy is computed once and then copied, so all are equal to the last bit."""
    reads = any(group.device in (t.sender, t.receiver) for transfers in schedule.rounds for t in transfers)
    if not reads:
        return piece.new_empty(local_shape(dst, group.device, shape))
    flat = piece.reshape(-1).clone() if piece.numel() else piece.new_empty(schedule.shape)
    run_rounds(group, schedule, flat)
    held = box(dst, group.device, shape) is not None
    return flat.view(shape) if held else flat.new_empty(local_shape(dst, group.device, shape))


def _run_direct(group: Group, transfers: Round, piece: Tensor, src: Layout, dst: Layout, shape: Shape) -> Tensor:
    me = group.device
    own, wanted = box(src, me, shape), box(dst, me, shape)
    kept = [t for t in transfers if t.sender == t.receiver == me]
    leaving = [t for t in transfers if t.sender == me != t.receiver]
    arriving = [t for t in transfers if t.receiver == me != t.sender]
    sends = [Message(t.receiver, _cut(piece, t.box, own).contiguous()) for t in leaving]
    if wanted is not None and not arriving and len(kept) == 1 and kept[0].box == wanted:
        if sends:
            group.exchange(sends, [])
        return _cut(piece, wanted, own)
    # Everything starts from zero where only a part of the box is written: a pending sum, or a box that nobody fills.
    summed = isinstance(dst, Partial) or any(t.adds for t in (*kept, *arriving))
    fresh = piece.new_zeros if summed else piece.new_empty
    result = fresh(local_shape(dst, me, shape))
    if not (kept or leaving or arriving):
        return result
    landing = [_landing(result, t, wanted) for t in arriving]
    pending = group.start(sends, [Message(t.sender, buffer) for t, buffer in zip(arriving, landing, strict=True)])
    _finish(pending, result, piece, own, wanted, kept, list(zip(arriving, landing, strict=True)))
    return result


def _landing(result: Tensor, t: Transfer, wanted: Box | None) -> Tensor:
    target = _cut(result, t.box, wanted)
    return (
        target
        if target.is_contiguous() and not t.adds
        else torch.empty_like(target, memory_format=torch.contiguous_format)
    )


def _finish(
    pending: Pending,
    result: Tensor,
    piece: Tensor,
    own: Box | None,
    wanted: Box | None,
    kept: Sequence[Transfer],
    arrived: Sequence[tuple[Transfer, Tensor]],
) -> None:
    for t in kept:
        if not t.adds:
            _cut(result, t.box, wanted).copy_(_cut(piece, t.box, own))
    pending.wait()
    parts = [(t, _cut(piece, t.box, own)) for t in kept if t.adds] + list(arrived)
    # Summands in the order of the devices: the same bits in every run.
    for t, part in sorted(parts, key=lambda pair: pair[0].sender):
        target = _cut(result, t.box, wanted)
        if t.adds:
            target.add_(part)
        elif target.data_ptr() != part.data_ptr():
            target.copy_(part)


def _cut(piece: Tensor, wanted: Box, own: Box | None) -> Tensor:
    """The part of this device's piece that covers `wanted`, both in the coordinates of the whole tensor."""
    assert own is not None
    for axis, ((start, stop), (origin, end)) in enumerate(zip(wanted, own, strict=True)):
        if (start, stop) != (origin, end):
            piece = piece.narrow(axis, start - origin, stop - start)
    return piece
