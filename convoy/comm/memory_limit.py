"""Memory that control groups (of a container, a batch system, systemd) leave this process."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def left_by_groups(root: Path = ROOT, own: Path = OWN) -> tuple[int, int] | None:
    """Bytes that may still be taken, and all bytes, of the group of this process and those above it whichever leaves least.

    What the kernel keeps of files that nobody uses at the moment counts as free: it gives that up first.

    Returns:
        None where no group has a limit, and elsewhere than on Linux.
    """
    rows = []
    with suppress(OSError, ValueError):
        for folder, limit_name, used_name, files_name in _groups(root, own):
            with suppress(OSError, ValueError):  # "max": no limit; a folder of the host that a container does not see
                limit = int((folder / limit_name).read_text())
                used = int((folder / used_name).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                rows.append((max(0, limit - used + int(stat.get(files_name, 0))), limit))
    return min(rows, default=None)


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folders of groups, the own one first, with the names of their files: of version 2, and of version 1."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each == top or top in each.parents:
                yield (each, *names)
