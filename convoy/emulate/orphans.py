"""Finds and removes what a rehearsal that was killed outright has left on this machine."""

from dataclasses import dataclass
from pathlib import Path

from convoy.emulate import cgroups, namespaces
from convoy.emulate.machine import RunName, call

_KINDS = ("cgroup", "cgroup2")


@dataclass(frozen=True)
class Orphans:
    """The belongings of runs whose process is gone.

    Attributes:
        groups: control groups, with the processes in them.
        namespaces: names of network namespaces.
        mounts: folders where a cpu controller was mounted for one run.
    """

    groups: tuple[Path, ...]
    namespaces: tuple[str, ...]
    mounts: tuple[Path, ...]

    def __bool__(self) -> bool:
        return bool(self.groups or self.namespaces or self.mounts)

    def __str__(self) -> str:
        names = (*(path.name for path in (*self.groups, *self.mounts)), *self.namespaces)
        pids = sorted({run.pid for run in map(RunName.parse, names) if run is not None})
        return (
            f"left behind by killed rehearsals (process {', '.join(map(str, pids))}): "
            f"{len(self.namespaces)} network namespaces, {len(self.groups)} control groups, {len(self.mounts)} mounts"
        )


def find() -> Orphans:
    """What dead runs left on this machine."""
    mounts = Path("/proc/mounts").read_text()
    # Named network namespaces are mounts too, so the kind counts.
    places = [Path(place) for _, place, kind, *_ in map(str.split, mounts.splitlines()) if kind in _KINDS]
    private = tuple(place for place in places if _dead(place.name))
    controller = cgroups.mounted_controller(mounts)
    roots = {*private, *([] if controller is None else [controller.root])}
    return Orphans(
        groups=tuple(path for root in roots for path in root.iterdir() if path.is_dir() and _dead(path.name)),
        namespaces=tuple(name for name in namespaces.namespaces() if _dead(name)),
        mounts=private,
    )


def remove(orphans: Orphans) -> None:
    """Kill the processes and remove the rest. InputError if the machine refuses."""
    for group in orphans.groups:
        cgroups.remove(group)
    for namespace in orphans.namespaces:
        namespaces.delete(namespace)
    for mount in orphans.mounts:
        call("umount", str(mount))
        mount.rmdir()


def _dead(name: str) -> bool:
    run = RunName.parse(name)
    return run is not None and not run.alive()
