"""Measures what synchronisation costs devices that compute: the jitter of their exchanges, and the price of their calls.

A link is measured at rest. In training, its two ends compute before they exchange, so the earlier one waits for the later one,
and the calls find cold caches. The devices therefore compute pieces of equal length, first alone, then with an exchange after
each piece, in turns. What an exchange takes beyond its price is jitter. Its processor time, divided by that of an exchange at
rest, is the call factor.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convoy.comm.collectives import gather
from convoy.comm.group import Group, Message
from convoy.measure.timing import STRETCH_S, device_now, plain_torch, typical
from convoy.runtime.clock import Clock

PIECE_STRETCHES = 2
"""Length of a piece: 40 ms with the usual stretch, about as long as a layer of a benchmark's nets."""

BLOCKS, PIECES, CALIBRATIONS = 12, 5, 2
SIDE = 96
"""Side of the matrices that are multiplied: small, so that a piece ends soon after its time."""

_BYTES = 256


@dataclass(frozen=True, slots=True)
class Pieces:
    """The seconds that one device measured.

    Attributes:
        alone_s: of a piece, in each block without exchanges.
        together_s: of a piece and its exchange, in each block with exchanges.
        own_s: of each piece before an exchange.
        calls_s, rest_calls_s: of this process's processor for an exchange, in each block, after computing and at rest.
    """

    alone_s: tuple[float, ...]
    together_s: tuple[float, ...]
    own_s: tuple[float, ...]
    calls_s: tuple[float, ...] = ()
    rest_calls_s: tuple[float, ...] = ()

    @property
    def call_factor(self) -> float:
        """Processor time of an exchange after computing over that of one at rest; at least 1."""
        rest_s = statistics.median(self.rest_calls_s) if self.rest_calls_s else 0.0
        return max(1.0, statistics.median(self.calls_s) / rest_s) if rest_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class SyncOverhead:
    """What synchronisation costs each device.

    Attributes:
        jitter_s: seconds by which it delays an exchange beyond its price.
        call_factor: see `Pieces`.
        piece_s, deviation_s: seconds of a piece alone, and the standard deviation of pieces before an exchange.
    """

    jitter_s: tuple[float, ...]
    call_factor: tuple[float, ...]
    piece_s: tuple[float, ...] = ()
    deviation_s: tuple[float, ...] = ()


@plain_torch(torch.float32)
def measure_sync_overhead(
    group: Group,
    clock: Clock,
    exchange_s: Callable[[Sequence[float]], float],
    stretch_s: float = STRETCH_S,
    now: Callable[[], float] | None = None,
    after_block: Callable[[Callable[[], None]], None] = lambda _: None,
) -> SyncOverhead:
    """Measure what synchronisation costs. All devices call it and get the same value.

    Args:
        clock: of this device; its slow-down counts.
        exchange_s: the predicted seconds of an exchange in which each device sends a few bytes to all others, given the call
            factor of each device.
        stretch_s: see `convoy.measure.timing.sampled`.
        now: a clock in seconds; None: the device's own.
        after_block: measures more after each block, with the computing of a piece; on all devices.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    if group.devices == 1:
        return SyncOverhead((0.0,), (1.0,))
    now = now or device_now(group.torch_device)
    compute = _piece(group, clock, now, stretch_s)
    out = torch.zeros(_BYTES, dtype=torch.uint8, device=group.torch_device)
    others = [peer for peer in range(group.devices) if peer != group.device]
    sends = [Message(peer, out) for peer in others]
    receives = [Message(peer, torch.zeros_like(out)) for peer in others]
    # Where one thread computes, its own time leaves out the threads that move messages.
    computing = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    alone_s, together_s, own_s, calls_s, rest_calls_s = ([] for _ in range(5))
    for block in range(BLOCKS):
        group.agree(f"pieces {block}", "")
        start_s = now()
        for _ in range(PIECES):
            compute()
        alone_s.append((now() - start_s) / PIECES)
        group.agree(f"pieces {block} with exchanges", "")
        computed_s, processor_s = 0.0, time.process_time()
        start_s = now()
        for _ in range(PIECES):
            begin_s, own_processor_s = now(), computing()
            compute()
            computed_s += computing() - own_processor_s
            own_s.append(now() - begin_s)
            group.exchange(sends, receives)
        together_s.append((now() - start_s) / PIECES)
        calls_s.append((time.process_time() - processor_s - computed_s) / PIECES)
        group.agree(f"exchanges {block}", "")
        processor_s = time.process_time()
        for _ in range(PIECES):
            group.exchange(sends, receives)
        rest_calls_s.append((time.process_time() - processor_s) / PIECES)
        after_block(compute)
    rows = gather(group, "pieces", [alone_s, together_s, own_s, calls_s, rest_calls_s])
    devices = [Pieces(*map(tuple, row)) for row in rows]
    factors = tuple(each.call_factor for each in devices)
    return SyncOverhead(
        jitter_of(devices, exchange_s(factors)),
        factors,
        tuple(typical(each.alone_s) for each in devices),
        tuple(statistics.pstdev(each.own_s) for each in devices),
    )


def jitter_of(devices: Sequence[Pieces], exchange_s: float) -> tuple[float, ...]:
    """Return each device's part of what an exchange takes beyond the slowest device's computing and its own price."""
    alone_s = max(typical(each.alone_s) for each in devices)
    together_s = typical([max(block) for block in zip(*(each.together_s for each in devices), strict=True)])
    return charged(together_s - alone_s - exchange_s, [statistics.pstdev(each.own_s) for each in devices])


def charged(late_s: float, deviation_s: Sequence[float]) -> tuple[float, ...]:
    """Return the delay that each device is charged with: all of it where pieces vary most, elsewhere in proportion.

    Of two steady devices and one that is often interrupted, the steady ones exchange in time.
    """
    most_s = max(deviation_s)
    if late_s <= 0 or most_s <= 0:
        return (0.0,) * len(deviation_s)
    return tuple(late_s * each / most_s for each in deviation_s)


def _piece(group: Group, clock: Clock, now: Callable[[], float], stretch_s: float) -> Callable[[], None]:
    """Return what computes for about `PIECE_STRETCHES` while all devices compute."""
    a = torch.ones(SIDE, SIDE, device=group.torch_device)
    out = torch.empty_like(a)

    def products(count: int) -> None:
        with clock.compute("jitter", "measure"):
            for _ in range(count):
                torch.mm(a, a, out=out)

    products(1)  # allocates, and chooses kernels
    start_s = now()
    products(10)
    count = max(1, math.ceil(10 * PIECE_STRETCHES * stretch_s / max(now() - start_s, 1e-9)))
    # A device under a quota needs a while to show its speed. All pieces must be equally long: a longer one would hide how the
    # others vary.
    for attempt in range(CALIBRATIONS):
        group.agree(f"length of a piece, attempt {attempt}", "")
        start_s = now()
        for _ in range(4 * PIECES):
            products(count)
        count = max(1, round(count * 4 * PIECES * PIECE_STRETCHES * stretch_s / max(now() - start_s, 1e-9)))
    return lambda: products(count)
