"""A host's card at its rate: a token bucket on either end of its cable."""

from convoy.fleet import Card
from convoy.rehearse.namespaces import NIC, Port, Wiring
from convoy.rehearse.programs import call

# What may pass at once. Shorter, and the timer's jitter costs throughput; longer, and small messages pass unshaped.
# At 1 Gbit/s TCP reached 0.89 of the rate with 0.13 ms, 0.95 with 0.5 ms, 0.96 with 2 ms.
_BURST_S = 5e-4
_LEAST_BURST_BYTES = 4096  # two full frames, or nothing would ever pass a slow card
_LONGEST_QUEUE_S = 0.05  # what waits longer is dropped, as a switch would
_FASTEST_BYTES_PER_S = 5e9  # beyond what a veth pair carries: a bucket would only cost processor time


def token_bucket(bytes_per_s: float) -> list[str]:
    """The words that describe a rate to `tc`; empty for a rate that no shaping is needed for."""
    if bytes_per_s > _FASTEST_BYTES_PER_S:
        return []
    burst_bytes = max(_LEAST_BURST_BYTES, round(bytes_per_s * _BURST_S))
    rate_bit_per_s = max(8, round(bytes_per_s * 8))
    queue_us = round(_LONGEST_QUEUE_S * 1e6)
    return ["tbf", "rate", f"{rate_bit_per_s}bit", "burst", f"{burst_bytes}b", "latency", f"{queue_us}us"]


def shape(wiring: Wiring, port: Port, card: Card) -> None:
    """Give a host's cable the rates of its card; they go away with the namespaces."""
    # A bucket holds back what leaves a device: the host's end sends, the switch's end is what the host receives.
    for namespace, device, bytes_per_s in (
        (port.namespace, NIC, card.send_bytes_per_s),
        (wiring.switch, port.plug, card.receive_bytes_per_s),
    ):
        if words := token_bucket(bytes_per_s):
            call("tc", "-netns", namespace, "qdisc", "add", "dev", device, "root", *words)
