"""The links of a job: which hosts reach each other, and how fast, measured over a group as `convoy measure` does.

A group needs every connection. So each host first tries to reach each other one, on ports that are opened for that.
"""

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch

from convoy.comm.collectives import agree_on_modes
from convoy.comm.environment import ProcessEnv, reachable_address
from convoy.comm.processes import meet
from convoy.doctor.exchange import Exchange
from convoy.doctor.facts import WAYS, DeviceFacts, Examination, Finding, Reach, Way, from_text
from convoy.errors import ConvoyError, InputError
from convoy.fleet import Fleet
from convoy.measure.device_info import host_indices
from convoy.measure.link_probe import measure_links

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
        The fleet with its links as measured, None if there is one host; and what kept them from working as one job.
    """
    present = [each.device for each in examination.facts]
    own = examination.facts[present.index(env.device)]
    smaller = replace(env, device=present.index(env.device), devices=len(present))
    try:
        with meet(smaller, torch.device(own.info.device), GROUP_S, staged=False) as group:
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
