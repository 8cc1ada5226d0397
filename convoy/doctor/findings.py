"""Derives findings from the facts of an examination: each problem with its values and its remedy. Pure functions."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

from convoy.comm.environment import is_loopback
from convoy.doctor.facts import DeviceFacts, Examination, Finding, Reach, Severity, Way

MIN_FREE = 0.1  # fraction of a host's memory; half for a GPU, whose used memory belongs to other programs
MIN_SHM_BYTES = 256 << 20  # Docker gives containers 64 MiB
MIN_OPEN_FILES, OPEN_FILES_PER_DEVICE = 256, 16
REFUSED_OPEN_FILES = 64  # with a lower limit, a process fails while it starts or connects
MAX_BUSY = 0.25  # fraction of a machine's cores that other programs may use: all devices wait for the slowest
MIN_OF_LINK = 0.5  # fraction of the link's rate in the fleet file, or of the other links' rate
FAST_ETHERNET_BYTES_PER_S = 12.5e6  # 100 Mbit/s: typical of a bad cable or an old switch
MAX_LATENCY_S = 2.5e-3  # one way; ten times that of a wired network at one site
MAX_UNEQUAL = 1.5  # report the slowest device if the fastest is more than this many times as fast

Trouble = tuple[Severity, str, str]  # severity, what and cure, without the name of the host or device
Pair = tuple[str, str]  # the hosts at the ends of a link: source, target


def diagnose(found: Examination) -> tuple[Finding, ...]:
    """Return all findings: errors first, then warnings, then notes."""
    by_device = {found.name(each.device): _device_troubles(found, each) for each in found.facts}
    by_host = {host: _host_troubles(found, each) for host, each in found.hosts.items()}
    findings = [
        *found.reports, *_same_address(found), *_closed(found), *_slow(found), *_late(found),
        *_merged(by_device), *_merged(by_host), *_slowest(found),
    ]  # fmt: skip
    return tuple(sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity)))


def _merged(troubles: Mapping[str, Iterable[Trouble]]) -> Iterator[Finding]:
    """Merge equal troubles of several hosts or devices into one finding."""
    names: dict[Trouble, list[str]] = {}
    for name, those in troubles.items():
        for trouble in those:
            names.setdefault(trouble, []).append(name)
    for (severity, what, cure), about in names.items():
        listed = " and ".join(filter(None, (", ".join(about[:-1]), about[-1])))
        yield Finding(severity, f"{listed}: {what}", cure, tuple(about))


def _same_address(found: Examination) -> Iterator[Finding]:
    for (a, one), (b, other) in combinations(found.hosts.items(), 2):
        if one.info.address == other.info.address != "" and not is_loopback(one.info.address):
            cure = "Give one of them another address; run containers with docker run --network=host"
            yield Finding("error", f"{a} and {b} both have the address {one.info.address}", cure, (a, b))


def _closed(found: Examination) -> Iterator[Finding]:
    """Report failed connections, in one finding if a host reaches none of several others, or none of them reaches it."""
    shut = {(found.host[way.source], found.host[way.target]): way for way in found.ways if way.reach is not Reach.OPEN}
    for host in found.hosts:
        for end, whom in ((1, f"no host reaches {host}"), (0, f"{host} reaches no host")):
            those = [pair for pair in shut if pair[end] == host]
            if len(those) == len(found.hosts) - 1 > 1:
                yield _closed_finding(whom, those[0], shut[those[0]], (host,))
                shut = {pair: way for pair, way in shut.items() if pair not in those}
    for (a, b), way in shut.items():
        if (back := shut.get((b, a))) is None or back.reach is not way.reach:
            yield _closed_finding(f"{a} does not reach {b}", (a, b), way, (a, b))
        elif way.source < way.target:
            yield _closed_finding(f"{a} and {b} do not reach each other", (a, b), way, (a, b))


def _closed_finding(whom: str, pair: Pair, way: Way, about: tuple[str, ...]) -> Finding:
    a, b = pair
    if way.reach is Reach.NO_ROUTE:
        what = "cannot be reached (no route to host)"
        cure = (
            f"See on {a}: ip route get {way.address}. The hosts must be on one network, or have routes to each other; "
            "GLOO_SOCKET_IFNAME chooses the interface. A firewall (firewalld) may also give this answer"
        )
    else:
        what = "refuses the connection" if way.reach is Reach.REFUSED else "does not answer"
        what += f", though {b} listens there"
        cure = (
            "A firewall blocks the connection. Training uses any port from 1024 up; open these on "
            f"{b} (sudo ufw allow from ADDRESS, with the address of {a})"
        )
    return Finding("error", f"{whom}: {way.address} port {way.port} {what}", cure, about)


def _slow(found: Examination) -> Iterator[Finding]:
    """Report slow links, in one finding if all links of a host are slow."""
    links = () if found.measured is None else found.measured.links
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in links if link.source != link.target}
    expected, usual = dict.fromkeys(rates, usual_rate(rates)), "of the other links"
    if found.file is not None:
        expected = {pair: found.file.path(*pair).bandwidth_bytes_per_s for pair in rates}
        usual = "of the fleet file"
    slow = [pair for pair, rate in rates.items() if rate < MIN_OF_LINK * expected[pair]]
    groups: list[tuple[str, tuple[str, ...], list[Pair]]] = []
    for host in found.hosts:
        those = [pair for pair in rates if host in pair]
        # With only two hosts, either may be the cause.
        if len(those) > 2 and all(pair in slow for pair in those):
            groups.append((f"{host} sends and receives slowly on all its links", (host,), those))
            slow = [pair for pair in slow if pair not in those]
    groups += [(f"the link from {pair[0]} to {pair[1]} is slow", pair, [pair]) for pair in slow]
    for what, about, those in groups:
        best = max(those, key=lambda pair: rates[pair])
        cure = "Check the cable, the switch port and other traffic; ethtool on the host shows the rate of its NIC"
        if 0.7 < rates[best] / FAST_ETHERNET_BYTES_PER_S <= 1.05:
            cure = "This is the rate of 100 Mbit/s Ethernet: a bad cable, or an old switch or port; see ethtool on the host"
        cure += ". If you cannot change it, run convoy measure; --plan auto then sends less over it"
        rate = f"{'at most ' * (len(those) > 1)}{rates[best] / 1e6:.3g} MB/s of the {expected[best] / 1e6:.3g} MB/s"
        yield Finding("warning", f"{what}: {rate} {usual}", cure, about)


def usual_rate(rates: Mapping[Pair, float]) -> float:
    """Return the usual rate in bytes/s: the (upper) median over hosts of the rate of each host's fastest link."""
    # Not the median over links: with one slow host of three, four of six links are slow.
    hosts = {host for pair in rates for host in pair}
    best = [max(rate for pair, rate in rates.items() if host in pair) for host in hosts]
    return statistics.median_high(best) if best else 0.0


