"""Conditions over the facts of an examination: what holds, of which hosts or devices, with which values. Pure.

A condition gives one mapping per occurrence: `about`, the names of the hosts or devices concerned, the values that the texts
in `convoy.doctor.findings` name, and `kind` where those tell several kinds of occurrences apart.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from convoy.comm.environment import is_loopback
from convoy.doctor.schema import Checkup, Examination, Link, Reach

MIN_FREE = 0.1
"""Of a host's memory. Of a GPU's, half: what is taken there belongs to another program."""

MIN_SHARED_BYTES = 256 << 20
"""Docker gives containers 64 MiB."""

MIN_OPEN_FILES, OPEN_FILES_PER_DEVICE = 256, 16
MAX_BUSY = 0.25
"""Of a machine's cores. More is felt in every step, since all wait for the slowest."""

MIN_FASTER = 2.0
"""How many times faster an unused interface is before it is reported."""

MIN_OF_LINK = 0.5
"""Of what the fleet file says that a link carries, or of what the others carry."""

FAST_ETHERNET_BYTES_PER_S = 12.5e6
"""100 Mbit/s: the sign of a bad cable, or of an old switch."""

MAX_ROUND_TRIP_S = 5e-3
"""A cabled network of one site takes a tenth of it."""

MAX_CLOCK_S = 1.0
MIN_OF_EQUALS = 0.7
"""Of the speed of devices with the same hardware, cores and threads."""

MIN_OF_PAST = 0.5
"""Of the share of the fleet's speed that it had when it was measured; another model, so only a rough comparison."""

MAX_UNEQUAL = 1.5
"""How many times slower than the fastest the slowest device is before it is reported."""

Values = Mapping[str, Any]
Condition = Callable[[Examination], Iterable[Values]]
OfDevice = Callable[[Examination, Checkup], bool | Iterable[Values]]
"""Whether it holds of one device, or its occurrences there."""


def each_device(holds: OfDevice) -> Condition:
    """A condition over what each device reports of itself."""
    return lambda facts: _each(facts, facts.by_name, holds)


def each_host(holds: OfDevice) -> Condition:
    """A condition over what the first device of each host reports of the machine."""
    return lambda facts: _each(facts, facts.hosts, holds)


def _each(facts: Examination, those: Mapping[str, Checkup], holds: OfDevice) -> Iterator[Values]:
    for name, own in those.items():
        found = holds(facts, own)
        shown = {"name": name, "own": own, "pace": facts.paces.get(own.device), "described": facts.described(own)}
        for values in ({},) * found if isinstance(found, bool) else found:
            yield {"about": (name,), **shown, **values}


def only(kind: object, condition: Condition) -> Condition:
    """The occurrences of one kind."""
    return lambda facts: (values for values in condition(facts) if values["kind"] == kind)


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


# ------------------------------------------------------------------------------------------------ the job as a whole


def absent(facts: Examination) -> Iterator[Values]:
    """Devices that did not come, together; kind: whether the meeting point is a loopback address of device 0."""
    came = {own.device: own for own in facts.checkups}
    missing = [device for device in range(facts.devices) if device not in came]
    if missing and came:
        at, address = facts.checkups[0].meets_at
        on_host = {device: f" on host {host}" for device, host in facts.host.items()}
        yield {
            "about": tuple(map(facts.name, missing)), "facts": facts, "missing": len(missing), "came": len(came),
            "who": ", ".join(facts.name(device) + on_host.get(device, "") for device in missing),
            "at": at or "the meeting point", "address": address, "host": facts.host.get(0), "own": facts.checkups[0],
            "kind": 0 in came and is_loopback(address),
        }  # fmt: skip


def other_fleet(facts: Examination) -> Iterator[Values]:
    """A fleet file of another number of devices."""
    if facts.fleet is not None and facts.job_fleet is None:
        yield {"about": (), "described": len(facts.fleet.devices), "devices": facts.devices}


def other_kind(facts: Examination, own: Checkup) -> bool:
    """Whether a device is of another kind than in the fleet file."""
    device = facts.described(own)
    return device is not None and not own.on.startswith(device.kind)


def other_hosts(facts: Examination) -> Iterator[Values]:
    """Two devices that the fleet file puts on one host and the job on two, or the other way round."""
    for (a, one), (b, other) in combinations(facts.by_name.items() if facts.job_fleet else (), 2):
        together = facts.host[one.device] == facts.host[other.device]
        if together != (one.machine == other.machine):
            yield {"about": (a, b), "a": a, "b": b, "hosts": "one host" if together else "two hosts"}


