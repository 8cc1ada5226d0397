"""Measures what it costs that devices compute while they exchange: jitter, dearer calls, late rounds, and what rest gives back.

A link is measured at rest. In training its two ends compute before they meet, each under a quota that pauses it, beside other
users of its machine, on a processor whose clock wanders; and whoever is early waits for the last. So the devices compute for a
while alone, then the same with an exchange after each piece, in turns; what an exchange takes beyond its price is jitter. The
processor time of such an exchange, beside that of one at rest, tells how much dearer its calls are. A gradient sum goes on
while its device computes: what a round in a ring takes then beyond its price is how late it is. And a device under a quota
that has rested computes at full speed at first: its pieces are timed after a rest, too.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from convoy.comm.agreement import gather
from convoy.comm.group import Group, Message
from convoy.measure.timing import STRETCH_S, device_now, plain_torch, typical
from convoy.runtime.clock import Clock
from convoy.runtime.gradients import SUM_LANE

PIECE_STRETCHES = 2
"""Of computing between two exchanges: 40 ms with the usual stretch, about as long as a layer of a benchmark's nets."""

BLOCKS = 12
PIECES = 5
CALIBRATIONS = 2
"""Pieces alone, and as many with an exchange after each, in so many blocks."""

RESTED_PIECES, RINGS = 2, 4
"""Pieces after a rest each, and rounds in a ring, of a block."""

SIDE = 96
"""Of the matrices whose product is computed: small, so that a piece ends soon after its time."""

_BYTES = 256


@dataclass(frozen=True, slots=True)
class Pieces:
    """One device's pieces of computing, and its exchanges.

    Attributes:
        alone_s: of a piece in each block, the pieces one after the other.
        meeting_s: of a piece and its exchange in each block.
        own_s: of each piece before an exchange, without it.
        calls_s, rest_calls_s: this process's processor for an exchange in each block, after computing and at rest.
        rested_s: of a piece after a rest in each block.
        ring_s, beside_s: of a round in a ring in each block, at rest and while it computes.
    """

    alone_s: tuple[float, ...]
    meeting_s: tuple[float, ...]
    own_s: tuple[float, ...]
    calls_s: tuple[float, ...] = ()
    rest_calls_s: tuple[float, ...] = ()
    rested_s: tuple[float, ...] = ()
    ring_s: tuple[float, ...] = ()
    beside_s: tuple[float, ...] = ()

    @property
    def dearer(self) -> float:
        """How many times the processor time of an exchange at rest one takes after computing; 1 at least.

        Its code and its buffers are in no cache then, and its threads were asleep: on a busy EPYC twice as much and more.
        """
        rest_s = statistics.median(self.rest_calls_s) if self.rest_calls_s else 0.0
        return max(1.0, statistics.median(self.calls_s) / rest_s) if rest_s > 0 else 1.0

    @property
    def sooner_s(self) -> float:
        """By how much a piece is done sooner after a rest."""
        return max(0.0, typical(self.alone_s) - typical(self.rested_s)) if self.rested_s else 0.0


@dataclass(frozen=True, slots=True)
class Meetings:
    """What exchanges cost devices that compute; of each device.

    Attributes:
        jitter_s: seconds by which it makes an exchange later than its price.
        beside_s: seconds by which it makes a round of a sum later while it computes.
        dearer, rested_s: see `Pieces`.
    """

    jitter_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    dearer: tuple[float, ...]
    rested_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """What a replay takes exchanges for, where calls are so many times dearer on each device.

    Attributes:
        exchange_s: in which each device sends a few bytes to all others.
        ring_s: a round in a ring with `ring_bytes`, while all compute.
    """

    exchange_s: Callable[[Sequence[float]], float]
    ring_s: Callable[[Sequence[float]], float]
    ring_bytes: int


