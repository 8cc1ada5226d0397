"""`--detach` where a job is started: what the hosts are told, and what a person is told in the end."""

import datetime
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.fleet import Host
from convoy.launch.host_job import HostJob
from convoy.launch.ssh import by_hand


@dataclass(frozen=True, slots=True)
class Detach:
    """How devices train without who started them.

    Attributes:
        logs: a folder on each host, for what its devices print.
        silence_s: a device that is stopped for so long is killed.
    """

    logs: Path
    silence_s: float


def new_detach(silence_s: float, logs: Path | None = None) -> Detach:
    """With that folder, or one that is named for this moment, where runs make theirs."""
    if logs is not None:
        return Detach(logs, silence_s)
    moment = datetime.datetime.now().strftime("%Y-%m-%d-%H.%M.%S")
    return Detach(Path(os.environ.get("CONVOY_RUNS") or "runs") / f"{moment}-detached", silence_s)


def this_host(names: Sequence[str]) -> HostJob:
    """This machine alone, with devices by name."""
    ranks = tuple(range(len(names)))
    return HostJob(Host("this-machine", "127.0.0.1"), ranks, tuple(names), ({},) * len(names))


def detached_text(hosts: Sequence[tuple[HostJob, bool, str]]) -> str:
    """Where the devices are, how to watch them, and how to end them.

    Args:
        hosts: each with whether it is this machine, and the folder there for what devices print.
    """
    count = sum(len(job.ranks) for job, _, _ in hosts)
    lines = [f"{count} device{'s' * (count > 1)} train{'s' * (count == 1)} on without this command. What they print:"]
    for job, local, folder in hosts:
        files = " ".join(shlex.quote(f"{folder}/device-{rank}.log") for rank in job.ranks)
        lines.append(f"  tail -f {files}" if local else f"  {by_hand(job.host)} {shlex.quote(f'tail -f {files}')}")
    where = "here, or on any of their machines" if any(local for _, local, _ in hosts) else "on any of their machines"
    return "\n".join(
        [
            *lines,
            f"The training ends by itself, or with `convoy stop`, {where}; `convoy leave` lets the devices of one machine go.",
        ]
    )