def differing(value_of: Callable[[Checkup], str]) -> Condition:
    """A value that is not the same on all devices; about those that do not have the usual one."""

    def find(facts: Examination) -> Iterator[Values]:
        values = {name: value_of(own) for name, own in facts.by_name.items()}
        counts = Counter(values.values()).most_common()
        others = {name: value for name, value in values.items() if value != counts[0][0]}
        if others:
            who = ", ".join(f"{value} on {name}" for name, value in others.items())
            yield {"about": tuple(others), "usual": counts[0][0], "others": who, "all": listed(sorted(dict(counts)))}

    return find


def same_address(facts: Examination) -> Iterator[Values]:
    """Two hosts that report one address."""
    for (a, one), (b, other) in combinations(facts.hosts.items(), 2):
        if one.address == other.address != "" and not is_loopback(one.address):
            yield {"about": (a, b), "a": a, "b": b, "address": one.address}


# ------------------------------------------------------------------------------------------------ links


def closed(facts: Examination) -> Iterator[Values]:
    """Links that could not be opened; kind: why. A host that is cut off, or a pair closed both ways, occurs once."""
    for (source, target), whom, about in _closed(facts.ways):
        link, back = facts.ways[source, target], facts.ways.get((target, source))
        address, _, port = link.at.partition(" port ")
        works = back is not None and back.reach is Reach.OPEN
        yield {
            "kind": link.reach, "about": about, "whom": whom, "source": source, "target": target, "at": link.at,
            "address": address, "port": port, "allowed": facts.hosts[source].address or "the others' addresses",
            "one_way": f"; the other way works, so look at the firewall of {target} first" if works else "",
        }  # fmt: skip


def _closed(ways: Mapping[tuple[str, str], Link]) -> Iterator[tuple[tuple[str, str], str, tuple[str, ...]]]:
    """(one of the closed links, who does not reach whom, the hosts concerned)."""
    shut = {pair: link.reach for pair, link in ways.items() if link.reach is not Reach.OPEN}
    for host in dict.fromkeys(host for source, target in shut for host in (target, source)):
        into, out = ([pair for pair in ways if pair[end] == host] for end in (1, 0))
        # Several, all closed, and for one reason.
        cut = [those for those in (into, out) if len(those) > 1 and len({shut.get(pair) for pair in those}) == 1]
        cut = [those for those in cut if those[0] in shut]
        if cut:
            whom = f"no host reaches {host}" if cut[0] is into else f"{host} reaches no host"
            yield cut[0][0], whom + f", and {host} reaches none" * (len(cut) - 1), (host,)
            shut = {pair: reach for pair, reach in shut.items() if not any(pair in those for those in cut)}
    told: set[tuple[str, str]] = set()
    for (source, target), reach in shut.items():
        both = shut.get((target, source)) is reach
        if (target, source) not in told or not both:
            told.add((source, target))
            whom = f"{source} and {target} do not reach each other" if both else f"{source} does not reach {target}"
            yield (source, target), whom, (source, target)


def swallowing(facts: Examination) -> Iterator[Values]:
    """Links that pass small messages and no data."""
    yield from ({"about": pair, "pair": pair} for pair, link in facts.ways.items() if link.bytes_per_s == 0)


def late(facts: Examination) -> Iterator[Values]:
    """Pairs of hosts whose messages take long, in one direction or both."""
    seen: set[frozenset[str]] = set()
    for pair, link in facts.ways.items():
        if (link.round_trip_s or 0.0) > MAX_ROUND_TRIP_S and frozenset(pair) not in seen:
            seen.add(frozenset(pair))
            yield {"about": pair, "pair": pair, "trip": link.round_trip_s}


def clocks(facts: Examination) -> Iterator[Values]:
    """Hosts whose clock is wrong."""
    offsets = {pair: link.ahead_s for pair, link in facts.ways.items() if link.ahead_s is not None}
    for host, ahead_s in ahead_of_most(offsets).items():
        if abs(ahead_s) > MAX_CLOCK_S:
            units = {"days": 86_400, "hours": 3600, "minutes": 60}
            unit, size = next((each for each in units.items() if abs(ahead_s) >= 2 * each[1]), ("s", 1))
            side = "ahead of" if ahead_s > 0 else "behind"
            yield {"about": (host,), "host": host, "off": f"{abs(ahead_s) / size:.3g} {unit}", "side": side}


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


