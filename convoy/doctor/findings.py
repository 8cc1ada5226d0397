"""From the facts of an examination to its findings: each problem with its values and its remedy. Pure."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

from convoy.comm.environment import is_loopback
from convoy.doctor.facts import DeviceFacts, Examination, Finding, Reach, Severity, Way

MIN_FREE = 0.1  # of a host's memory; of a GPU's half, since used memory there belongs to another program
MIN_SHM_BYTES = 256 << 20  # Docker gives containers 64 MiB
MIN_OPEN_FILES, OPEN_FILES_PER_DEVICE = 256, 16
REFUSED_OPEN_FILES = 64  # a process that may open fewer fails while it starts or meets the others
MAX_BUSY = 0.25  # of a machine's cores: more is felt in every step, since all wait for the slowest
MIN_OF_LINK = 0.5  # of the rate that the fleet file gives a link, or that the other links reach
FAST_ETHERNET_BYTES_PER_S = 12.5e6  # 100 Mbit/s: the sign of a bad cable, or of an old switch
MAX_LATENCY_S = 2.5e-3  # one way; a cabled network of one site takes a tenth of it
MAX_UNEQUAL = 1.5  # how many times slower than the fastest the slowest device is before it is reported

Trouble = tuple[Severity, str, str]  # severity, what and cure, without the name of the host or device
Pair = tuple[str, str]  # the hosts at the ends of a link: source, target


def diagnose(found: Examination) -> tuple[Finding, ...]:
    """Return all findings that the facts give: errors first, then warnings, then notes."""
    by_device = {found.name(each.device): _device_troubles(found, each) for each in found.facts}
    by_host = {host: _host_troubles(found, each) for host, each in found.hosts.items()}
    findings = [
        *found.reports, *_same_address(found), *_closed(found), *_slow(found), *_late(found),
        *_merged(by_device), *_merged(by_host), *_slowest(found),
    ]  # fmt: skip
    return tuple(sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.severity)))


def _merged(troubles: Mapping[str, Iterable[Trouble]]) -> Iterator[Finding]:
    """Make one finding of equal troubles of several hosts or devices."""
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
            cure = "Give one of them another address; containers the network of their host (docker run --network=host)"
            yield Finding("error", f"{a} and {b} both have the address {one.info.address}", cure, (a, b))


def _closed(found: Examination) -> Iterator[Finding]:
    """Report closed ways. A host that none of several others reaches, or that reaches none, is one finding."""
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
            "GLOO_SOCKET_IFNAME chooses the interface. A firewall (firewalld) may answer like that too"
        )
    else:
        what = "refuses the connection" if way.reach is Reach.REFUSED else "does not answer"
        what += f", though {b} listens there"
        cure = (
            "A firewall rejects or drops it: training connects to any port from 1024 up; open them on "
            f"{b} (sudo ufw allow from ADDRESS, that of {a})"
        )
    return Finding("error", f"{whom}: {way.address} port {way.port} {what}", cure, about)


def _slow(found: Examination) -> Iterator[Finding]:
    """Report links that carry little. A host whose links are all slow is one finding."""
    links = () if found.measured is None else found.measured.links
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in links if link.source != link.target}
    expected, usual = dict.fromkeys(rates, usual_rate(rates)), "that others carry"
    if found.file is not None:
        expected = {pair: found.file.path(*pair).bandwidth_bytes_per_s for pair in rates}
        usual = "of the fleet file"
    slow = [pair for pair, rate in rates.items() if rate < MIN_OF_LINK * expected[pair]]
    groups: list[tuple[str, tuple[str, ...], list[Pair]]] = []
    for host in found.hosts:
        those = [pair for pair in rates if host in pair]
        # With a single other host, either of the two may be the cause.
        if len(those) > 2 and all(pair in slow for pair in those):
            groups.append((f"{host} sends and receives slowly, on all its links", (host,), those))
            slow = [pair for pair in slow if pair not in those]
    groups += [(f"the link from {pair[0]} to {pair[1]} is slow", pair, [pair]) for pair in slow]
    for what, about, those in groups:
        best = max(those, key=lambda pair: rates[pair])
        cure = "Look at the cable, the switch port and other traffic; ethtool on the host shows the rate of its NIC"
        if 0.7 < rates[best] / FAST_ETHERNET_BYTES_PER_S <= 1.05:
            cure = "This is what 100 Mbit/s carry: a bad cable, or an old switch or port; see ethtool on the host"
        cure += ". If it is to stay so: convoy measure, then --plan auto sends less over it"
        rate = f"{'at most ' * (len(those) > 1)}{rates[best] / 1e6:.3g} MB/s of the {expected[best] / 1e6:.3g} MB/s"
        yield Finding("warning", f"{what}: {rate} {usual}", cure, about)


def usual_rate(rates: Mapping[Pair, float]) -> float:
    """Return the rate of a healthy host in bytes/s: the median over hosts of each host's best link, the higher of two."""
    # With one slow host of three, four of six links are slow: their median would call the slow ones usual.
    hosts = {host for pair in rates for host in pair}
    best = [max(rate for pair, rate in rates.items() if host in pair) for host in hosts]
    return statistics.median_high(best) if best else 0.0