def _late(found: Examination) -> Iterator[Finding]:
    for link in () if found.measured is None else found.measured.links:
        # Both directions have the same latency: half of a round trip.
        if link.latency_s > MAX_LATENCY_S and link.source < link.target:
            what = f"a message between {link.source} and {link.target} takes {link.latency_s * 1e3:.3g} ms"
            cure = (
                "Every exchange waits at least this long: use a cable instead of Wi-Fi or a tunnel, or hosts at one site; "
                "with larger batches exchanges are rarer"
            )
            yield Finding("warning", what, cure, (link.source, link.target))


def _device_troubles(found: Examination, each: DeviceFacts) -> Iterator[Trouble]:
    for what, cure in each.problems:
        yield "error", what, cure
    if each.device not in found.paces:
        cure = "Its process died or froze, or its machine is overloaded: see its own output or the system's log"
        yield "error", "it stopped answering during the examination", cure
    free, total = each.free_bytes / 1e9, each.memory_bytes / 1e9
    if each.own.kind != "cpu":
        if free < total / 2:
            what = f"other programs hold {total - free:.1f} GB of the {total:.1f} GB of {each.info.device}"
            yield "warning", what, "nvidia-smi names them; end them, or leave this GPU out"
        return
    if free < MIN_FREE * total:
        cure = "End the programs that fill it (press M in top to sort by memory), or give this device a smaller share"
        yield "warning", f"{free:.1f} GB of {total:.1f} GB memory are free", cure
    on_cpu = [found.host[other.device] for other in found.facts if other.own.kind == "cpu"]
    cores = each.cores / max(1, on_cpu.count(found.host[each.device]))
    if found.file is not None and (described := found.row[each.device].cores) is not None:
        # A quota in the fleet file is per device; any other quota is shared by all devices on the host.
        cores = min(each.cores, described)
    threads = each.own.cores or 1
    if threads > max(1.0, 1.5 * cores) or threads * 2 < cores:
        what = f"{threads} threads for {cores:.3g} cores"
        cure = f"Set OMP_NUM_THREADS={max(1, round(cores))} there (torchrun sets 1 by itself)"
        yield "warning", what, cure