def slow(facts: Examination) -> Iterator[Values]:
    """Links that carry little; kind: whether it is what 100 Mbit/s carry. A slow network, or a slow host, occurs once."""
    fleet, usual = facts.job_fleet, "that others carry"
    rates = {pair: link.bytes_per_s for pair, link in facts.ways.items() if link.bytes_per_s}
    expected = dict.fromkeys(rates, usual_rate(rates) or 0.0)
    then = "Plans with little traffic suffer less: convoy measure, then --plan auto"
    if fleet is not None:
        expected, usual = {pair: fleet.path(*pair).bandwidth_bytes_per_s for pair in rates}, "of the fleet file"
        then = "If it is to stay so: convoy measure, so that plans count with it"
    for what, about, host, those in _slow(rates, expected, tuple(facts.hosts)):
        best = max(those, key=lambda pair: rates[pair])
        yield {
            "kind": 0.7 < rates[best] / FAST_ETHERNET_BYTES_PER_S <= 1.05, "about": about, "what": what, "host": host,
            "most": "" if len(those) == 1 else "at most ", "rate": rates[best], "expected": expected[best], "of": usual,
            "then": then,
        }  # fmt: skip


def _slow(
    rates: Mapping[tuple[str, str], float], expected: Mapping[tuple[str, str], float], hosts: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, ...], str, Sequence[tuple[str, str]]]]:
    """(what is slow, the hosts concerned, where to look, the links)."""
    slow = [pair for pair, rate in rates.items() if rate < MIN_OF_LINK * expected[pair]]
    if len(slow) == len(rates) > 2:
        yield "all links are slow", hosts, "each host", slow
        return
    for host in dict.fromkeys(host for pair in slow for host in pair):
        sent, received = ([pair for pair in rates if pair[end] == host] for end in (0, 1))
        for verb, those in (("sends and receives", sent + received), ("sends", sent), ("receives", received)):
            # With a single other host, either of the two may be the cause.
            if min(len(sent), len(received)) > 1 and all(pair in slow for pair in those):
                yield f"{host} {verb} slowly, on all its links", (host,), host, those
                slow = [pair for pair in slow if pair not in those]
                break
    for pair in slow:
        yield f"the link from {pair[0]} to {pair[1]} is slow", pair, pair[0], [pair]


def usual_rate(rates: Mapping[tuple[str, str], float]) -> float | None:
    """What a healthy host carries, in bytes/s: of the best link of each host, the median, the higher of two.

    With one slow host of three, four of six links are slow, so the median of the links would call the slow ones usual.
    None where there are not two links to compare.
    """
    if len(rates) < 2:
        return None
    hosts = {host for pair in rates for host in pair}
    return statistics.median_high(max(rate for pair, rate in rates.items() if host in pair) for host in hosts)


# ------------------------------------------------------------------------------------------------ each machine


def busy(facts: Examination, own: Checkup) -> bool:
    """Whether other programs use much of a machine."""
    pace = facts.paces.get(own.device)
    return pace is not None and pace.busy_cores > MAX_BUSY * own.cores


def leads_to_itself(_: Examination, own: Checkup) -> bool:
    """Whether a machine's name resolves to loopback addresses only, though it has a network."""
    return bool(own.interfaces and own.resolves_to) and all(map(is_loopback, own.resolves_to))


def few_files(facts: Examination, own: Checkup) -> Iterator[Values]:
    """Whether a process may open few files."""
    least = MIN_OPEN_FILES + OPEN_FILES_PER_DEVICE * facts.devices
    if 0 <= own.open_files < least:  # RLIM_INFINITY is negative
        yield {"least": least}


def interface(_: Examination, own: Checkup) -> Iterator[Values]:
    """The interface in use, if there is a "faster" one, if it is a "radio", or if there are "others" (the kind)."""
    used = next((each for each in own.interfaces if own.address in each.addresses), None)
    rest = [each for each in own.interfaces if each is not used]
    if used is not None and (rest or used.wireless):
        best = max(rest, key=lambda each: each.bytes_per_s or 0.0, default=used)
        faster = used.bytes_per_s and (best.bytes_per_s or 0.0) > MIN_FASTER * used.bytes_per_s
        wired = f": GLOO_SOCKET_IFNAME={rest[0].name} where it is plugged in" if rest else ""
        others = ", ".join(f"{each.name} ({each.addresses[0]})" for each in rest)
        kind = "faster" if faster else "radio" if used.wireless else "others"
        yield {"kind": kind, "used": used, "best": best, "wired": wired, "others": others}


def nccl_interface(_: Examination, own: Checkup) -> Iterator[Values]:
    """NCCL takes a list of prefixes; `=` in front asks for whole names, `^` for all but these."""
    chosen, present = own.environment.get("NCCL_SOCKET_IFNAME", ""), [each.name for each in own.interfaces]
    if chosen and not chosen.startswith("^") and own.gpus:
        exact, wanted = chosen.startswith("="), chosen.removeprefix("=").split(",")
        if not any(name == want if exact else name.startswith(want) for name in present for want in wanted):
            yield {"chosen": chosen, "present": listed(present) or "those to come"}


