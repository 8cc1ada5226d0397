"""Processes under a kernel memory limit: control groups, version 1 or 2."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


def memory_root() -> Path | None:
    """Return where memory-limited groups can be created; None if this user or machine cannot."""
    for root in _ROOTS:
        offers = (root / "memory.limit_in_bytes").exists() or "memory" in _controllers(root)
        if offers and os.access(root, os.W_OK):
            return root
    return None


def _controllers(root: Path) -> list[str]:
    switch = root / "cgroup.subtree_control"
    return switch.read_text().split() if switch.exists() else []


@contextmanager
def memory_groups(root: Path, count: int, limit_bytes: int) -> Iterator[list[Path]]:
    """Create groups limited to this many bytes each, without swap; remove them afterwards."""
    paths = [root / f"convoy-test-{os.getpid()}-{i}" for i in range(count)]
    made: list[Path] = []
    try:
        for path in paths:
            path.mkdir()
            made.append(path)
            for name, value in (
                ("memory.limit_in_bytes", limit_bytes), ("memory.memsw.limit_in_bytes", limit_bytes),
                ("memory.max", limit_bytes), ("memory.swap.max", 0),
            ):  # fmt: skip
                if (path / name).exists():
                    (path / name).write_text(str(value))
        yield paths
    finally:
        for path in made:
            _remove(path)


def enter(path: str) -> None:
    """Move this process into the group. Memory it already holds stays charged to its old group."""
    Path(path, "cgroup.procs").write_text(str(os.getpid()))


def _remove(path: Path) -> None:
    limit_s = time.monotonic() + 5.0
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            if time.monotonic() > limit_s:
                raise
            for pid in map(int, (path / "cgroup.procs").read_text().split()):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
