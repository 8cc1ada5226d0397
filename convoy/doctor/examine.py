"""Examines this machine alone, all devices of a job together, or a fleet over ssh.

The devices of a job exchange JSON texts through its store, with deadlines, so that missing devices do not block the others.
"""

import json
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from convoy.comm.connection import credentials_of
from convoy.comm.control_messages import agree_on_modes
from convoy.comm.environment import ProcessEnv, is_loopback, is_own, reachable_address
from convoy.comm.processes import meet
from convoy.comm.store import Store, store_at
from convoy.doctor.facts import (
    CONTEXT,
    FACTS,
    PACE,
    WAYS,
    Context,
    DeviceFacts,
    Examination,
    Finding,
    Reach,
    Way,
    assemble,
    collect_facts,
    from_text,
    measure_pace,
)
from convoy.errors import ConvoyError, DeviceLostError, InputError
from convoy.fleet import Fleet
from convoy.launch.fleet import run_on_fleet
from convoy.launch.survey import ask_one
from convoy.machine.accelerator import local_devices
from convoy.machine.process import within
from convoy.measure.device_info import host_indices
from convoy.measure.link_probe import measure_links

POLL_S = 0.01
SLACK_S = 5.0  # how much later than the others device 0 may start
TEXT_BYTES = 65_536  # a longer text is from another program


@dataclass
class Exchange:
    """One device's access to the exchange of texts. `present`: devices that took part in every round so far."""

    store: Store
    prefix: str
    device: int
    present: tuple[int, ...]

    def wait(self, names: Sequence[str], limit_s: float) -> dict[str, str]:
        """Return the texts stored under these names, as soon as all are there, or after `limit_s` those that are."""
        end_s, found = time.monotonic() + limit_s, dict[str, str]()
        while True:
            missing = {f"{self.prefix}/{name}": name for name in names if name not in found}
            found |= {missing[key]: text for key, text in self.store.get(list(missing)).items()}
            if len(found) == len(names) or time.monotonic() > end_s:
                return found
            time.sleep(POLL_S)

    def gather(self, topic: str, text: str, limit_s: float) -> dict[int, str]:
        """Return the texts of all devices that send one at most `limit_s` after device 0. The others count as gone.

        Raises:
            InputError: another process claims to be this device.
            DeviceLostError: device 0 did not answer, or this device was too late.
        """
        own = json.dumps([uuid.uuid4().hex, text])
        if self.store.set_first(f"{self.prefix}/{topic}/{self.device}", own) != own:
            raise InputError(
                f"two processes claim to be device {self.device} (RANK={self.device}); give every process its own RANK"
            )
        names = {device: f"{topic}/{device}" for device in self.present}
        if self.device == 0:
            texts = self.wait(list(names.values()), limit_s)
            came = [device for device, name in names.items() if name in texts and len(texts[name]) <= TEXT_BYTES]
            self.store.set(f"{self.prefix}/{topic}/came", json.dumps(came))
        listed = self.wait([f"{topic}/came"], limit_s + SLACK_S).get(f"{topic}/came")
        if listed is None:
            raise DeviceLostError(0, "device 0, which leads the examination, did not answer: see its own output")
        self.present = tuple(int(device) for device in json.loads(listed))
        if self.device not in self.present:
            raise DeviceLostError(self.device, f"device {self.device} started too late: start all devices together")
        # One text at a time: small packets arrive even if the network loses full-size ones.
        texts = {name: self.wait([name], limit_s)[name] for name in (names[device] for device in self.present)}
        return {device: str(json.loads(texts[names[device]])[1]) for device in self.present}

    def leave(self, limit_s: float) -> None:
        """End this device's exchange. Device 0 waits for all others, because the store may end with its process."""
        self.store.set(f"{self.prefix}/left/{self.device}", "left")
        if self.device == 0:
            self.wait([f"left/{device}" for device in self.present], limit_s)


CONNECT_S = 3.0  # per attempt; a reachable machine answers in milliseconds
CONNECTIONS, MOST_HOSTS = 32, 1024  # parallel attempts of one host, and pending connections at one listener
LISTENER_S = 5.0
GROUP_S = 20.0  # time limit of the group's waits, for networks that lose full-size packets
LINKS_BUDGET_S = 6.0


