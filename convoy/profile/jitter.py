"""What it costs that devices which compute are never ready at the same moment: the jitter of a fleet.

A link is measured at rest. In training its two ends compute before they meet, each under a quota that pauses it, beside
other users of its machine, on a processor whose clock wanders; and whoever is early waits for the last. So the devices
compute alone for a while, then the same with an exchange after each piece, in turns; what an exchange takes beyond its
price at rest is jitter.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convoy.comm.agreement import gather
from convoy.comm.group import Group, Message
from convoy.profile.timing import STRETCH_S, Now, device_now, typical
from convoy.runtime.clock import Clock

PIECE_STRETCHES = 2
"""Of computing between two exchanges: 40 ms with the usual stretch, about as long as a layer of a benchmark's nets."""

BLOCKS = 12
PIECES = 5
CALIBRATIONS = 2
"""Pieces alone, and as many with an exchange after each, in so many blocks."""

SIDE = 96
"""Of the matrices whose product is computed: small, so that a piece ends soon after its time."""

_BYTES = 256


@dataclass(frozen=True, slots=True)
class Pieces:
    """One device's pieces of computing.

    Attributes:
        alone_s: of a piece in each block, the pieces one after the other.
        meeting_s: of a piece and its exchange in each block.
        own_s: of each piece before an exchange, without it.
    """

    alone_s: tuple[float, ...]
    meeting_s: tuple[float, ...]
    own_s: tuple[float, ...]


def measure_jitter(
    group: Group, clock: Clock, exchange_s: float, stretch_s: float = STRETCH_S, now: Now | None = None
) -> tuple[float, ...]:
    """Seconds by which each device makes an exchange later than its price at rest. All devices call it; all get the same.

    Args:
        clock: of this device; its slow-down counts.
        exchange_s: the price at rest of an exchange in which each device sends a few bytes to all others.
        stretch_s: see `convoy.profile.timing.time_piece`.
        now: reads the wall's seconds.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    if group.devices == 1:
        return (0.0,)
    now = now or device_now(group.torch_device)
    piece = _piece(group, clock, now, stretch_s)
    out = torch.zeros(_BYTES, dtype=torch.uint8, device=group.torch_device)
    others = [peer for peer in range(group.devices) if peer != group.device]
    sends = [Message(peer, out) for peer in others]
    receives = [Message(peer, torch.zeros_like(out)) for peer in others]
    alone_s, meeting_s, own_s = [], [], []
    for block in range(BLOCKS):
        group.agree(f"jitter {block}", "")
        start_s = now()
        for _ in range(PIECES):
            piece()
        alone_s.append((now() - start_s) / PIECES)
        group.agree(f"jitter {block} with exchanges", "")
        start_s = now()
        for _ in range(PIECES):
            begin_s = now()
            piece()
            own_s.append(now() - begin_s)
            group.exchange(sends, receives)
        meeting_s.append((now() - start_s) / PIECES)
    rows = gather(group, "jitter", [alone_s, meeting_s, own_s])
    return jitter_of([Pieces(*map(tuple, row)) for row in rows], exchange_s)


def jitter_of(devices: Sequence[Pieces], exchange_s: float) -> tuple[float, ...]:
    """Each device's part in what an exchange takes beyond the slowest device's computing and its own price at rest.

    All of them together make an exchange so late. The device whose pieces vary most is charged with all of it, the others
    in proportion to how much theirs vary: of two steady devices and one that is often interrupted, the steady ones meet
    each other in time.
    """
    alone_s = max(typical(each.alone_s) for each in devices)
    together_s = typical([max(block) for block in zip(*(each.meeting_s for each in devices), strict=True)])
    late_s = together_s - alone_s - exchange_s
    vary = [statistics.pstdev(each.own_s) for each in devices]
    most = max(vary)
    if late_s <= 0 or most <= 0:
        return (0.0,) * len(devices)
    return tuple(late_s * each / most for each in vary)


def _piece(group: Group, clock: Clock, now: Now, stretch_s: float) -> Callable[[], None]:
    """Computes for about `PIECE_STRETCHES`: so many products as this device does in that time while all compute."""
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
    # A device under a quota needs a while to show how fast it is, and is to be as long as the others: where one was longer,
    # it would hide how the others vary.
    for attempt in range(CALIBRATIONS):
        group.agree(f"jitter: as long as the others {attempt}", "")
        start_s = now()
        for _ in range(4 * PIECES):
            products(count)
        count = max(1, round(count * 4 * PIECES * PIECE_STRETCHES * stretch_s / max(now() - start_s, 1e-9)))
    return lambda: products(count)
