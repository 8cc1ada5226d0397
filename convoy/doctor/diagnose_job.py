"""Findings that only a job as a whole shows: who is missing, who is different, who claims the same address."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations

from convoy.comm.environment import is_loopback
from convoy.doctor.facts import Checkup, Examination, Finding, Interface
from convoy.doctor.names import Names


def job_findings(examination: Examination, names: Names) -> Iterator[Finding]:
    """What the devices that came, and those that did not, show together."""
    yield from _absent(examination, names)
    yield from _fallen_silent(examination, names)
    yield from _fleet(examination, names)
    for kind, value_of, why in _SAME:
        yield from _differing(examination, names, kind, value_of, why)
    pythons = sorted({checkup.python for checkup in examination.checkups})
    if len(pythons) > 1:
        text = f"the hosts run Python {' and '.join(pythons)}"
        yield Finding("note", text, "Nothing to do: no Python objects travel between them")
    yield from _addresses(examination, names)


def _absent(examination: Examination, names: Names) -> Iterator[Finding]:
    came = {checkup.device for checkup in examination.checkups}
    missing = [device for device in range(examination.devices) if device not in came]
    if not missing or not came:
        return
    who = ", ".join(
        f"{names.device(device)}{f' on host {names.host[device]}' if device in names.host else ''}"
        for device in missing
    )
    first = examination.checkups[0]
    at, leads_to = first.meets_at
    if leads_to and is_loopback(leads_to) and first.device == 0:
        cure = (
            f"The meeting point {at} is {leads_to} on {names.host[0]}, which leads to itself only: set MASTER_ADDR to "
            f"its address in the network{_example(first.interfaces)}"
        )
    else:
        cure = (
            f"Look at their own output: if they run, it says why they cannot reach {at or 'the meeting point'}. If there "
            f"is none, start them with MASTER_ADDR and MASTER_PORT of that point, or a job of {len(came)} devices"
        )
    count = f"{len(missing)} of {examination.devices} devices did not come within {examination.waited_s:g} s"
    yield Finding("error", f"{count}: {who}", cure, tuple(names.device(device) for device in missing))


def _fallen_silent(examination: Examination, names: Names) -> Iterator[Finding]:
    for checkup in examination.checkups:
        if checkup.device not in examination.paces:
            name = names.device(checkup.device)
            cure = "Its process has died or froze, or its machine is overloaded: its own output or system log says more"
            yield Finding("error", f"{name} came, then fell silent while it was examined", cure, (name,))


def _fleet(examination: Examination, names: Names) -> Iterator[Finding]:
    fleet = examination.fleet
    if fleet is None:
        return
    if names.fleet is None:
        what = f"the fleet file has {len(fleet.devices)} devices, this job has {examination.devices}"
        cure = "Start one process for each device of the file; until then its names and rates are not used"
        yield Finding("error", what, cure)
        return
    for checkup in examination.checkups:
        kind = fleet.devices[checkup.device].kind
        if not checkup.on.startswith(kind):
            name = names.device(checkup.device)
            what = f"{name} is of kind {kind} in the fleet file, but computes on {checkup.on}"
            cure = f"Start the processes in the order of the file; set CONVOY_DEVICE={kind} there if it is the default"
            yield Finding("error", what, cure, (name,))
    for one, other in combinations(examination.checkups, 2):
        if (names.host[one.device] == names.host[other.device]) != (one.machine == other.machine):
            together = "one host" if one.machine != other.machine else "two hosts"
            both = names.device(one.device), names.device(other.device)
            what = f"{both[0]} and {both[1]} are on {together} in the fleet file, but not in this job"
            yield Finding("error", what, "Start the processes in the order of the file, each on its host", both)


_SAME: tuple[tuple[str, Callable[[Checkup], str], str], ...] = (
    ("convoy", lambda checkup: checkup.convoy, "a job refuses to start. Install the same on every host"),
    (
        "torch",
        lambda checkup: ".".join(checkup.torch.split(".")[:2]),
        "a job refuses to start. Install the same torch on every host (patch releases may differ)",
    ),
    (
        "number of devices (WORLD_SIZE)",
        lambda checkup: str(checkup.devices),
        "they wait for different jobs. Start all with the same number",
    ),
)


def _differing(
    examination: Examination, names: Names, kind: str, value_of: Callable[[Checkup], str], why: str
) -> Iterator[Finding]:
    """The minority is named, and what the others have."""
    values = {checkup.device: value_of(checkup) for checkup in examination.checkups}
    if len(set(values.values())) < 2:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    others = {device: value for device, value in values.items() if value != usual}
    listed = ", ".join(f"{value} on {names.device(device)}" for device, value in others.items())
    what = f"not the same {kind} everywhere: {usual} on most, but {listed}"
    yield Finding("error", what, why[0].upper() + why[1:], tuple(names.device(device) for device in others))


def _addresses(examination: Examination, names: Names) -> Iterator[Finding]:
    if len(names.first) < 2:
        return
    by_device = {checkup.device: checkup for checkup in examination.checkups}
    firsts = [(host, by_device[device]) for host, device in names.first.items() if by_device[device].address]
    for host, checkup in firsts:
        if is_loopback(checkup.address):
            what = f"{host} would tell the others to reach it at {checkup.address}, which leads to themselves"
            cure = f"Set GLOO_SOCKET_IFNAME there to its interface in the network{_example(checkup.interfaces)}"
            yield Finding("error", what, cure, (host,))
    for (one, a), (other, b) in combinations(firsts, 2):
        if a.address == b.address and not is_loopback(a.address):
            what = f"{one} and {other} both say that their address is {a.address}"
            cure = (
                "Containers on separate bridges do: start them with the network of their host (docker run "
                "--network=host). Else give one of the machines another address"
            )
            yield Finding("error", what, cure, (one, other))


def _example(interfaces: tuple[Interface, ...]) -> str:
    return f", such as {interfaces[0].name} with {interfaces[0].addresses[0]}" if interfaces else ""
