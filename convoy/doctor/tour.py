"""A tour of the ways between all hosts of a job: first whether they are open, then what they carry, one at a time."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from convoy.comm.environment import reachable_address
from convoy.doctor.board import Board
from convoy.doctor.facts import LINKS, Checkup, Finding, Link, Reach, from_text, to_text
from convoy.doctor.link import (
    ADDRESS,
    CONNECT_S,
    TALK_S,
    VISITORS,
    Address,
    Listener,
    WallClock,
    bytes_per_s,
    reach_all,
)
from convoy.doctor.names import leaders
from convoy.doctor.schedule import turns
from convoy.errors import InputError

DOOR_LIMIT_S = 5.0
TURN_LIMIT_S = CONNECT_S + 2 * TALK_S
"""Beside the seconds of data: connecting, and a host that falls silent."""

Rates = Mapping[tuple[int, int], float]


def tour(
    board: Board, checkups: Sequence[Checkup], token: str, wall_ns: WallClock
) -> tuple[tuple[Link, ...], tuple[Finding, ...]]:
    """All ways between the hosts, tried by the first device of each; and hosts that cannot even listen.

    All devices of the job call it. Only device 0 learns what the links carry.
    """
    firsts = leaders(checkups)
    if len(firsts) < 2:
        return (), ()
    with ExitStack() as stack:
        mine = ""
        if board.device in firsts:
            own = _listen(board.device, checkups, token, wall_ns, stack)
            mine = to_text(ADDRESS, own)
        texts = board.gather("door", mine, DOOR_LIMIT_S)
        said = [from_text(ADDRESS, text, f"device {device}") for device, text in texts.items() if text]
        doors = [door for door in said if not door.problem]
        deaf = tuple(_deaf(door) for door in said if door.problem)
        found = reach_all(board.device, _others(doors, board.device), token, wall_ns=wall_ns) if mine else []
        limit_s = -(-len(doors) // VISITORS) * CONNECT_S + len(doors) * TALK_S
        gathered = board.gather("links", to_text(LINKS, found), limit_s)
        links = [link for device, text in gathered.items() for link in from_text(LINKS, text, f"device {device}")]
        if not mine:
            return (), ()
        rates = _take_turns(board, [door for door in doors if door.device in gathered], links, token)
    return tuple(replace(link, bytes_per_s=rates.get((link.source, link.target))) for link in links), deaf


def _others(doors: Sequence[Address], device: int) -> list[Address]:
    """Those that follow come first: else all would begin with the same one."""
    return [door for door in doors if door.device > device] + [door for door in doors if door.device < device]


def _listen(device: int, checkups: Sequence[Checkup], token: str, wall_ns: WallClock, stack: ExitStack) -> Address:
    """Listen where the others of a job would come, chosen as a training chooses it."""
    own = next(checkup for checkup in checkups if checkup.device == device)
    if not own.address:
        return Address(device, problem=own.address_problem)
    try:
        address = reachable_address(own.address, [checkup.address for checkup in checkups if checkup.address])
        listener = stack.enter_context(Listener(address, token, wall_ns))
    except (InputError, OSError) as error:
        return Address(device, problem=str(error))
    return Address(device, listener.address, listener.port)


def _deaf(door: Address) -> Finding:
    cure = "Give it an address in the network of the others; GLOO_SOCKET_IFNAME names the interface"
    return Finding("error", f"device {door.device} cannot listen for the others: {door.problem}", cure)


def _take_turns(board: Board, doors: Sequence[Address], links: Sequence[Link], token: str) -> Rates:
    """Bytes/s of the open links, one after the other, at the word of device 0. All stay until the last turn is over."""
    open_ways = {(link.source, link.target) for link in links if link.reach is Reach.OPEN}
    plan = turns(len(doors))
    pairs = [(doors[source], doors[target]) for source, target in plan.pairs]
    order = [(source, target) for source, target in pairs if (source.device, target.device) in open_ways]
    turn_s = plan.each_s + TURN_LIMIT_S
    rates: dict[tuple[int, int], float] = {}
    for number, (source, target) in enumerate(order):
        if board.device == 0:
            board.texts.pin(f"turn/{number}", "go")
        if source.device == board.device:
            if board.await_text(f"turn/{number}", (number + 1) * turn_s) is None:
                break
            rates[source.device, target.device] = bytes_per_s(target, token, plan.each_s)
            board.texts.pin(f"turn/{number}/done", json.dumps(rates[source.device, target.device]))
        elif board.device == 0:
            # A source that falls silent has measured nothing, and holds nobody up.
            done = board.await_text(f"turn/{number}/done", turn_s)
            if done is not None:
                rates[source.device, target.device] = float(json.loads(done))
    if board.device == 0:
        board.texts.pin("turns over", "")
    board.await_text("turns over", len(order) * turn_s + TURN_LIMIT_S)
    return rates
