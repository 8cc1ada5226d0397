"""What each host of a fleet has to start. Pure."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.fleet import Device, Fleet, Host

_COUNTED = ("cuda", "xpu")
"""Kinds of which a machine may have several: they are numbered there."""


@dataclass(frozen=True)
class Post:
    """One host and its devices.

    Attributes:
        ranks: indices of its devices in the fleet.
        names: what each computes on, as PyTorch calls it.
        own: variables of each, beside its place.
    """

    host: Host
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    own: tuple[Mapping[str, str], ...]

    def title(self, rank: int) -> str:
        """A device as messages name it, after its index."""
        return f"host {self.host.name}, {self.names[self.ranks.index(rank)]}"


def posts(fleet: Fleet) -> list[Post]:
    """The hosts, that of device 0 first.

    The cuda devices of a host are its cuda:0, cuda:1, ... in the order of the file.
    """
    made = []
    for host in fleet.hosts:
        ranks = fleet.devices_on(host.name)
        devices = [fleet.devices[rank] for rank in ranks]
        made.append(Post(host, ranks, _names(devices), tuple(_own(device) for device in devices)))
    return sorted(made, key=lambda post: post.ranks)


def _names(devices: Sequence[Device]) -> tuple[str, ...]:
    kinds = [device.kind for device in devices]
    return tuple(
        f"{kind}:{kinds[:number].count(kind)}" if kind in _COUNTED else kind for number, kind in enumerate(kinds)
    )


def _own(device: Device) -> dict[str, str]:
    """What the file says of a device, as its process reads it; the same as in a rehearsal."""
    own = {}
    if device.cores is not None:
        own["OMP_NUM_THREADS"] = str(math.ceil(device.cores))
    if device.slowdown != 1:
        own["CONVOY_SLOWDOWN"] = repr(device.slowdown)
    return own


def line_to_paste(
    post: Post, argv: Sequence[str], *, total: int, address: str, port: int, python: str, folder: str
) -> str:
    """A line for a shell on this host (sh, bash, zsh) that starts its devices and waits for them.

    Args:
        argv: what follows `python -m convoy`.
        total: devices of the whole fleet.
        address, port: where all meet: device 0 listens there.
        python, folder: for a host that names none.
    """
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(total)}
    shared |= {"LOCAL_WORLD_SIZE": str(len(post.ranks)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    words = [f"{name}={shlex.quote(value)}" for name, value in shared.items()]
    on_cpu = post.names.count("cpu")
    if on_cpu > 1:  # as many threads as this machine has cores, shared out
        words.append(f"OMP_NUM_THREADS=$(( ($(getconf _NPROCESSORS_ONLN) + {on_cpu - 1}) / {on_cpu} ))")
    command = shlex.join([post.host.python or python, "-m", "convoy", *argv])
    starts = []
    for local, (rank, name, own) in enumerate(zip(post.ranks, post.names, post.own, strict=True)):
        place = {"RANK": str(rank), "LOCAL_RANK": str(local), "CONVOY_DEVICE": name, **own}
        starts.append(" ".join([*(f"{key}={value}" for key, value in place.items()), command]))
    # Device 0, the first, keeps the terminal: the others run behind it and end with it.
    behind = "".join(f"{start} & " for start in starts[1:])
    run = f"{{ {behind}{starts[0]}; s=$?; wait; exit $s; }}"
    return f"( cd {shlex.quote(post.host.folder or folder)} && export {' '.join(words)} && {run} )"
