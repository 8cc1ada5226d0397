"""Rendezvous with a device that is slow to answer."""

import threading

import pytest
import torch

from convoy.comm import processes
from convoy.comm.connection import credentials_of
from convoy.comm.environment import ProcessEnv
from convoy.comm.failure import Health, HealthServer, NoAnswer
from convoy.comm.processes import meet
from convoy.comm.store import close_store, host_store
from convoy.errors import DeviceLostError


def met(monkeypatch: pytest.MonkeyPatch, slow: int) -> list[int | str]:
    """Return each device's number of peers or its error, where device 1 answers the first requests late."""
    asked, ask = [0], HealthServer.ping

    def ping(self: HealthServer, device: int) -> Health | NoAnswer:
        asked[0] += device
        return NoAnswer.FROZEN if device == 1 and asked[0] <= slow else ask(self, device)

    monkeypatch.setattr(HealthServer, "ping", ping)
    monkeypatch.setattr(processes, "GREETING_S", 0.2)
    credentials = credentials_of(ProcessEnv(0, 2, 0, 2, "127.0.0.1", 1, hosted=False, attempt=0))
    port = host_store("127.0.0.1", credentials)
    found: list[int | str] = ["", ""]

    def live(device: int) -> None:
        env = ProcessEnv(device, 2, device, 2, "127.0.0.1", port, hosted=False, attempt=0)
        try:
            group = meet(env, torch.device("cpu"), 1.5, 0, credentials)
        except DeviceLostError as error:
            found[device] = str(error)
            return
        found[device] = group.devices
        group.close()

    threads = [threading.Thread(target=live, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    close_store("127.0.0.1", port)  # where it failed
    return found


def test_slow_first_reply_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with 25 processes on two cores, 2 of 290 trainings failed to start."""
    assert met(monkeypatch, slow=3) == [2, 2]


def test_silent_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = met(monkeypatch, slow=10**9)
    assert "device 1" in str(first)
    assert "cannot reach it" in str(first)
