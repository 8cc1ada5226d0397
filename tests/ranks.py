"""Runs a test function on real processes, or on threads, and returns what each device returned.

One process imports torch and is then forked once per device: that takes the time of one import, not of one per device.
A function for processes lives in a test module under its own name and takes and returns what JSON can hold.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def on_processes(
    devices: int,
    target: str,
    *arguments: Any,
    timeout_s: float = 20.0,
    staged: bool = False,
    joined: bool = True,
    limit_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call ``function(group, *arguments)`` in every one of ``devices`` processes; the results in device order.

    Args:
        target: "tests.test_group:function".
        timeout_s, staged: for the group.
        joined: if false the function gets the device's index in place of a group, and joins by itself.
        limit_s: after this time everything is ended.

    A device that was killed or stopped by a signal gives None. One that raised fails the test, with its traceback.
    """
    order = {"target": target, "arguments": arguments, "devices": devices, "joined": joined}
    order["join"] = {"timeout_s": timeout_s, "staged": staged}
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    with tempfile.TemporaryDirectory() as folder:
        nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", folder, json.dumps(order)],
            cwd=ROOT,
            env={**inherited, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
        )
        try:
            status = nursery.wait(limit_s)
        finally:
            # Its children hold a pipe of it, and end with it; a stopped one needs the signal.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(nursery.pid, signal.SIGKILL)
            nursery.wait()
        assert status == 0, f"the test processes could not be started (exit status {status})"
        return [_result(Path(folder), device) for device in range(devices)]


def _result(folder: Path, device: int) -> Any:
    error = folder / f"error.{device}"
    assert not error.exists(), f"on device {device}:\n{error.read_text()}"
    result = folder / f"result.{device}"
    return json.loads(result.read_text()) if result.exists() else None


def _nurse(folder: str, order: dict[str, Any]) -> None:
    """Fork the devices and wait for them; the ones that were stopped are killed when only they are left."""
    from convoy.execute import processes  # torch is imported once, here

    module_name, function_name = order["target"].split(":")
    function = getattr(importlib.import_module(module_name), function_name)
    read_end, _write_end = os.pipe()
    port = free_port()
    running, stopped = set(), set()
    for device in range(order["devices"]):
        pid = os.fork()
        if pid == 0:
            os.close(_write_end)
            os.environ.update(
                RANK=str(device),
                WORLD_SIZE=str(order["devices"]),
                LOCAL_RANK=str(device),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                CONVOY_DEVICE=os.environ.get("CONVOY_DEVICE", "cpu"),
                CONVOY_PARENT_PIPE=str(read_end),
            )
            processes.watch_parent()
            _be_device(Path(folder), device, function, order)
        running.add(pid)
    while running:
        pid, status = os.waitpid(-1, os.WUNTRACED)
        running.discard(pid)
        if os.WIFSTOPPED(status):
            stopped.add(pid)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_device(folder: Path, device: int, function: Any, order: dict[str, Any]) -> None:
    import torch

    from convoy.execute.processes import join

    torch.set_num_threads(1)
    try:
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
    _nurse(sys.argv[1], json.loads(sys.argv[2]))