@plain_torch(torch.float32)
def measure_meetings(
    group: Group,
    clock: Clock,
    prices: Prices,
    stretch_s: float = STRETCH_S,
    now: Callable[[], float] | None = None,
) -> Meetings:
    """What exchanges cost devices that compute. All devices call it; all get the same.

    Args:
        clock: of this device; its slow-down counts.
        stretch_s: see `convoy.measure.timing.time_piece`.
        now: a clock in seconds; None: the device's own.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    if group.devices == 1:
        return Meetings((0.0,), (0.0,), (1.0,), (0.0,))
    now = now or device_now(group.torch_device)
    compute = _products(group, clock, now, stretch_s)
    meet = _meeting(group)
    turn = _ring(group, max(1, prices.ring_bytes))
    # Where one thread computes, its time tells what the others do meanwhile: they move messages.
    computing = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    alone_s, meeting_s, own_s, calls_s, rest_calls_s, rested_s, ring_s, beside_s = ([] for _ in range(8))  # type: ignore[var-annotated]
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
            meet()
        meeting_s.append((now() - start_s) / PIECES)
        calls_s.append((time.process_time() - processor_s - computed_s) / PIECES)
        group.agree(f"exchanges {block}", "")
        processor_s = time.process_time()
        for _ in range(PIECES):
            meet()
        rest_calls_s.append((time.process_time() - processor_s) / PIECES)
        group.agree(f"pieces {block} after rests", "")
        rested_s.append(_rested_s(compute, now, PIECE_STRETCHES * stretch_s))
        if group.lanes > SUM_LANE:
            for found, work in ((ring_s, None), (beside_s, compute)):
                group.agree(f"rings {block}", "")
                found.append(_rings_s(turn, work))
    own = [alone_s, meeting_s, own_s, calls_s, rest_calls_s, rested_s, ring_s, beside_s]
    devices = [Pieces(*map(tuple, row)) for row in gather(group, "pieces", own)]
    dearer = tuple(each.dearer for each in devices)
    return Meetings(
        jitter_of(devices, prices.exchange_s(dearer)),
        beside_of(devices, prices.ring_s(dearer)),
        dearer,
        tuple(each.sooner_s for each in devices),
    )


def jitter_of(devices: Sequence[Pieces], exchange_s: float) -> tuple[float, ...]:
    """Each device's part in what an exchange takes beyond the slowest device's computing and its own price."""
    alone_s = max(typical(each.alone_s) for each in devices)
    together_s = typical([max(block) for block in zip(*(each.meeting_s for each in devices), strict=True)])
    return _shared_out(together_s - alone_s - exchange_s, devices)


def beside_of(devices: Sequence[Pieces], ring_s: float) -> tuple[float, ...]:
    """Each device's part in what a round in a ring takes while all compute, beyond one at rest and beyond its price."""
    if not all(each.ring_s and each.beside_s for each in devices):
        return (0.0,) * len(devices)
    at_rest_s, beside_s = (
        typical([max(block) for block in zip(*rows, strict=True)])
        for rows in ([each.ring_s for each in devices], [each.beside_s for each in devices])
    )
    return _shared_out(beside_s - max(at_rest_s, ring_s), devices)


def _shared_out(late_s: float, devices: Sequence[Pieces]) -> tuple[float, ...]:
    """All of them together are so late. The device whose pieces vary most is charged with all of it, the others in proportion
    to how much theirs vary: of two steady devices and one that is often interrupted, the steady ones meet in time."""
    vary = [statistics.pstdev(each.own_s) for each in devices]
    most = max(vary)
    if late_s <= 0 or most <= 0:
        return (0.0,) * len(devices)
    return tuple(late_s * each / most for each in vary)


def _meeting(group: Group) -> Callable[[], None]:
    """An exchange in which each device sends a few bytes to all others."""
    out = torch.zeros(_BYTES, dtype=torch.uint8, device=group.torch_device)
    others = [peer for peer in range(group.devices) if peer != group.device]
    sends = [Message(peer, out) for peer in others]
    receives = [Message(peer, torch.zeros_like(out)) for peer in others]
    return lambda: group.exchange(sends, receives)


def _ring(group: Group, size: int) -> Callable[[], None]:
    """A round in which each device sends so many bytes to the next one, on the lane of sums."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=group.torch_device) for _ in range(2))
    onward = [Message((group.device + 1) % group.devices, out)]
    arriving = [Message((group.device - 1) % group.devices, into)]
    return lambda: group.start(onward, arriving, SUM_LANE).wait()


def _rested_s(compute: Callable[[], None], now: Callable[[], float], rest_s: float) -> float:
    """Seconds of a piece after a rest as long as itself."""
    total_s = 0.0
    for _ in range(RESTED_PIECES):
        time.sleep(rest_s)
        start_s = now()
        compute()
        total_s += now() - start_s
    return total_s / RESTED_PIECES


def _rings_s(turn: Callable[[], None], compute: Callable[[], None] | None) -> float:
    """Seconds of a round in a ring, on a thread as sums are made on; this thread computes meanwhile, where it is to.

    Raises:
        ConvoyError: what the rounds raised.
    """
    took_s: list[float] = []
    errors: list[BaseException] = []

    def rounds() -> None:
        try:
            start_s = time.perf_counter()
            for _ in range(RINGS):
                turn()
            took_s.append((time.perf_counter() - start_s) / RINGS)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rounds, name="convoy-rings", daemon=True)
    thread.start()
    while compute is not None and thread.is_alive():
        compute()
    thread.join()  # every wait in it has the group's own limit
    if errors:
        raise errors[0]
    return took_s[0]


def _products(group: Group, clock: Clock, now: Callable[[], float], stretch_s: float) -> Callable[[], None]:
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
