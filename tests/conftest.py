"""Fixtures of every test: one torch thread, a free port, and a check for leftovers."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # so that test modules, and the processes they start, find the package `tests`

from tests.support.processes import free_port as unused_port  # noqa: E402
from tests.support.processes import nursery_pid, stop_nursery  # noqa: E402

# Started with `&` by a shell, or under nohup, this process ignores Ctrl-C, and so would all that the tests start to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# And under nohup a hang-up. A handler keeps this process alive all the same; what it starts has the system's own again.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

torch.set_num_threads(1)

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

GRACE_S = 3.0
"""What ends by itself within this time is no leak."""

CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "__pycache__", ".venv", ".git"}


def pytest_configure() -> None:
    """Keep the run logs of tests and their processes in a folder of this session, and no measurements."""
    os.environ["CONVOY_RUNS"] = tempfile.mkdtemp(prefix="convoy-runs-")
    os.environ["CONVOY_CACHE"] = ""  # every test measures
    gc.disable()  # until all tests are collected


def pytest_collection_finish() -> None:
    """Torch and the tests stay to the end: Python's garbage collector need not look through them again and again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["CONVOY_RUNS"], ignore_errors=True)


@dataclass(frozen=True)
class Belongings:
    """The resources of the test process at one moment, as descriptive texts."""

    processes: frozenset[str]
    threads: frozenset[str]
    ports: frozenset[str]
    files: frozenset[str]

    def left_since(self, before: "Belongings") -> dict[str, list[str]]:
        kinds = ("processes", "threads", "ports", "files")
        left = {kind: sorted(getattr(self, kind) - getattr(before, kind)) for kind in kinds}
        return {kind: things for kind, things in left.items() if things}


_parents: dict[int, int] = {}
"""Of each process that was there when somebody looked last. psutil would read them all again, at every look."""


def children() -> Iterator[psutil.Process]:
    global _parents
    found: dict[int, int] = {}
    for pid in psutil.pids():
        with suppress(psutil.Error):
            found[pid] = _parents[pid] if pid in _parents else psutil.Process(pid).ppid()
    _parents = found
    for pid in found:
        above = found[pid]
        while above in found and above != os.getpid():
            above = found[above]
        if above == os.getpid():
            with suppress(psutil.Error):
                yield psutil.Process(pid)


def belongings() -> Belongings:
    """Return child processes, Python threads, listening ports, open repository files; in CI, new files too."""
    here = psutil.Process()
    processes = set()
    for child in children():
        if child.pid == nursery_pid():
            continue
        try:
            processes.add(f"{child.pid} {' '.join(child.cmdline())[:200]}")
        except psutil.Error:
            continue
    started = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    threads = {
        f"{thread.name} ({thread.ident})" for thread in started
    }  # autograd keeps one of its own for each accelerator
    ports = {
        f"{connection.laddr.ip} port {connection.laddr.port}"
        for connection in here.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    opened = {f"open: {entry.path}" for entry in here.open_files() if _is_product(Path(entry.path))}
    # Elsewhere somebody may be at work in the same folder while the tests run.
    present = os.listdir() if os.environ.get("CI") else []
    new = {f"in the working folder: {name}" for name in present if name not in CACHES}
    return Belongings(frozenset(processes), frozenset(threads), frozenset(ports), frozenset(opened | new))


def _is_product(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not CACHES.intersection(path.relative_to(ROOT).parts)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves processes, threads, listening ports or files behind."""
    folder = Path.cwd()
    before, variables = belongings(), dict(os.environ)
    yield
    # A command that ran here may have set some for its devices; those that a later test starts would take them for theirs.
    for name in {name for name, _ in set(variables.items()) ^ set(os.environ.items())} - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in variables:
            os.environ[name] = variables[name]
    assert Path.cwd() == folder, f"the test left the working folder {folder} for {Path.cwd()}"
    deadline_s = time.monotonic() + GRACE_S
    while (left := belongings().left_since(before)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not left, f"the test left behind: {left}"


@pytest.fixture(autouse=True, scope="session")
def no_nursery_left() -> Iterator[None]:
    """End the nursery process of the tests with the session."""
    yield
    stop_nursery()


@pytest.fixture
def free_port() -> int:
    """Return a port of 127.0.0.1 without a listener."""
    return unused_port()
