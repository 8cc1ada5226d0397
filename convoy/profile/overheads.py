"""Measures what a training step costs a device beside its layers: the executor on it (host overhead), and jitter.

The whole step runs as in training (loader, executor, loss, optimizer), on one device, over nets whose layers compute almost
nothing; what the layers themselves take is subtracted. Copies and additions are timed through torch's own functions, as the
executor calls them.

Jitter is what it costs that devices which compute are never ready at the same moment. A link is measured at rest. In training
its two ends compute before they meet, each under a quota that pauses it, beside other users of its machine, on a processor
whose clock wanders; and whoever is early waits for the last. So the devices compute alone for a while, then the same with an
exchange after each piece, in turns; what an exchange takes beyond its price at rest is jitter.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from convoy.comm.agreement import gather
from convoy.comm.group import AloneGroup, Arrived, CountedGroup, Group, Message, Pending
from convoy.cost.overhead import FRESH_BYTES, Overheads
from convoy.data.images import Images
from convoy.model.graph import Graph
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.size import whole_size
from convoy.plan.steps import Move, Value
from convoy.profile.layers import piece
from convoy.profile.timing import STRETCH_S, Now, device_now, estimate, repeated, time_piece, typical
from convoy.runtime.clock import Clock
from convoy.runtime.exchange import run_move
from convoy.runtime.module import Distributed
from convoy.sharding.layout import Split, everywhere
from convoy.train.late_losses import LateLosses, Unread, UnreadNumber, lateness
from convoy.train.loader import Loader

LAYERS = (1, 33)
"""Activations in the two nets whose difference is the cost of a layer."""

TENSORS = (1, 33)
PEERS = (1, 5)
COPIED_BYTES = 4 << 20
"""More than a cache of one core holds, and less than what the system must provide anew each time."""

BATCH = 2


LOSS_ENTRIES = 1 << 22
"""Of the outputs that a loss is timed of, at most; one sample of each at least."""


def measure_overheads(
    device: torch.device,
    now: Now,
    stretch_s: float,
    message_s: float = 0.0,
    share: float = 1.0,
    outputs: Sequence[Sequence[int]] = (),
) -> Overheads:
    """Time everything but messages, a few seconds with the usual stretch.

    Args:
        message_s: seconds of this device's processor for one small message, as its share of one allows.
        share: of a processor that this device has. A latency is timed on devices that wait most of the time and so are not
            held back by a quota: it holds one message's processor time at full speed, which is taken off a round.
        outputs: shapes of the model's outputs that a loss is computed of, samples first.
    """
    clock = Clock(device)
    per_tensor_s = _line(TENSORS, lambda count: _repeated(_optimizer(count, device), now, stretch_s))[0]
    step_each_s, step_none_s = _line(LAYERS, lambda count: _repeated(_training(count, device), now, stretch_s))
    layers = [_layer_s(kind, device, clock, now, stretch_s) for kind in ("flatten", "linear", "elementwise")]
    layer_s = max(0.0, step_each_s - layers[2])
    # Flatten and Linear are in every step, and the two parameters of the Linear.
    step_s = max(0.0, step_none_s - layers[0] - layers[1] - 2 * layer_s - 2 * per_tensor_s)
    peer_s, round_s = _line(PEERS, lambda count: _repeated(_round(count, device), now, stretch_s))
    held_s = message_s * share
    each_message_s = message_s + max(0.0, peer_s) / 2  # each peer is sent a message and sends one
    return Overheads(
        step_s=step_s,
        layer_s=layer_s,
        round_s=max(0.0, round_s + each_message_s - held_s),
        message_s=each_message_s,
        copy_s_per_byte=_repeated(_copy(device), now, stretch_s) / COPIED_BYTES,
        add_s_per_byte=_repeated(_add(device), now, stretch_s) / COPIED_BYTES,
        fresh_s_per_byte=_fresh_s_per_byte(device, now, stretch_s),
        update_s_per_tensor=max(0.0, per_tensor_s),
        loss_s_per_byte=_loss_s_per_byte(outputs, device, now, stretch_s),
    )


def _line(counts: tuple[int, int], seconds: Callable[[int], float]) -> tuple[float, float]:
    """Seconds of each more, and of none, by the seconds at two counts."""
    few, many = counts
    few_s, many_s = seconds(few), seconds(many)
    each_s = (many_s - few_s) / (many - few)
    return each_s, few_s - few * each_s


def _repeated(work: Callable[[], object], now: Now, stretch_s: float) -> float:
    """Seconds of one call. In longer stretches than the layers', since differences are taken."""
    return estimate(repeated(work, now, 2 * stretch_s).each_s, now)


def _chain(activations: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(1, 2), *(nn.ReLU() for _ in range(activations)))