def nccl_slow(_: Examination, own: Checkup) -> Iterator[Values]:
    """Variables that keep the GPUs of a machine from exchanging data directly."""
    for variable in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if own.environment.get(variable) == "1" and len(own.gpus) > 1:
            yield {"variable": variable, "count": len(own.gpus)}


def taken_gpus(_: Examination, own: Checkup) -> Iterator[Values]:
    """GPUs of which other programs hold much memory."""
    for index, gpu in enumerate(own.gpus):
        if gpu.free_bytes < gpu.total_bytes / 2:
            yield {"taken": gpu.total_bytes - gpu.free_bytes, "gpu": gpu, "index": index}


def without_gpus(_: Examination, own: Checkup) -> Iterator[Values]:
    """NVIDIA's driver and no GPU: because they are "hidden", torch is built for "cpu", or for "no reason" (the kind)."""
    hidden = own.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if own.nvidia_driver and not own.gpus:
        yield {"kind": "hidden" if hidden else "no reason" if own.cuda else "cpu"}


def threads(facts: Examination, own: Checkup) -> Iterator[Values]:
    """Too "many" or too "few" threads of a CPU device (the kind) for its share of the host's cores."""
    on_cpu = [facts.host[each.device] for each in facts.checkups if each.on.startswith("cpu")]
    device, share = facts.described(own), own.usable_cores / max(1, on_cpu.count(facts.host[own.device]))
    if device is not None and device.cores is not None:
        # A quota that the fleet file states is the device's own; any other is shared by all on the host.
        share = min(own.usable_cores, device.cores)
    many = own.threads > max(1.0, 1.5 * share)
    if own.on.startswith("cpu") and (many or own.threads * 2 < share):
        set_to = own.environment.get("OMP_NUM_THREADS")
        why = f", since OMP_NUM_THREADS={set_to} (torchrun sets 1 by itself)" if set_to else ""
        compute = f"{own.threads} thread{'s' * (own.threads > 1)} compute{'s' * (own.threads == 1)}"
        advised = max(1, round(share))
        yield {"kind": "many" if many else "few", "compute": compute, "share": share, "why": why, "advised": advised}


# ------------------------------------------------------------------------------------------------ speeds


def slower_than_equals(facts: Examination) -> Iterator[Values]:
    """Devices slower than those of the same hardware, with the same cores and threads."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, own in facts.by_name.items():
        if name in facts.speeds:
            imposed = (device.cores, device.slowdown) if (device := facts.described(own)) else ()
            on_cpu = (own.usable_cores, own.threads) if own.on.startswith("cpu") else ()
            groups.setdefault((own.hardware, on_cpu, imposed), []).append(name)
    for names in groups.values():
        yield from _slower(facts, names, dict.fromkeys(names, 1.0), MIN_OF_EQUALS)


def slower_than_past(facts: Examination) -> Iterator[Values]:
    """Devices with less of the fleet's speed than when it was measured, that are not slower than their equals."""
    if facts.job_fleet and len(facts.past_samples_per_s) == facts.devices and len(facts.speeds) > 1:
        known = {values["name"] for values in slower_than_equals(facts)}
        past = {facts.name(device): speed for device, speed in enumerate(facts.past_samples_per_s)}
        yield from (each for each in _slower(facts, facts.speeds, past, MIN_OF_PAST) if each["name"] not in known)


def _slower(facts: Examination, names: Iterable[str], expected: Mapping[str, float], least: float) -> Iterator[Values]:
    """Devices whose ratio of speed to what is expected is less than a part of the usual one."""
    ratios = {name: facts.speeds[name] / expected[name] for name in names}
    usual = statistics.median_high(ratios.values())
    for name, ratio in ratios.items():
        if ratio < least * usual:
            yield {"about": (name,), "name": name, "part": ratio / usual}


def slowest(facts: Examination) -> Iterator[Values]:
    """The slowest device, if the fastest is much faster."""
    speeds = facts.speeds
    slow, fast = (pick(speeds, key=lambda name: speeds[name], default="") for pick in (min, max))
    if speeds and speeds[fast] > MAX_UNEQUAL * speeds[slow]:
        factor, share = speeds[fast] / speeds[slow], speeds[slow] / sum(speeds.values())
        yield {"about": (slow,), "slow": slow, "fast": fast, "count": len(speeds), "factor": factor, "share": share}