def _late(found: Examination) -> Iterator[Finding]:
    for link in () if found.measured is None else found.measured.links:
        # Both directions have the same latency: half of a round trip.
        if link.latency_s > MAX_LATENCY_S and link.source < link.target:
            what = f"a message between {link.source} and {link.target} takes {link.latency_s * 1e3:.3g} ms"
            cure = (
                "Every exchange waits that long: use a cable in place of radio or a tunnel, or hosts of one site; larger "
                "batches wait less often"
            )
            yield Finding("warning", what, cure, (link.source, link.target))


def _device_troubles(found: Examination, each: DeviceFacts) -> Iterator[Trouble]:
    for what, cure in each.problems:
        yield "error", what, cure
    if each.device not in found.paces:
        cure = "Its process has died or froze, or its machine is overloaded: see its own output or the system's log"
        yield "error", "it came, then fell silent while it was examined", cure
    free, total = each.free_bytes / 1e9, each.memory_bytes / 1e9
    if each.own.kind != "cpu":
        if free < total / 2:
            what = f"other programs hold {total - free:.1f} GB of the {total:.1f} GB of {each.info.device}"
            yield "warning", what, "nvidia-smi names them; end them, or leave this GPU out"
        return
    if free < MIN_FREE * total:
        cure = "End what fills it (look with top, sorted by M), or give it a smaller share"
        yield "warning", f"{free:.1f} GB of {total:.1f} GB memory are free", cure
    on_cpu = [found.host[other.device] for other in found.facts if other.own.kind == "cpu"]
    cores = each.cores / max(1, on_cpu.count(found.host[each.device]))
    if found.file is not None and (described := found.row[each.device].cores) is not None:
        # A quota that the fleet file states is the device's own; any other is shared by all on the host.
        cores = min(each.cores, described)
    threads = each.own.cores or 1
    if threads > max(1.0, 1.5 * cores) or threads * 2 < cores:
        what = f"threads: {threads}, cores for them: {cores:.3g}"
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
            "Install torch with CUDA there (pytorch.org has the command) or a driver that is new enough for it, unset "
            "CUDA_VISIBLE_DEVICES, or start the container with --gpus all",
        )
    if own.shm_bytes is not None and own.shm_bytes[0] < MIN_SHM_BYTES:
        free, total = (each / (1 << 20) for each in own.shm_bytes)
        yield (
            "warning",
            f"/dev/shm has {free:,.0f} MiB free of {total:,.0f} MiB, and loader workers (--workers) pass batches through it",
            'They hang, or end with a bus error or "No space left on device": start the container with --ipc=host or '
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
        yield "warning", what, "Look with top and end them, or wait: every step waits for the slowest device"


def _slowest(found: Examination) -> Iterator[Finding]:
    speeds = {device: pace.samples_per_s for device, pace in found.paces.items()}
    slow, fast = (pick(speeds, key=lambda device: speeds[device], default=0) for pick in (min, max))
    if speeds and speeds[fast] > MAX_UNEQUAL * speeds[slow]:
        name, share = found.name(slow), speeds[slow] / sum(speeds.values())
        what = f"{name} is the slowest: {speeds[fast] / speeds[slow]:.1f} times slower than {found.name(fast)}"
        cure = (
            f"Nothing to do: --plan auto or data-by-speed give it about {share:.0%} of the work; with even shares (data, DDP) "
            "all devices wait for it. If its equals are faster, look for heat, a power limit or other programs"
        )
        yield Finding("note", what, cure, (name,))