def _training(activations: int, device: torch.device) -> Callable[[], object]:
    """One step of a training loop like `convoy.train.loop.fit`."""
    images = Images(
        torch.zeros(1024 * BATCH, 1, 1, 1, dtype=torch.uint8), torch.zeros(1024 * BATCH, dtype=torch.int64), 2,
        (0.5,), (0.5,),
    )  # fmt: skip
    model, example = _chain(activations), images[0][0][None]
    plan = named_plan("data", trace(model, example).graph, BATCH, Speeds((1.0,)))
    # Layer by layer: one device alone would compute the whole chain as one run.
    part = Distributed(model, plan, AloneGroup(device), example, fuse=False)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.0, momentum=0.9)
    loader = Loader(images, BATCH, part)
    batches, losses = iter(loader), LateLosses(lateness(device))

    def step() -> None:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        x, y = batch
        loss = F.cross_entropy(part(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.add(Unread(0, 0, UnreadNumber([loss]), BATCH, 0.0))
        for _ in losses.due():
            pass

    return step


def _layer_s(kind: str, device: torch.device, clock: Clock, now: Now, stretch_s: float) -> float:
    """The arithmetic of one layer of the chain, forward and backward."""
    model = _chain(2).to(device)
    traced = trace(model, torch.zeros(1, 1, 1, 1, device=device))
    layer = [layer for layer in traced.graph.layers.values() if layer.kind == kind][-1]
    wants = (kind == "elementwise",)
    size = whole_size(layer, BATCH)
    with torch.no_grad(), piece(model, traced, layer, size, wants, backward=kind != "flatten") as part:
        return time_piece(part, clock, now, stretch_s).both_s


def _optimizer(tensors: int, device: torch.device) -> Callable[[], object]:
    parameters = [nn.Parameter(torch.zeros(2, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9).step


class _Silent(CountedGroup):
    """A group whose messages are there at once: what is left of a round is the executor's own."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        self._admit(sends, receives, lane)
        return Arrived()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:  # noqa: ARG002
        return (text,)

    def close(self, error: BaseException | None = None) -> None:
        pass


def _round(peers: int, device: torch.device) -> Callable[[], object]:
    """A round in which every device sends its sample to every other one."""
    devices = peers + 1
    src, dst, shape = Split(0, (1,) * devices), everywhere(devices), (devices, 2)
    move = Move(0, "forward", Value("x", shape, src), Value("y", shape, dst), "ring")
    group, x = _Silent(0, devices, device, 1.0), torch.zeros(1, 2, device=device)
    return lambda: run_move(group, move.schedule, x, src, dst, shape)


def _copy(device: torch.device) -> Callable[[], object]:
    x_NCF = torch.zeros(16, 2, COPIED_BYTES // 64, device=device)
    return lambda: x_NCF.narrow(1, 0, 1).contiguous()


def _fresh_s_per_byte(device: torch.device, now: Now, stretch_s: float) -> float:
    """What zeros in new memory take longer than zeros written to a tensor that is there."""
    count = FRESH_BYTES // 4 + 4096
    x = torch.zeros(count, device=device)
    new_s, old_s = (_repeated(work, now, stretch_s) for work in (lambda: x.new_zeros(count), x.zero_))
    return max(0.0, new_s - old_s) / (4 * count)


def loss_shapes(graph: Graph, batch: int) -> list[tuple[int, ...]]:
    """Shapes of the outputs that have values for each sample, of as many samples as a loss is timed of."""
    each = [graph[name].shape for name in graph.outputs if graph[name].batched and graph[name].shape]
    samples = max(1, min(batch, LOSS_ENTRIES // max(1, sum(map(math.prod, each)))))
    return [(samples, *shape) for shape in each]


def _loss_s_per_byte(shapes: Sequence[Sequence[int]], device: torch.device, now: Now, stretch_s: float) -> float:
    """What a cross-entropy over the second axis takes longer, forward and backward, than the one in `step_s`."""
    size = sum(map(math.prod, shapes)) - BATCH * 2
    if size <= 0:
        return 0.0
    least_s = _repeated(_loss((BATCH, 2), device), now, stretch_s)
    seconds = sum(_repeated(_loss(shape, device), now, stretch_s) - least_s for shape in shapes)
    return max(0.0, seconds) / (4 * size)


def _loss(shape: Sequence[int], device: torch.device) -> Callable[[], object]:
    x = torch.zeros(tuple(shape), device=device, requires_grad=True)
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.int64, device=device)

    def work() -> None:
        F.cross_entropy(x, y).backward()  # type: ignore[no-untyped-call]
        x.grad = None

    return work


def _add(device: torch.device) -> Callable[[], object]:
    a, b = (torch.zeros(COPIED_BYTES // 4, device=device) for _ in range(2))
    return lambda: a.add_(b)


# --- jitter ----------------------------------------------------------------------------------------------------------

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
    group: Group, clock: Clock, exchange_s: float, stretch_s: float = STRETCH_S, now: Callable[[], float] | None = None
) -> tuple[float, ...]:
    """Seconds by which each device makes an exchange later than its price at rest. All devices call it; all get the same.

    Args:
        clock: of this device; its slow-down counts.
        exchange_s: the price at rest of an exchange in which each device sends a few bytes to all others.
        stretch_s: see `convoy.profile.timing.time_piece`.
        now: a clock in seconds; None: the device's own.

    Raises:
        DeviceLostError: a device did not answer within the group's time limit.
    """
    if group.devices == 1:
        return (0.0,)
    now = now or device_now(group.torch_device)
    compute = _products(group, clock, now, stretch_s)
    out = torch.zeros(_BYTES, dtype=torch.uint8, device=group.torch_device)
    others = [peer for peer in range(group.devices) if peer != group.device]
    sends = [Message(peer, out) for peer in others]
    receives = [Message(peer, torch.zeros_like(out)) for peer in others]
    alone_s, meeting_s, own_s = [], [], []
    for block in range(BLOCKS):
        group.agree(f"jitter {block}", "")
        start_s = now()
        for _ in range(PIECES):
            compute()
        alone_s.append((now() - start_s) / PIECES)
        group.agree(f"jitter {block} with exchanges", "")
        start_s = now()
        for _ in range(PIECES):
            begin_s = now()
            compute()
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


def _products(group: Group, clock: Clock, now: Now, stretch_s: float) -> Callable[[], None]:
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
