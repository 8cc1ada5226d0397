"""Key-value exchange between the devices of a job, with deadlines, over the store at which a training would meet.

Nothing here needs all devices. Device 0 decides who came in time; the others go on with those. Who does not reach the store
has found what is wrong.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.comm.environment import ProcessEnv, is_loopback
from convoy.comm.meeting import Prefixed, Store
from convoy.comm.rendezvous import store_at
from convoy.doctor.probes import ping
from convoy.doctor.schema import TEXT_BYTES, Finding, Reach
from convoy.errors import DeviceLostError, InputError

POLL_S = 0.01
"""Between two looks into the store."""

SLACK_S = 5.0
"""How much later than the others device 0 may come."""

PART_BYTES = 1000
"""With what TCP and the store add, less than the smallest packet that networks must carry (1280 bytes, IPv6)."""

CONNECT_S = 3.0
"""One attempt to connect to the store. A machine that is there answers in milliseconds."""


@dataclass
class Exchange:
    """The exchange as one device sees it. Texts travel in parts that each fit one packet, so that the doctor still works,
    and can say so, where packets of full size are lost.

    Attributes:
        present: the devices that have come to every round so far.
    """

    store: Store
    device: int
    present: tuple[int, ...]

    def put(self, key: str, text: str) -> str:
        """Store a text unless the key has one already; returns the one it has then."""
        parts = [text[start : start + PART_BYTES] for start in range(0, len(text), PART_BYTES)]
        mine = uuid.uuid4().hex
        for number, part in enumerate(parts):
            self.store.set(f"{mine}/{number}", part)
        stored = self.store.compare_set(key, "", f"{mine} {len(parts)}").decode()
        return text if stored.startswith(mine) else self._whole(stored)

    def get(self, keys: Sequence[str]) -> dict[str, str]:
        """The texts of those of the keys that have one."""
        return {key: self._whole(self.store.get(key).decode()) for key in keys if self.store.check([key])}

    def _whole(self, stored: str) -> str:
        name, count = stored.split()
        # One part more than any text of ours has, so that a longer one shows.
        parts = range(min(int(count), TEXT_BYTES // PART_BYTES + 2))
        return "".join(self.store.get(f"{name}/{number}").decode() for number in parts)

    def wait(self, keys: Sequence[str], limit_s: float) -> dict[str, str]:
        """The texts of the keys that have one within the limit; returns early once all have."""
        end_s, found = time.monotonic() + limit_s, dict[str, str]()
        while True:
            found |= self.get([key for key in keys if key not in found])
            if len(found) == len(keys) or time.monotonic() > end_s:
                return found
            time.sleep(POLL_S)

    def gather(self, topic: str, text: str, limit_s: float) -> dict[int, str]:
        """The texts of all devices that bring one within `limit_s` of device 0's coming. The others count as gone.

        Raises:
            InputError: another process claims to be this device.
            DeviceLostError: device 0 did not come, or this device came too late.
        """
        mark = json.dumps([uuid.uuid4().hex, text])
        if self.put(f"{topic}/{self.device}", mark) != mark:
            raise InputError(
                f"two processes claim to be device {self.device} (RANK={self.device}); give every process its own RANK"
            )
        keys = {f"{topic}/{device}": device for device in self.present}
        if self.device == 0:
            # A longer text is none of ours.
            came = {keys[key] for key, text in self.wait(list(keys), limit_s).items() if len(text) <= TEXT_BYTES}
            self.put(f"{topic}/came", json.dumps(sorted(came)))
        listed = self.wait([f"{topic}/came"], limit_s + SLACK_S).get(f"{topic}/came")
        if listed is None:
            raise DeviceLostError(0, "device 0, which leads the examination, did not answer: look at its own output")
        self.present = tuple(int(device) for device in json.loads(listed))
        if self.device not in self.present:
            raise DeviceLostError(self.device, f"device {self.device} came too late: start the devices at one time")
        texts = self.get([f"{topic}/{device}" for device in self.present])
        return {keys[key]: str(json.loads(text)[1]) for key, text in texts.items()}

    def leave(self, limit_s: float) -> None:
        """The last call of every device. Device 0 waits until all have left: the store may end with its process."""
        self.put(f"left/{self.device}", "")
        if self.device == 0:
            self.wait([f"left/{device}" for device in self.present], limit_s)


def connect(env: ProcessEnv, limit_s: float, resolved: Sequence[str]) -> Exchange | Finding:
    """The exchange of this job; or what is between this device and it.

    Args:
        limit_s: how long device 0 may take to come.
        resolved: what the name of the meeting point resolves to on this machine.
    """
    deadline_s = time.monotonic() + limit_s
    if env.device != 0 or env.hosted:
        reach = _await_store(env, deadline_s) if resolved else Reach.NO_ROUTE
        if reach is not Reach.OPEN:
            return unreached(env, reach, resolved, limit_s)
    try:
        store = store_at(env, deadline_s + CONNECT_S)
    except (InputError, DeviceLostError) as error:
        return Finding("error", f"device {env.device} cannot meet the others: {error}", "Correct that first")
    return Exchange(Prefixed(f"convoy-doctor/{env.attempt}", store), env.device, tuple(range(env.devices)))


def _await_store(env: ProcessEnv, deadline_s: float) -> Reach:
    """Connect to the meeting point, again and again: its process may start later."""
    pause_s = 0.02
    while True:
        reach, connection = ping(env.host, env.port, min(CONNECT_S, max(0.2, deadline_s - time.monotonic())))
        if connection is not None:
            connection.close()
        if connection is not None or time.monotonic() + pause_s > deadline_s:
            return reach
        time.sleep(pause_s)
        pause_s = min(0.25, 1.5 * pause_s)


def unreached(env: ProcessEnv, reach: Reach, resolved: Sequence[str], waited_s: float) -> Finding:
    """What a device reports that could not reach the meeting point: only it knows."""
    open_port = f"sudo ufw allow {env.port}/tcp"
    if not resolved:
        what = f": the name {env.host} is unknown on this machine"
        cure = "Give the IP address of device 0's machine as MASTER_ADDR, or add it to /etc/hosts"
    elif is_loopback(resolved[0]):
        what = f": {env.host} is {resolved[0]} on this machine, which leads to itself, and nobody listens here"
        cure = "Give the address of device 0's machine in the network as MASTER_ADDR, everywhere"
    else:
        what, cure = {
            Reach.REFUSED: (
                f": its machine answered, but nobody listens there ({waited_s:g} s)",
                "Start device 0; MASTER_ADDR and MASTER_PORT must be the same everywhere; or a firewall on that machine "
                f"rejects the port: {open_port}",
            ),
            Reach.SILENT: (
                f": no answer ({waited_s:g} s)",
                f"The machine is off, or a firewall drops the packets: open the port there ({open_port}), and all from 1024 "
                "up for training",
            ),
        }.get(
            reach,
            (
                ": there is no way to it (no route to host)",
                f"See here: ip route get {resolved[0]}. Both machines must be on one network, or have routes to each other; "
                "a firewall (firewalld) may answer like that too",
            ),
        )
        what = what if resolved[0] == env.host else f" ({resolved[0]}){what}"
    who = f"device {env.device}"
    return Finding("error", f"{who} cannot come to the meeting point {env.host} port {env.port}{what}", cure, (who,))
