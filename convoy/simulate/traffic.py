"""Seconds of a move in closed form: what each device sends and receives, without listing every transfer.

`convoy.layout` lists the transfers, which a simulation needs; a planner that compares thousands of moves over hundreds of
devices needs only their sums. `loads` gives the same sums as the schedule (a test holds the two together).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.layout.layout import Layout, OnOne, Partial, Replicated, Shape, Split, dual
from convoy.layout.redistribute import Reduce, is_collective
from convoy.simulate.network import Network

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loads:
    """Entries that each device sends and receives in a move, and the rounds that wait for each other."""

    sent: Vector
    received: Vector
    rounds: int

    @property
    def reversed(self) -> "Loads":
        """The adjoint move: every message goes the other way."""
        return Loads(self.received, self.sent, self.rounds)


def loads(src: Layout, dst: Layout, shape: Shape, devices: int, reduce: Reduce = "ring") -> Loads:
    """Entries sent and received by each of `devices` for the move `src -> dst` of a tensor of `shape`."""
    total = float(np.prod(shape, dtype=np.float64))
    nothing = Loads(np.zeros(devices), np.zeros(devices), 0)
    if src == dst:
        return nothing
    match src, dst:
        case Replicated(holders), Partial(members):
            # One copy becomes one summand; where a device is both, nothing travels.
            apart = not set(holders) & set(members)
            return Loads(
                total * apart * _mask(holders[:1], devices), total * apart * _mask(members[:1], devices), int(apart)
            )
        case _, Partial():
            return _from_copies(dual(dst), dual(src), total, devices).reversed
    match src:
        case Partial(members) if isinstance(dst, Replicated) and is_collective(src, dst, int(total), reduce):
            return sum_loads(members, dst.devices, total, devices, reduce)
        case Partial(members):
            # Each member sends every reader the part that it reads.
            part = _parts(dst, total, devices)
            member = _mask(members, devices)
            sent = member * (part.sum() - part)
            return Loads(sent, part * (len(members) - member), 1)
        case Replicated() | OnOne():
            return _from_copies(src, dst, total, devices)
    part = _parts(src, total, devices)
    match dst:
        case Replicated(readers):
            reader = _mask(readers, devices)
            return Loads(part * (len(readers) - reader), reader * (total - part), 1)
        case OnOne(reader):
            at = _mask((reader,), devices)
            return Loads(part * (1 - at), at * (total - part), 1)
    assert isinstance(dst, Split)
    assert isinstance(src, Split)
    kept = _kept(src, dst, total, devices)
    return Loads(part - kept, _parts(dst, total, devices) - kept, 1)


def _from_copies(src: Layout, dst: Layout, total: float, devices: int) -> Loads:
    """Each reader without a copy gets its part from one holder, the same that the schedule picks."""
    assert isinstance(src, Replicated | OnOne)
    holders = (src.device,) if isinstance(src, OnOne) else src.devices
    wanted = _parts(dst, total, devices)
    received = wanted * (1 - _mask(holders, devices))
    sent = np.zeros(devices)
    for device in np.flatnonzero(received):
        sent[holders[int(device) % len(holders)]] += received[device]
    return Loads(sent, received, int(received.any()))


def sum_loads(members: tuple[int, ...], readers: tuple[int, ...], total: float, devices: int, reduce: Reduce) -> Loads:
    """Of a sum in rounds that wait for each other, as gradients have it whatever their size: `total` entries of each member,
    the sum for each reader."""
    p, member = len(members), _mask(members, devices)
    sent, rounds = _collective(members, total, devices, reduce)
    received = sent.copy()  # in each of these collectives a device receives as much as it sends
    missing = _mask(readers, devices) * (1 - member)
    if missing.any():
        sent = sent + member * total / p * missing.sum()
        received = received + missing * total
        rounds += 1
    return Loads(sent, received, rounds)


def share_loads(users: tuple[int, ...], parts: tuple[int, ...], total: float, devices: int) -> Loads:
    """Of a sum straight into shares: `total` entries of each user come to those who keep a part of them, in one round.

    The gathering of whole copies from shares is the adjoint: every message goes the other way.
    """
    used, kept = _mask(users, devices), _parts(Split(0, parts), total, devices)
    return Loads(used * (total - kept), kept * (len(users) - used), 1)


def _collective(members: tuple[int, ...], total: float, devices: int, reduce: Reduce) -> tuple[Vector, int]:
    p, member = len(members), _mask(members, devices)
    if reduce in ("ring", "direct"):
        return member * 2 * total * (p - 1) / p, 2 * (p - 1) if reduce == "ring" else 2
    if reduce == "star":
        root = _mask((members[0],), devices)
        return member * total + root * total * (p - 2), 2
    core = 1 << (p.bit_length() - 1)
    extra = p - core
    sent = member * 2 * total * (core - 1) / core
    for i in range(extra):
        sent[members[2 * i + 1]] = total
        sent[members[2 * i]] += total
    return sent, 2 * (core.bit_length() - 1) + (2 if extra else 0)


def _mask(members: tuple[int, ...], devices: int) -> Vector:
    mask = np.zeros(devices)
    mask[list(members)] = 1.0
    return mask


def _parts(layout: Layout, total: float, devices: int) -> Vector:
    match layout:
        case Split(_, shares):
            weights: Vector = np.array(shares, dtype=np.float64)
            parts: Vector = total * weights / max(1.0, weights.sum())
            return parts
        case Replicated(members) | Partial(members):
            return total * _mask(members, devices)
        case OnOne(device):
            return total * _mask((device,), devices)


def _kept(src: Split, dst: Split, total: float, devices: int) -> Vector:
    a, b = np.array(src.shares, dtype=np.float64), np.array(dst.shares, dtype=np.float64)
    if src.axis != dst.axis:
        both: Vector = total * (a / max(1.0, a.sum())) * (b / max(1.0, b.sum()))
        return both
    a_stop, b_stop = np.cumsum(a), np.cumsum(b)
    overlap = np.minimum(a_stop, b_stop) - np.maximum(a_stop - a, b_stop - b)
    assert len(overlap) == devices
    kept: Vector = total * np.maximum(0.0, overlap) / max(1.0, a.sum())
    return kept


def move_s(load: Loads, network: Network, itemsize: int) -> float:
    """Seconds of a move: the fullest card or processor, and the largest latency for each round.

    Where there are several hosts, all traffic counts as leaving its host: loads do not tell who sends to whom. Of the traffic
    of a segment's hosts the part crosses its uplink that would if every message went to any other host alike.

    Args:
        itemsize: bytes of one number on the wire.
    """
    if not load.rounds:
        return 0.0
    sent, received = load.sent * itemsize, load.received * itemsize
    hosts = np.array(network.host)
    count = len(network.send_bytes_per_s)
    out = np.bincount(hosts, sent, count) / np.array(network.send_bytes_per_s)
    into = np.bincount(hosts, received, count) / np.array(network.receive_bytes_per_s)
    within = np.bincount(hosts, sent, count) / np.array(network.within_bytes_per_s) if count == 1 else np.zeros(1)
    processor = (sent + received) * np.array(network.processor_s_per_byte)
    crossing = _crossing_s(network, sent, received)
    return (
        float(max(out.max(), into.max(), processor.max(), within.max(), crossing))
        + load.rounds * network.largest_latency_s
    )


def _crossing_s(network: Network, sent: Vector, received: Vector) -> float:
    """Seconds of the fullest uplink."""
    if not network.segment:
        return 0.0
    longest_s, host_segment = 0.0, np.array(network.segment)
    segment = host_segment[np.array(network.host)]
    for index, (out, into) in enumerate(
        zip(network.uplink_send_bytes_per_s, network.uplink_receive_bytes_per_s, strict=True)
    ):
        inside = segment == index
        outside = float((host_segment != index).sum()) / max(1, len(host_segment) - 1)
        longest_s = max(longest_s, outside * sent[inside].sum() / out, outside * received[inside].sum() / into)
    return longest_s
