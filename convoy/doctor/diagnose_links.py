"""Findings about the ways between hosts: closed, slow, late, and the clocks at their ends."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convoy.doctor.facts import Examination, Finding, Link, Reach
from convoy.doctor.names import Names

SLOW = 0.5
"""Below that part of what the fleet file says, or of what the others carry, a link is slow."""

LATE_S = 5e-3
"""There and back. A cabled network of one site takes a tenth of it."""

CLOCK_S = 1.0
FAST_ETHERNET_BYTES_PER_S = 12.5e6
"""What 100 Mbit/s carry: the sign of a bad cable, or of an old switch."""

_PORTS = "training connects to any port from 1024 up"


def link_findings(examination: Examination, names: Names) -> Iterator[Finding]:
    """What the ways between the hosts show."""
    ways = [_Way(names.host[link.source], names.host[link.target], link) for link in examination.links]
    yield from _closed(ways, examination)
    yield from _swallowing(ways)
    yield from _slow(ways, names)
    yield from _late(ways)
    yield from _clocks(ways)


@dataclass(frozen=True)
class _Way:
    """A link between two hosts by name."""

    source: str
    target: str
    link: Link

    def __str__(self) -> str:
        return f"{self.source} to {self.target}"


# ------------------------------------------------------------------------------------------------ closed


def _closed(ways: list[_Way], examination: Examination) -> Iterator[Finding]:
    """A host that is cut off is one finding, and so is a pair that is closed both ways."""
    closed = [way for way in ways if way.link.reach is not Reach.OPEN]
    for host in dict.fromkeys(name for way in closed for name in (way.target, way.source)):
        into, out = [way for way in ways if way.target == host], [way for way in ways if way.source == host]
        cut_into, cut_out = _all_alike(into, closed), _all_alike(out, closed)
        if cut_into or cut_out:
            whom = f"no host reaches {host}" if cut_into else f"{host} reaches no host"
            also = f", and {host} reaches none" if cut_into and cut_out else ""
            first = (into if cut_into else out)[0]
            yield Finding("error", f"{whom}{also}: {_what(first)}", _cure(first, ways, examination), (host,))
            closed = [way for way in closed if not (cut_into and way in into) and not (cut_out and way in out)]
    told: set[_Way] = set()
    for way in closed:
        back = next((w for w in closed if (w.source, w.target) == (way.target, way.source)), None)
        mutual = back is not None and back.link.reach is way.link.reach
        if not (mutual and back in told):
            told.add(way)
            whom = (
                f"{way.source} and {way.target} do not reach each other"
                if mutual
                else f"{way.source} does not reach {way.target}"
            )
            yield Finding("error", f"{whom}: {_what(way)}", _cure(way, ways, examination), (way.source, way.target))


def _all_alike(ways: list[_Way], closed: list[_Way]) -> bool:
    """Whether several ways are closed, all, for one reason."""
    return len(ways) > 1 and all(way in closed for way in ways) and len({way.link.reach for way in ways}) == 1


def _what(way: _Way) -> str:
    return {
        Reach.REFUSED: f"{way.link.at} refuses the connection, though {way.target} listens there",
        Reach.SILENT: f"{way.link.at} does not answer",
        Reach.NO_ROUTE: f"there is no way to {way.link.at} (no route to host)",
        Reach.STRANGER: f"at {way.link.at} answers another program than the doctor of {way.target}",
        Reach.OPEN: "",
    }[way.link.reach]


def _cure(way: _Way, ways: list[_Way], examination: Examination) -> str:
    host, _, port = way.link.at.partition(" port ")
    source = next((each.address for each in examination.checkups if each.device == way.link.source), "")
    back = any(
        other.source == way.target and other.target == way.source and other.link.reach is Reach.OPEN for other in ways
    )
    oneway = f"; the other way works, so look at the firewall of {way.target} first" if back else ""
    opened = f"sudo ufw allow from {source}" if source else "sudo ufw allow from the others' addresses"
    return {
        Reach.REFUSED: f"A firewall rejects it: {_PORTS}; open them between the hosts ({opened}, on {way.target})",
        Reach.SILENT: (
            f"A firewall drops it, or {way.target} cannot answer: {_PORTS}; open them between the hosts ({opened}, on "
            f"{way.target}){oneway}"
        ),
        Reach.NO_ROUTE: (
            f"See on {way.source}: ip route get {host}. The hosts must be on one network, or have routes to each other; "
            f"GLOO_SOCKET_IFNAME chooses the interface. A firewall (firewalld) may answer like that too{oneway}"
        ),
        Reach.STRANGER: (
            f"Two machines may have that address, or port {port} is forwarded elsewhere (NAT, a container): give each "
            "host an address that the others reach directly"
        ),
        Reach.OPEN: "",
    }[way.link.reach]


def _swallowing(ways: list[_Way]) -> Iterator[Finding]:
    for way in ways:
        if way.link.bytes_per_s == 0:
            what = f"small messages pass from {way}, but data does not"
            cure = (
                "Packets of full size are lost on the way: the MTU must be the same on both hosts and the switch (ip link "
                "shows it; 1500 is safe, in tunnels less)"
            )
            yield Finding("error", what, cure, (way.source, way.target))


# ------------------------------------------------------------------------------------------------ slow


def _slow(ways: list[_Way], names: Names) -> Iterator[Finding]:
    """A slow network is one finding, a slow host another one, and so is each slow link that is left."""
    rates = {way: way.link.bytes_per_s for way in ways if way.link.bytes_per_s}
    usual = usual_rate({(way.source, way.target): rate for way, rate in rates.items()})
    slow: dict[_Way, _Shortfall] = {}
    for way, rate in rates.items():
        expected, whose = usual, "that others carry"
        if names.fleet is not None:
            expected, whose = names.fleet.path(way.source, way.target).bandwidth_bytes_per_s, "of the fleet file"
        if expected is not None and rate < SLOW * expected:
            slow[way] = _Shortfall(rate, expected, whose)
    if len(slow) == len(rates) > 2:
        most = max(slow.values(), key=lambda each: each.rate)
        yield _slow_finding("all links are slow", most, tuple(names.first), "each host")
        return
    for host in dict.fromkeys(name for way in slow for name in (way.source, way.target)):
        sent = [way for way in rates if way.source == host]
        received = [way for way in rates if way.target == host]
        for verb, those in (("sends and receives", sent + received), ("sends", sent), ("receives", received)):
            # With a single other host, either of the two may be the cause.
            if min(len(sent), len(received)) > 1 and those and all(way in slow for way in those):
                most = max((slow.pop(way) for way in those), key=lambda each: each.rate)
                yield _slow_finding(f"{host} {verb} slowly, on all its links", most, (host,), host)
                break
    for way, shortfall in slow.items():
        yield _slow_finding(f"the link from {way} is slow", shortfall, (way.source, way.target), way.source)


@dataclass(frozen=True)
class _Shortfall:
    """What a link carries, what it should, and who says so."""

    rate: float
    expected: float
    whose: str


def usual_rate(rates: Mapping[tuple[str, str], float]) -> float | None:
    """What a healthy host carries, in bytes/s: of the best link of each host, the median, the higher of two.

    With one slow host of three, four of six links are slow, so the median of the links would call the slow ones usual.
    None where there are not two links to compare.
    """
    if len(rates) < 2:
        return None
    hosts = {host for pair in rates for host in pair}
    return statistics.median_high(max(rate for pair, rate in rates.items() if host in pair) for host in hosts)


def _slow_finding(what: str, most: _Shortfall, about: tuple[str, ...], host: str) -> Finding:
    if 0.7 * FAST_ETHERNET_BYTES_PER_S < most.rate <= 1.05 * FAST_ETHERNET_BYTES_PER_S:
        look = f"This is what 100 Mbit/s carry: a bad cable, or an old switch or port; ethtool on {host} says at what it runs"
    else:
        look = f"Look at its cable, switch port and other traffic; ethtool on {host} says at what its card runs"
    if "file" in most.whose:
        advice = "If it is to stay so: convoy measure, so that plans count with it"
    else:
        advice = "Plans with little traffic suffer less: convoy measure, then --plan auto"
    amount = f"{'' if len(about) == 2 else 'at most '}{_mb(most.rate)} of the {_mb(most.expected)} {most.whose}"
    return Finding("warning", f"{what}: {amount}", f"{look}. {advice}", about)


def _mb(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"


# ------------------------------------------------------------------------------------------------ late, and clocks


def _late(ways: list[_Way]) -> Iterator[Finding]:
    seen: set[frozenset[str]] = set()
    for way in ways:
        trip_s, pair = way.link.round_trip_s, frozenset((way.source, way.target))
        if trip_s is not None and trip_s > LATE_S and pair not in seen:
            seen.add(pair)
            what = f"messages between {way.source} and {way.target} take long: {trip_s * 1e3:.3g} ms there and back"
            cure = (
                "Every move and every sum waits so long: use a cable in place of radio or a tunnel, or hosts of one site; "
                "larger batches wait less often"
            )
            yield Finding("warning", what, cure, (way.source, way.target))


def _clocks(ways: list[_Way]) -> Iterator[Finding]:
    ahead = ahead_of_most({(way.source, way.target): way.link.ahead_s for way in ways if way.link.ahead_s is not None})
    for host, seconds in ahead.items():
        if abs(seconds) > CLOCK_S:
            side = "ahead of" if seconds > 0 else "behind"
            what = f"the clock of {host} is {_duration(abs(seconds))} {side} the others'"
            cure = (
                f"Training does not mind, but logs and files tell wrong times: sudo timedatectl set-ntp true, on {host}"
            )
            yield Finding("warning", what, cure, (host,))


def ahead_of_most(offsets: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """By how many seconds each host's clock is ahead of the middle one.

    Args:
        offsets: (source, target) -> seconds by which the target is ahead of the source.
    """
    both = {**{(b, a): -seconds for (a, b), seconds in offsets.items()}, **offsets}
    hosts = list(dict.fromkeys(host for pair in offsets for host in pair))
    if not hosts:
        return {}
    pivot = max(hosts, key=lambda host: sum(host in pair for pair in both))
    of_pivot = {host: both[pivot, host] for host in hosts if (pivot, host) in both} | {pivot: 0.0}
    middle = statistics.median_low(of_pivot.values())
    return {host: of_pivot[host] - middle for host in hosts if host in of_pivot}


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