def reach(address: str, port: int, limit_s: float = CONNECT_S) -> Reach:
    """Try to connect to a port on which another host listens."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except TimeoutError:
        return Reach.SILENT
    except ConnectionError:
        return Reach.REFUSED
    except OSError:
        return Reach.NO_ROUTE
    return Reach.OPEN


def try_ways(exchange: Exchange, facts: Sequence[DeviceFacts]) -> tuple[Way, ...]:
    """Try to connect each pair of hosts in both directions, by the first device of each host. All devices call it."""
    first = {each.own.machine: each for each in reversed(facts)}
    own = next((each for each in first.values() if each.device == exchange.device), None)
    if len(first) < 2:
        return ()
    address, port = "", 0
    with ExitStack() as stack:
        if own is not None and own.info.address:
            with suppress(InputError, OSError):  # joining the group will name the reason
                addresses = [each.info.address for each in facts if each.info.address]
                address = reachable_address(own.info.address, addresses)
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                # Nothing calls accept(): the kernel completes the connections.
                listener = stack.enter_context(socket.create_server((address, 0), family=family, backlog=MOST_HOSTS))
                port = listener.getsockname()[1]
        texts = exchange.gather("listener", json.dumps([address, port]), LISTENER_S)
        places: dict[int, tuple[str, int]] = {
            device: json.loads(text) for device, text in texts.items() if device != exchange.device
        }

        def attempt(device: int) -> Way:
            return Way(exchange.device, device, places[device][0], places[device][1], reach(*places[device]))

        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="convoy-doctor") as pool:
            ways = list(pool.map(attempt, [device for device in places if own is not None and places[device][1]]))
        limit_s = 2 * CONNECT_S * (2 + len(places) // CONNECTIONS)
        texts = exchange.gather("ways", WAYS.dump_json(ways).decode(), limit_s)
    return tuple(way for device in texts for way in from_text(WAYS, texts[device], f"device {device}"))


def measure_fleet(env: ProcessEnv, examination: Examination) -> tuple[Fleet | None, list[Finding]]:
    """Form a group of the present devices and measure the links between their hosts. No texts are exchanged after this.

    Returns:
        The fleet with measured links (None for a single host), and findings if the devices cannot work as one job.
    """
    present = [each.device for each in examination.facts]
    own = examination.facts[present.index(env.device)]
    smaller = replace(env, device=present.index(env.device), devices=len(present))
    try:
        with meet(smaller, torch.device(own.info.device), GROUP_S) as group:
            agree_on_modes(group)
            if len(examination.hosts) < 2:
                return None, []
            wire = measure_links(group, host_indices(examination.fleet), 1.0, budget_s=LINKS_BUDGET_S)
        return wire.into(examination.fleet), []
    except ConvoyError as error:
        cure = (
            "A job would fail too. If all hosts can connect, full-size packets may be lost: the MTU must be the same on all "
            "hosts and the switch (ip link shows it; 1500 is safe, in tunnels less)"
        )
        return None, [Finding("error", f"the devices cannot work as one job: {error}", cure)]


PACE_LIMIT_S = 20.0  # for measuring the speed; a device that takes longer counts as silent
LEAVE_S = 5.0  # how long device 0 waits for the others to end the exchange
LIMIT_S = 180.0  # for the whole examination after the devices have connected, on the largest fleets
SSH_CALLS = 16  # parallel ssh calls


def examine_alone(context: Context) -> Examination:
    """Examine this machine: its processor, and every GPU that torch sees."""
    *accelerators, cpu = local_devices()
    found = [replace(collect_facts(None, name), device=index) for index, name in enumerate([cpu, *accelerators])]
    paces = {each.device: measure_pace(torch.device(each.info.device)) for each in found}
    return Examination(len(found), tuple(found), paces=paces, reports=context.reports)


def examine_job(
    env: ProcessEnv, own: DeviceFacts, context: Context, wait_s: float, slowdown: float = 1.0
) -> Examination | Finding | None:
    """Examine all devices of a job that connect within `wait_s`. Each device calls it.

    Returns:
        Device 0: all facts. Other devices: None, or the reason why they could not take part.
    """
    place = f"{env.host} port {env.port}"
    try:
        store = store_at(env, time.monotonic() + wait_s, credentials_of(env))
    except (InputError, DeviceLostError) as error:
        itself = " (this machine itself)" if env.device != 0 and is_own(env.host) else ""
        what = f"device {env.device} cannot reach device 0 at {place}{itself}: {error}"
        cure = (
            "MASTER_ADDR must be device 0's address in the network, not a name that resolves to 127.0.0.1; open the port on "
            f"device 0's machine (sudo ufw allow {env.port}/tcp), and all ports from 1024 up for training"
        )
        return Finding("error", what, cure, (f"device {env.device}",))
    exchange = Exchange(store, f"convoy-doctor/{env.attempt}", env.device, tuple(range(env.devices)))
    try:
        # Torch's store ignores signals while it waits, and some of its waits have no limit.
        return within(wait_s + LIMIT_S, lambda: _examine(env, exchange, own, context, wait_s, slowdown))
    except (RuntimeError, TimeoutError, ConvoyError) as error:
        what = f"device {env.device} lost contact with the others at {place}: {str(error).splitlines()[0]}"
        cure = (
            "See device 0's own output, and start all devices together. If device 0 still runs, full-size packets may "
            "be lost: the MTU must be the same on all hosts and the switch (ip link shows it; 1500 is safe, in tunnels less)"
        )
        return Finding("error", what, cure)


def _examine(
    env: ProcessEnv, exchange: Exchange, own: DeviceFacts, context: Context, wait_s: float, slowdown: float
) -> Examination | None:
    texts = exchange.gather("facts", FACTS.dump_json(own).decode(), wait_s)
    facts = [replace(from_text(FACTS, texts[device], f"device {device}"), device=device) for device in sorted(texts)]
    # No device has work now, so busy cores belong to other programs.
    pace = measure_pace(torch.device(own.info.device), slowdown)
    texts = exchange.gather("pace", PACE.dump_json(pace).decode(), PACE_LIMIT_S)
    paces = {device: from_text(PACE, texts[device], f"device {device}") for device in texts}
    ways = try_ways(exchange, [each for each in facts if each.device in paces])
    found = replace(assemble(env.devices, facts, context), paces=paces, ways=ways)
    reports = [*found.reports, *absent(found, f"{env.host} port {env.port}", wait_s)]
    is_open = all(way.reach is Reach.OPEN for way in ways)
    if is_open and found.reports == context.reports and len(exchange.present) == len(facts) > 1:
        measured, troubles = measure_fleet(env, found)
        found, reports = replace(found, measured=measured), [*reports, *troubles]
    else:
        exchange.leave(LEAVE_S)
    return replace(found, reports=tuple(reports)) if env.device == 0 else None


def absent(found: Examination, at: str, waited_s: float) -> list[Finding]:
    """Report the devices that did not connect to device 0 in time."""
    came = [each.device for each in found.facts]
    missing = tuple(found.name(device) for device in range(found.devices) if device not in came)
    address = found.facts[0].info.address
    cure = (
        f"See their own output: if they run, it says why they cannot reach {at}. If there is none, start them with this "
        f"MASTER_ADDR and MASTER_PORT, or start a job of {len(came)} devices"
    )
    if is_loopback(address):
        cure = (
            f"If they are on other machines: device 0's machine resolves {at} to {address}, which only it can reach. Set "
            "MASTER_ADDR to its address in the network (ip -brief address shows it)"
        )
    what = f"{len(missing)} of {found.devices} devices did not connect within {waited_s:g} s: {', '.join(missing)}"
    return [Finding("error", what, cure, missing)] if missing else []


def examine_fleet(fleet: Fleet, json_file: Path | None, wait_s: float) -> tuple[int, tuple[Finding, ...]]:
    """Examine together all hosts of a fleet that ssh reaches. The first of their devices prints, and lists the other hosts.

    Returns:
        The exit status of the examination, and findings that it has not printed.
    """
    asked = [host for host in fleet.hosts if not is_own(str(host.address))]
    with ThreadPoolExecutor(SSH_CALLS, thread_name_prefix="convoy-doctor-ssh") as pool:
        answers = dict(zip(asked, pool.map(ask_one, asked), strict=True))
    reports = tuple(
        Finding(
            "error", f"{host.name} at {host.address} cannot be used: {reason}", "Other hosts are examined", (host.name,)
        )
        for host, reason in answers.items()
        if isinstance(reason, str)
    )
    without = {name for report in reports for name in report.about}
    kept = [index for index, device in enumerate(fleet.devices) if device.host not in without]
    if not kept:
        return 1, reports
    context = Context(fleet.with_only(kept), reports)
    argv = ["doctor", "--case", CONTEXT.dump_json(context).decode(), "--wait", f"{wait_s:g}"]
    try:
        return run_on_fleet(fleet.with_only(kept), argv if json_file is None else [*argv, "--json", str(json_file)]), ()
    except ConvoyError as error:
        return 1, (*reports, Finding("error", str(error), "All started devices have ended: correct this and retry"))
