"""A lower bound for a DistributedDataParallel step: sending the gradients, after the computation they wait for.

DDP sums the gradients of a bucket once all ranks have all of them, one bucket after the other, by gloo's ring: of n ranks
each sends 2 (n - 1) / n of the bytes to the next one, and waits for the one before it. So for every bucket

    step >= (when the last rank has all of it) + (bytes of this bucket and those behind it) * 2 (n - 1) / n / rate

where the rate is that of the narrowest way in the ring. ZeroRedundancyOptimizer then sends the updated parameters from their
owners to all others, which no computing hides. Everything else is left out: latencies, the processor's work on messages, the
optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.fleet import Fleet
from convoy.layout.shares import Shares


@dataclass(frozen=True)
class Gradients:
    """When a step's gradients are ready, without any communication.

    Attributes:
        size_bytes: of each parameter.
        ready_s: of each rank, seconds from the start of the step, parameter by parameter.
    """

    size_bytes: tuple[int, ...]
    ready_s: tuple[tuple[float, ...], ...]

    def scaled(self, shares: Shares, others: Shares) -> "Gradients":
        """Return ready times for other shares: proportional for fewer samples, unchanged for more."""
        parts = [min(1.0, then / now) if now else 0.0 for now, then in zip(shares, others, strict=True)]
        return Gradients(
            self.size_bytes, tuple(tuple(part * s for s in row) for part, row in zip(parts, self.ready_s, strict=True))
        )


@dataclass(frozen=True, slots=True)
class Wire:
    """The network between ranks, one rank per device.

    Attributes:
        ring_bytes_per_s: the narrowest way from a rank to the next, what many of them share counted as what one of them gets.
        receive_bytes_per_s: of each rank's NIC.
    """

    ring_bytes_per_s: float
    receive_bytes_per_s: tuple[float, ...]

    @classmethod
    def of(cls, fleet: Fleet) -> "Wire | None":
        """Return a fleet's wire; None if two devices share a host, since their messages do not use its NIC."""
        hosts = [device.host for device in fleet.devices]
        if len(hosts) < 2 or len(set(hosts)) < len(hosts):
            return None
        ways = [fleet.path(a, b).bandwidth_bytes_per_s for a, b in zip(hosts, [*hosts[1:], hosts[0]], strict=True)]
        return cls(min(ways), tuple(fleet.nic(host).receive_bytes_per_s for host in hosts))

    def ring_s(self, size_bytes: float) -> float:
        """Return the seconds of an all-reduce over all ranks."""
        ranks = len(self.receive_bytes_per_s)
        return size_bytes * 2 * (ranks - 1) / ranks / self.ring_bytes_per_s

    def least_s(self, gradients: Gradients, caps_bytes: tuple[float, float], *, broadcasts: bool = False) -> float:
        """Return the lower bound of a step.

        Args:
            caps_bytes: a bucket is closed when it holds so many bytes, the first one and every other.
            broadcasts: whether updated parameters are sent by their owners, an even part each.
        """
        ready_s = [max(each) for each in zip(*gradients.ready_s, strict=True)]
        left_bytes = sum(gradients.size_bytes)
        ranks, total_bytes, least_s = len(gradients.ready_s), left_bytes, 0.0
        for bucket in buckets(ready_s, gradients.size_bytes, caps_bytes):
            least_s = max(least_s, max(ready_s[i] for i in bucket) + self.ring_s(left_bytes))
            left_bytes -= sum(gradients.size_bytes[i] for i in bucket)
        if broadcasts:
            least_s += total_bytes * (ranks - 1) / ranks / min(self.receive_bytes_per_s)
        return least_s


def buckets(ready_s: Sequence[float], size_bytes: Sequence[int], caps_bytes: tuple[float, float]) -> list[list[int]]:
    """Return each bucket's parameters in the order they become ready, as DDP fills them after its first step."""
    found: list[list[int]] = [[]]
    held = 0
    for index in sorted(range(len(ready_s)), key=lambda i: ready_s[i]):
        found[-1].append(index)
        held += size_bytes[index]
        if held >= caps_bytes[len(found) > 1]:
            found.append([])
            held = 0
    return [bucket for bucket in found if bucket]
