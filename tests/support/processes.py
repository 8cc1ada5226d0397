"""Run a test function on real processes and return the result of each device.

One process, the nursery, imports torch once for the whole test session and is forked once per device: that takes
milliseconds where a fresh interpreter takes seconds. It never computes itself, so its forks start clean.
A function for processes lives in a test module under its own name, and takes and returns what JSON can hold.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")

_nursery: subprocess.Popen[bytes] | None = None


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port without a listener."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def on_processes(
    devices: int,
    target: str,
    *arguments: Any,
    timeout_s: float = 20.0,
    joined: bool = True,
    limit_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(group, *arguments)`` in every one of ``devices`` processes; the results in device order.

    A device that was killed or stopped by a signal gives None. One that raised fails the test, with its traceback.

    Args:
        target: "tests.comm.test_group:function".
        timeout_s: for the group.
        joined: if false the function gets the device's index in place of a group, and joins by itself.
        limit_s: after this time everything is ended, and the test fails.
        environment: further variables for the devices.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = {
            "folder": folder,
            "target": target,
            "arguments": arguments,
            "devices": devices,
            "joined": joined,
            "join": {"timeout_s": timeout_s},
            "environment": environment or {},
        }
        nursery = _started_nursery()
        assert nursery.stdin is not None
        nursery.stdin.write(json.dumps(order).encode() + b"\n")
        nursery.stdin.flush()
        if not _answered(nursery, limit_s):
            stop_nursery()
            raise AssertionError(f"{target} on {devices} processes did not end within {limit_s:g} s")
        return [_result(Path(folder), device) for device in range(devices)]


def nursery_pid() -> int | None:
    """Return the one process that may outlive a test."""
    return _nursery.pid if _nursery else None


def stop_nursery() -> None:
    """End the nursery and the devices still running, which share its process group."""
    global _nursery
    if _nursery is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(_nursery.pid, signal.SIGKILL)
    _nursery.wait()
    for stream in (_nursery.stdin, _nursery.stdout):
        if stream is not None:
            stream.close()
    _nursery = None


def _started_nursery() -> subprocess.Popen[bytes]:
    global _nursery
    if _nursery is None:
        inherited = {name: value for name, value in os.environ.items() if name not in PLACE}
        _nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes"],
            cwd=ROOT,
            env={**inherited, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    return _nursery


def _answered(nursery: subprocess.Popen[bytes], limit_s: float) -> bool:
    assert nursery.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(nursery.stdout, selectors.EVENT_READ)
        return bool(selector.select(limit_s)) and os.read(nursery.stdout.fileno(), 1) == b"\n"


def _result(folder: Path, device: int) -> Any:
    error = folder / f"error.{device}"
    assert not error.exists(), f"on device {device}:\n{error.read_text()}"
    result = folder / f"result.{device}"
    return json.loads(result.read_text()) if result.exists() else None


# ------------------------------------------------------------------------------------------------- in the nursery


def _serve_orders() -> None:
    """Run one order after another until the test session ends."""
    gc.disable()  # while the modules load
    import torch._dynamo  # noqa: F401 - each optimizer and each trace imports it: here once

    import convoy.api  # noqa: F401

    gc.enable()

    answers = os.dup(1)
    os.dup2(2, 1)  # what devices print must not look like an answer
    for line in sys.stdin:
        _nurse(json.loads(line))
        os.write(answers, b"\n")


def _nurse(order: dict[str, Any]) -> None:
    """Fork the devices and wait for them; kill stopped ones when only they remain."""
    with contextlib.suppress(Exception):  # a module that cannot be imported fails in the devices, where it is told
        importlib.import_module(order["target"].split(":")[0])
    gc.freeze()  # a collection in a device would go over all of torch, and copy the pages that it shares with the others
    read_end, write_end = os.pipe()
    port = free_port()
    running, stopped = set(), set()
    for device in range(order["devices"]):
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.environ.update(
                RANK=str(device),
                WORLD_SIZE=str(order["devices"]),
                LOCAL_RANK=str(device),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                CONVOY_DEVICE="cpu",
                CONVOY_PARENT_PIPE=str(read_end),
            )
            os.environ.update(order["environment"])
            _be_device(device, order)
        running.add(pid)
    while running:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        running.discard(pid)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(read_end)
    os.close(write_end)


def _be_device(device: int, order: dict[str, Any]) -> None:
    import torch

    from convoy.comm.processes import join
    from convoy.machine.process import watch_parent

    watch_parent()
    torch.set_num_threads(1)
    folder = Path(order["folder"])
    try:
        module_name, function_name = order["target"].split(":")
        function = getattr(importlib.import_module(module_name), function_name)
        if order["joined"]:
            with join(**order["join"]) as group:
                result = function(group, *order["arguments"])
        else:
            result = function(device, *order["arguments"])
        (folder / f"result.{device}").write_text(json.dumps(result))
    except BaseException:
        (folder / f"error.{device}").write_text(traceback.format_exc())
    finally:
        # The nursery's own exit handlers are not the device's.
        os._exit(0)


if __name__ == "__main__":
    _serve_orders()
