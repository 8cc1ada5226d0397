"""A host's card at its rate: a token bucket on either end of its cable."""

from dataclasses import dataclass

from convoy.emulate.namespaces import NIC, Port, Wiring
from convoy.emulate.programs import call
from convoy.fleet import Card

# What may pass at once, in seconds of the link. Shorter, and the timer's jitter costs throughput; longer, and small
# messages pass unshaped.
_BURST_S = 6e-4
_FRAME_BYTES = 1514
_LARGEST_PACKET_BYTES = 65_536
_QUEUE_S = 0.05  # what would wait longer is dropped, as a switch does
_FASTEST_BYTES_PER_S = 5e9  # more than a veth pair carries: a bucket would only cost processor time


@dataclass(frozen=True)
class Bucket:
    """A rate as the kernel takes it.

    Attributes:
        rate_bit_per_s: bits per second, headers included: TCP sees 0.95 of it.
        burst_bytes: what may pass at once after a pause.
        packet_bytes: the largest packet that the sending host may hand down in one piece.
    """

    rate_bit_per_s: int
    burst_bytes: int
    packet_bytes: int


def bucket(bytes_per_s: float) -> Bucket | None:
    """The bucket for a rate; None for a rate that needs no shaping.

    TCP hands down packets of up to 64 KiB, and a bucket that is smaller than a packet cuts it up frame by frame in the
    processor. Four hosts at 1 Gbit/s then reached 0.52 of the rate in a ring, against 0.95. So the bucket holds a
    whole packet, and on slow links the packets are made smaller instead of the bucket larger.
    """
    if bytes_per_s > _FASTEST_BYTES_PER_S:
        return None
    burst_bytes = bytes_per_s * _BURST_S
    packet_bytes = min(_LARGEST_PACKET_BYTES, max(2 * _FRAME_BYTES, round(burst_bytes)))
    # Each frame of a packet is counted with its own headers, about a twentieth of it.
    whole_bytes = packet_bytes + packet_bytes // 16 + _FRAME_BYTES
    return Bucket(max(8, round(bytes_per_s * 8)), max(whole_bytes, round(burst_bytes)), packet_bytes)


def shape(wiring: Wiring, port: Port, card: Card) -> None:
    """Give a host's cable the rates of its card; they go away with the namespaces. InputError if the kernel refuses."""
    # A bucket holds back what leaves a device: the host's end sends, the switch's end is what the host receives.
    sending, receiving = bucket(card.send_bytes_per_s), bucket(card.receive_bytes_per_s)
    if sending is not None:
        call("ip", "-netns", port.namespace, "link", "set", NIC, "gso_max_size", str(sending.packet_bytes))
        _hold_back(port.namespace, NIC, sending)
    if receiving is not None:
        _hold_back(wiring.switch, port.plug, receiving)


def _hold_back(namespace: str, device: str, limit: Bucket) -> None:
    words = ["rate", f"{limit.rate_bit_per_s}bit", "burst", f"{limit.burst_bytes}b", "latency", f"{_QUEUE_S * 1e3:g}ms"]
    call("tc", "-netns", namespace, "qdisc", "add", "dev", device, "root", "tbf", *words)
