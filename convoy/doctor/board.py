"""Short texts of all devices of a job, handed round with deadlines: the store at the meeting point, used as a notice board.

Nothing here needs all devices. Device 0 decides who came in time; the others go on with those. The store is the one that
training would meet at, so whoever does not reach it has found what is wrong.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store

from convoy.comm.environment import Place, is_loopback
from convoy.comm.rendezvous import store_at
from convoy.doctor.facts import TEXT_BYTES, Finding, Reach
from convoy.doctor.knock import knock
from convoy.errors import DeviceLostError, InputError

LOOK_S = 0.01
"""Between two looks at the board."""

SLACK_S = 5.0
"""How much later than the others device 0 may come."""

PART_BYTES = 1000
"""With what TCP and the store add, less than the smallest packet that networks must carry (1280 bytes, IPv6)."""

TRY_S = 3.0
"""One attempt to connect to the meeting point."""


class Texts(Protocol):
    """Where texts are pinned up under keys. The first under a key stays."""

    def pin(self, key: str, text: str) -> str:
        """Pin a text up; what hangs there afterwards."""
        ...

    def look(self, keys: Sequence[str]) -> dict[str, str]:
        """What hangs under those of the keys that have something."""
        ...


class StoreTexts:
    """Texts in a store that all devices reach, in parts that each fit one packet.

    Where packets of full size are lost on the way, these still arrive, and the doctor can say so.
    """

    def __init__(self, store: Store, attempt: int) -> None:
        self.store = PrefixStore(f"convoy-doctor/{attempt}", store)

    def pin(self, key: str, text: str) -> str:
        parts = [text[start : start + PART_BYTES] for start in range(0, len(text), PART_BYTES)]
        mine = uuid.uuid4().hex
        for number, part in enumerate(parts):
            self.store.set(f"{mine}/{number}", part)
        hanging = self.store.compare_set(key, "", f"{mine} {len(parts)}").decode()
        return text if hanging.startswith(mine) else self._whole(hanging)

    def look(self, keys: Sequence[str]) -> dict[str, str]:
        return {key: self._whole(self.store.get(key).decode()) for key in keys if self.store.check([key])}

    def _whole(self, hanging: str) -> str:
        name, count = hanging.split()
        # One part more than any text of ours has, so that a longer one shows.
        parts = range(min(int(count), TEXT_BYTES // PART_BYTES + 2))
        return "".join(self.store.get(f"{name}/{number}").decode() for number in parts)


@dataclass
class Board:
    """One device at the board.

    Attributes:
        present: the devices that have come to every round so far.
    """

    texts: Texts
    device: int
    present: tuple[int, ...]

    def gather(self, topic: str, text: str, limit_s: float) -> dict[int, str]:
        """The texts of all that bring one within `limit_s` of device 0's coming; those that do not have left.

        Raises:
            InputError: another process has this one's place.
            DeviceLostError: device 0 did not come, or this device came too late.
        """
        mark = json.dumps([uuid.uuid4().hex, text])
        if self.texts.pin(f"{topic}/{self.device}", mark) != mark:
            raise InputError(
                f"two processes claim to be device {self.device} (RANK={self.device}); give every process its own RANK"
            )
        if self.device == 0:
            self._close(topic, limit_s)
        listed = self.await_text(f"{topic}/came", limit_s + SLACK_S)
        if listed is None:
            raise DeviceLostError(0, "device 0, which leads the examination, did not answer: look at its own output")
        self.present = tuple(int(device) for device in json.loads(listed))
        if self.device not in self.present:
            raise DeviceLostError(self.device, f"device {self.device} came too late: start the devices at one time")
        hung = self.texts.look([f"{topic}/{device}" for device in self.present])
        return {device: str(json.loads(hung[f"{topic}/{device}"])[1]) for device in self.present}

    def _close(self, topic: str, limit_s: float) -> None:
        """Device 0 waits for all, or for the limit, and pins up who came."""
        keys = {f"{topic}/{device}": device for device in self.present}
        came: dict[str, int] = {}
        end_s = time.monotonic() + limit_s
        while True:
            hung = self.texts.look([key for key in keys if key not in came])
            # A longer text is none of ours.
            came |= {key: keys[key] for key, text in hung.items() if len(text) <= TEXT_BYTES}
            if len(came) == len(keys) or time.monotonic() > end_s:
                break
            time.sleep(LOOK_S)
        self.texts.pin(f"{topic}/came", json.dumps(sorted(came.values())))

    def leave(self, limit_s: float) -> None:
        """The last that a device does here. Device 0 stays until all have left: the store may end with its process."""
        self.texts.pin(f"left/{self.device}", "")
        if self.device == 0:
            end_s = time.monotonic() + limit_s
            keys = [f"left/{device}" for device in self.present]
            while len(self.texts.look(keys)) < len(keys) and time.monotonic() < end_s:
                time.sleep(LOOK_S)

    def await_text(self, key: str, limit_s: float) -> str | None:
        """The text under a key, or None if nothing is pinned up there within the limit."""
        end_s = time.monotonic() + limit_s
        while not (hung := self.texts.look([key])):
            if time.monotonic() > end_s:
                return None
            time.sleep(LOOK_S)
        return hung[key]


# ------------------------------------------------------------------------------------------------ the way there


def approach(place: Place, limit_s: float, resolved: Sequence[str]) -> Board | Finding:
    """The board of this job; or what is between this device and it.

    Args:
        limit_s: how long device 0 may take to come.
        resolved: what the meeting point's name leads to on this machine.
    """
    deadline_s = time.monotonic() + limit_s
    if place.device != 0 or place.hosted:
        reach = _await_meeting(place, deadline_s) if resolved else Reach.NO_ROUTE
        if reach is not Reach.OPEN:
            return unreached(place, reach, resolved, limit_s)
    try:
        store = store_at(place, deadline_s + TRY_S)
    except (InputError, DeviceLostError) as error:
        return Finding("error", f"device {place.device} cannot meet the others: {error}", "Correct that first")
    return Board(StoreTexts(store, place.attempt), place.device, tuple(range(place.devices)))


def _await_meeting(place: Place, deadline_s: float) -> Reach:
    """Connect to the meeting point, again and again: whoever keeps it may start later."""
    pause_s = 0.02
    while True:
        reach, connection = knock(place.host, place.port, min(TRY_S, max(0.2, deadline_s - time.monotonic())))
        if connection is not None:
            connection.close()
            return reach
        if time.monotonic() + pause_s > deadline_s:
            return reach
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)


def unreached(place: Place, reach: Reach, resolved: Sequence[str], waited_s: float) -> Finding:
    """What a device tells that could not come to the meeting point: only it knows."""
    at = f"{place.host} port {place.port}"
    who = f"device {place.device} cannot come to the meeting point {at}"
    if not resolved:
        what = f"{who}: the name {place.host} is unknown on this machine"
        return Finding(
            "error", what, "Give the IP address of device 0's machine as MASTER_ADDR, or add it to /etc/hosts"
        )
    if is_loopback(resolved[0]):
        what = f"{who}: {place.host} is {resolved[0]} on this machine, which leads to itself, and nobody listens here"
        return Finding(
            "error", what, "Give the address of device 0's machine in the network as MASTER_ADDR, everywhere"
        )
    address = "" if resolved[0] == place.host else f" ({resolved[0]})"
    if reach is Reach.REFUSED:
        what = f"{who}{address}: its machine answered, but nobody listens there ({waited_s:g} s)"
        cure = (
            "Start device 0; MASTER_ADDR and MASTER_PORT must be the same everywhere; or a firewall on that machine rejects "
            f"the port: sudo ufw allow {place.port}/tcp"
        )
    elif reach is Reach.SILENT:
        what = f"{who}{address}: no answer ({waited_s:g} s)"
        cure = (
            f"The machine is off, or a firewall drops the packets: open the port there (sudo ufw allow {place.port}/tcp), and "
            "all from 1024 up for training"
        )
    else:
        what = f"{who}{address}: there is no way to it (no route to host)"
        cure = (
            f"See here: ip route get {resolved[0]}. Both machines must be on one network, or have routes to each other; a "
            "firewall (firewalld) may answer like that too"
        )
    return Finding("error", what, cure, (f"device {place.device}",))