def _host_troubles(found: Examination, own: DeviceFacts) -> Iterator[Trouble]:
    """Report the troubles of one machine, from the facts of its first device."""
    inventory = own.inventory
    if inventory is not None and inventory.gpus and not own.accelerators:
        build = f"built for CUDA {own.cuda}" if own.cuda else "built for processors only"
        yield (
            "warning",
            f"nvidia-smi shows {inventory.gpus[0]}, but torch {own.info.torch}, {build}, finds no GPU",
            "Install torch with CUDA there (pytorch.org has the command) or a newer driver, unset "
            "CUDA_VISIBLE_DEVICES, or start the container with --gpus all",
        )
    if own.shm_bytes is not None and own.shm_bytes[0] < MIN_SHM_BYTES:
        free, total = (each / (1 << 20) for each in own.shm_bytes)
        yield (
            "warning",
            f"/dev/shm has {free:,.0f} MiB free of {total:,.0f} MiB, and loader workers (--workers) pass batches through it",
            'Workers may hang, or end with a bus error or "No space left on device": start the container with --ipc=host or '
            "--shm-size=2g, remove what fills /dev/shm, or train with --workers 0",
        )
    least = MIN_OPEN_FILES + OPEN_FILES_PER_DEVICE * found.devices
    if own.open_files is not None and own.open_files < least:
        yield (
            "error" if own.open_files < REFUSED_OPEN_FILES else "warning",
            f"a process may open {own.open_files} files, connections included, and this job needs up to {least}",
            "Run ulimit -n 4096 before the start; in a service LimitNOFILE=4096, in Docker --ulimit nofile=4096",
        )
    pace, cores = found.paces.get(own.device), inventory.cores if inventory is not None else own.cores
    if pace is not None and pace.busy_cores > MAX_BUSY * cores:
        what = f"other programs keep {pace.busy_cores:.1f} of the {cores:g} cores busy"
        yield "warning", what, "Find them with top and end them, or wait: every step waits for the slowest device"


def _slowest(found: Examination) -> Iterator[Finding]:
    speeds = {device: pace.samples_per_s for device, pace in found.paces.items()}
    slow, fast = (pick(speeds, key=lambda device: speeds[device], default=0) for pick in (min, max))
    if speeds and speeds[fast] > MAX_UNEQUAL * speeds[slow]:
        name, share = found.name(slow), speeds[slow] / sum(speeds.values())
        what = f"{name} is the slowest: {speeds[fast] / speeds[slow]:.1f} times slower than {found.name(fast)}"
        cure = (
            f"No action is needed: --plan auto and data-by-speed give it about {share:.0%} of the work; with even shares "
            "(data, DDP) all devices wait for it. If equal devices are faster, look for heat, a power limit or other programs"
        )
        yield Finding("note", what, cure, (name,))
