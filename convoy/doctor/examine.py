"""Examinations: of this machine alone, of all devices of a job together, and of a fleet over ssh.

The devices of a job exchange texts at its store, with deadlines: nothing needs all devices until a group measures the links.
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
SLACK_S = 5.0  # how much later than the others device 0 may come
TEXT_BYTES = 65_536  # a longer text is from another program


@dataclass
class Exchange:
    """The exchange as one device sees it. `present` are the devices that have come to every round so far."""

    store: Store
    prefix: str
    device: int
    present: tuple[int, ...]

    def wait(self, names: Sequence[str], limit_s: float) -> dict[str, str]:
        """Return the texts of the names that have one within the limit; earlier once all have."""
        end_s, found = time.monotonic() + limit_s, dict[str, str]()
        while True:
            missing = {f"{self.prefix}/{name}": name for name in names if name not in found}
            found |= {missing[key]: text for key, text in self.store.get(list(missing)).items()}
            if len(found) == len(names) or time.monotonic() > end_s:
                return found
            time.sleep(POLL_S)

    def gather(self, topic: str, text: str, limit_s: float) -> dict[int, str]:
        """Return the texts of all devices that bring one within `limit_s` of device 0's coming. The others count as gone.

        Raises:
            InputError: another process claims to be this device.
            DeviceLostError: device 0 did not come, or this device came too late.
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
            raise DeviceLostError(0, "device 0, which leads the examination, did not answer: look at its own output")
        self.present = tuple(int(device) for device in json.loads(listed))
        if self.device not in self.present:
            raise DeviceLostError(self.device, f"device {self.device} came too late: start the devices at one time")
        # One at a time: small packets arrive even where full-size ones are lost.
        texts = {name: self.wait([name], limit_s)[name] for name in (names[device] for device in self.present)}
        return {device: str(json.loads(texts[names[device]])[1]) for device in self.present}

    def leave(self, limit_s: float) -> None:
        """Make this device's last call. Device 0 waits for all: the store may end with its process."""
        self.store.set(f"{self.prefix}/left/{self.device}", "left")
        if self.device == 0:
            self.wait([f"left/{device}" for device in self.present], limit_s)


CONNECT_S = 3.0  # one attempt: a machine that is there answers in milliseconds
CONNECTIONS, MOST_HOSTS = 32, 1024  # attempts of one host at a time, and attempts that may wait at one
LISTENER_S = 5.0
GROUP_S = 20.0  # time limit of the group's waits: where full-size packets are lost, it ends by this
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
    """Try to connect from each host to each other one, by the first device of each. All devices call it."""
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
                # Nobody accepts: the kernel completes the connections.
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
    """Join the devices that came to a group, which ends their exchange, and measure the links between their hosts.

    Returns:
        The fleet with its links as measured, None if there is one host; and the findings if they cannot work as one job.
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
            "A job would fail in the same way. Where all ways are open, full-size packets may be lost: the MTU must be the "
            "same on all hosts and the switch (ip link shows it; 1500 is safe, in tunnels less)"
        )
        return None, [Finding("error", f"the devices cannot work as one job: {error}", cure)]


PACE_LIMIT_S = 20.0  # for the first convolution of a slow device; one that takes longer counts as silent
LEAVE_S = 5.0  # how long device 0 waits for the last call of a device that is slow or gone
LIMIT_S = 180.0  # for everything after the meeting, on the largest fleets
SSH_CALLS = 16  # at a time


def examine_alone(context: Context) -> Examination:
    """Examine this machine: its processor, and every GPU that torch sees."""
    *accelerators, cpu = local_devices()
    found = [replace(collect_facts(None, name), device=index) for index, name in enumerate([cpu, *accelerators])]
    paces = {each.device: measure_pace(torch.device(each.info.device)) for each in found}
    return Examination(len(found), tuple(found), paces=paces, reports=context.reports)


def examine_job(
    env: ProcessEnv, own: DeviceFacts, context: Context, wait_s: float, slowdown: float = 1.0
) -> Examination | Finding | None:
    """Examine all devices of a job that come within the time, together. Each device calls it.

    Returns:
        All facts on device 0; None on the others; on a device that could not meet the others, the finding.
    """
    place = f"{env.host} port {env.port}"
    try:
        store = store_at(env, time.monotonic() + wait_s, credentials_of(env))
    except (InputError, DeviceLostError) as error:
        itself = " (this machine itself)" if env.device != 0 and is_own(env.host) else ""
        what = f"device {env.device} cannot come to the meeting point {place}{itself}: {error}"
        cure = (
            "MASTER_ADDR must be device 0's address in the network, not a name that leads to 127.0.0.1; open "
            f"the port there (sudo ufw allow {env.port}/tcp), and all from 1024 up for training"
        )
        return Finding("error", what, cure, (f"device {env.device}",))
    exchange = Exchange(store, f"convoy-doctor/{env.attempt}", env.device, tuple(range(env.devices)))
    try:
        # Torch's store waits out of reach of signals, some of it without a limit.
        return within(wait_s + LIMIT_S, lambda: _examine(env, exchange, own, context, wait_s, slowdown))
    except (RuntimeError, TimeoutError, ConvoyError) as error:
        what = f"device {env.device} cannot go on with the others at {place}: {str(error).splitlines()[0]}"
        cure = (
            "See device 0's own output, and start all devices at one time. Where its process lives, full-size packets may be "
            "lost: the MTU must be the same on all hosts and the switch (ip link shows it; 1500 is safe, in tunnels less)"
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
    """Report the devices that did not come to the meeting point of device 0."""
    came = [each.device for each in found.facts]
    missing = tuple(found.name(device) for device in range(found.devices) if device not in came)
    address = found.facts[0].info.address
    cure = (
        f"Look at their own output: if they run, it says why they cannot reach {at}. If there is none, start them with "
        f"MASTER_ADDR and MASTER_PORT of that point, or a job of {len(came)} devices"
    )
    if is_loopback(address):
        cure = (
            f"If they are on other machines: {at} leads to {address} on device 0's machine, to itself only. Set MASTER_ADDR "
            "to its address in the network (ip -brief address shows it)"
        )
    what = f"{len(missing)} of {found.devices} devices did not come within {waited_s:g} s: {', '.join(missing)}"
    return [Finding("error", what, cure, missing)] if missing else []


def examine_fleet(fleet: Fleet, json_file: Path | None, wait_s: float) -> tuple[int, tuple[Finding, ...]]:
    """Examine the hosts of a fleet that ssh reaches, together. Device 0 of those prints, with a report of the other hosts.

    Returns:
        The exit status of the examination there, and findings that are still to be printed.
    """
    asked = [host for host in fleet.hosts if not is_own(str(host.address))]
    with ThreadPoolExecutor(SSH_CALLS, thread_name_prefix="convoy-doctor-ssh") as pool:
        answers = dict(zip(asked, pool.map(ask_one, asked), strict=True))
    reports = tuple(
        Finding(
            "error", f"{host.name} at {host.address} cannot be used: {reason}", "The others are examined", (host.name,)
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
        return 1, (*reports, Finding("error", str(error), "The devices that were started have ended; then start again"))
