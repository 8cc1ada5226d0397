"""Which link carries data when: one at a time, so that none is measured while another uses the same cards."""

from dataclasses import dataclass

EACH_S = 0.3
LEAST_S = 0.1
"""Below that, what TCP needs to come up to speed is most of it."""

TOTAL_S = 8.0


@dataclass(frozen=True)
class Turns:
    """Ordered pairs (source, target) of hosts in the order of their turns, each for `each_s` seconds."""

    pairs: tuple[tuple[int, int], ...]
    each_s: float


def turns(hosts: int, each_s: float = EACH_S, least_s: float = LEAST_S, total_s: float = TOTAL_S) -> Turns:
    """All ordered pairs of hosts where there is time for them; else a sample in which all send and receive equally often.

    Pairs come stride by stride: in stride k every host sends to the k-th after it. Turns become shorter before pairs are left
    out, and one stride always remains: more than `total_s / least_s` hosts take longer than `total_s`.
    """
    if hosts < 2:
        return Turns((), each_s)
    count = max(1, min(hosts - 1, int(total_s / (least_s * hosts) + 1e-9)))
    # Evenly over 1 ... hosts - 1, so that near and far neighbours are tried, which may sit at other switches.
    strides = [1 + index * (hosts - 1) // count for index in range(count)]
    pairs = tuple((host, (host + stride) % hosts) for stride in strides for host in range(hosts))
    return Turns(pairs, min(each_s, max(least_s, total_s / len(pairs))))
