"""Run the rendezvous of a job: each process writes its description to the job's store and reads the others'."""

import json
import os
import platform
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import torch

from convoy._version import __version__
from convoy.comm.environment import ProcessEnv
from convoy.comm.store import MAX_PAUSE_S, Store
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.machine.accelerator import hardware_name, uuid_of

SHARED = "CONVOY_SHARED_ACCELERATOR"  # if set, several processes may compute on one accelerator


@dataclass(frozen=True)
class ProcessInfo:
    """The description of a process. A field that another version of Convoy does not send is ``"?"``."""

    device: str = "?"  # "cpu", "cuda:0"
    name: str = "?"  # hardware name
    host: str = "?"
    address: str = "?"
    devices: str = "?"  # its WORLD_SIZE
    convoy: str = "?"
    torch: str = "?"  # major.minor: patch releases work together
    nonce: str = "?"  # distinguishes two processes with the same rank
    accelerator: str = "?"  # the driver's id; empty for a CPU, if torch does not know it, or if it may be shared

    @classmethod
    def from_text(cls, text: str) -> "ProcessInfo":
        try:
            known = json.loads(text)
            return cls(**{field.name: str(known[field.name]) for field in fields(cls) if field.name in known})
        except (ValueError, TypeError):
            return cls()


def own_info(torch_device: torch.device, devices: int, address: str) -> ProcessInfo:
    return ProcessInfo(
        str(torch_device), hardware_name(torch_device), platform.node(), address, str(devices), __version__,
        torch=".".join(torch.__version__.split(".")[:2]), nonce=uuid.uuid4().hex,
        accelerator="" if os.environ.get(SHARED) else uuid_of(torch_device) or "",
    )  # fmt: skip


def check_infos(infos: Sequence[ProcessInfo]) -> None:
    """Raise MismatchError if versions or numbers of devices differ, InputError if two processes share an accelerator."""
    ids = [info.accelerator for info in infos]
    for i, id_ in enumerate(ids):
        if id_ not in ("", "?") and (first := ids.index(id_)) != i:
            raise InputError(
                f"{device_title(first, infos[first])} and {device_title(i, infos[i])} are two processes on one accelerator "
                f"({id_}): leave CONVOY_DEVICE unset, so that each uses the accelerator of its local rank, start fewer "
                f"processes, or let them share it with {SHARED}=1"
            )
    for field, meaning in (("devices", "number of devices (WORLD_SIZE)"), ("convoy", "convoy"), ("torch", "torch")):
        values = [getattr(info, field) for info in infos]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"{value} on {device_title(i, infos[i])}" for i, value in enumerate(values) if value != usual]
        if others:
            raise MismatchError(
                f"the devices do not run the same {meaning}: {usual} on most, but {', '.join(others)}. "
                "Use the same environment on every machine"
            )


def device_title(device: int, info: ProcessInfo) -> str:
    """Return a device's name for messages: its id and its host."""
    return f"device {device} (host {info.host}, {info.device})"


class Rendezvous:
    """A rendezvous of all processes at a store, which all-gathers texts."""

    def __init__(self, store: Store, env: ProcessEnv, number: int, deadline_s: float) -> None:
        """Prepare rendezvous ``number``, the same number on all processes. It ends at ``deadline_s``."""
        self.store = store
        # The prefix separates the texts from those of an earlier rendezvous or attempt.
        self.prefix = f"convoy/{env.attempt}/{number}"
        self.env = env
        self.deadline_s = deadline_s
        self.infos: list[ProcessInfo] = []

    def exchange_infos(self, info: ProcessInfo) -> list[ProcessInfo]:
        """Return the infos of all processes, in device order. Errors as in `gather` and `check_infos`."""
        texts = self.gather("greeting", json.dumps(asdict(info)))  # all versions use this topic
        self.infos = [ProcessInfo.from_text(text) for text in texts]
        try:
            check_infos(self.infos)
        except (InputError, MismatchError):
            self._linger()
            raise
        return self.infos

    def gather(self, topic: str, text: str) -> list[str]:
        """All-gather a text on a topic, in device order.

        InputError: another process has the same rank. DeviceLostError: devices wrote nothing before the deadline.
        """
        keys = [f"{self.prefix}/{topic}/{device}" for device in range(self.env.devices)]
        first = self.store.set_first(keys[self.env.device], text)
        if first != text:
            raise InputError(
                f"two processes are device {self.env.device} (RANK={self.env.device}): this one, and one on host "
                f"{ProcessInfo.from_text(first).host}; give every process its own RANK"
            )
        failed = f"{self.prefix}/failed"
        texts: dict[str, str] = {}
        pause_s = 0.002
        while True:
            texts |= self.store.get([failed, *(key for key in keys if key not in texts)])
            if failed in texts:
                device, cause = json.loads(texts[failed])
                raise DeviceLostError(int(device), str(cause))
            if len(texts) == len(keys):
                return [texts[key] for key in keys]
            if time.monotonic() + pause_s > self.deadline_s:
                error = self._absence({device: texts.get(key) for device, key in enumerate(keys)})
                self.store.set(failed, json.dumps([error.device, str(error)]))
                self._linger()
                raise error
            time.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 1.5 * pause_s)

    def _linger(self) -> None:
        """If this process hosts the store, give the others time to read the failure."""
        if self.env.device == 0 and not self.env.hosted:
            time.sleep(3 * MAX_PAUSE_S)

    def _absence(self, texts: Mapping[int, str | None]) -> DeviceLostError:
        missing = [device for device, text in texts.items() if text is None]
        if self.infos:
            names = ", ".join(device_title(device, self.infos[device]) for device in missing)
            return DeviceLostError(
                missing[0], f"{names} joined and was lost before the job began: see its own output, and start again"
            )
        came = [ProcessInfo.from_text(text) for text in texts.values() if text is not None]
        names = ", ".join(str(device) for device in missing)
        return DeviceLostError(
            missing[0],
            f"{'devices' if len(missing) > 1 else 'device'} {names} of {self.env.devices} did not join within the "
            f"time limit; {len(came)} joined, on {', '.join(sorted({info.host for info in came}))}. Start the missing "
            f"ones with MASTER_ADDR={self.env.host} MASTER_PORT={self.env.port}, or a job of fewer devices",
        )
