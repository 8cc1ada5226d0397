"""Texts that the devices of a job leave for each other at its store, with deadlines.

Nothing here needs all devices. Device 0 decides who came in time; the others continue with those.
"""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.comm.store import Store
from convoy.errors import DeviceLostError, InputError

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
